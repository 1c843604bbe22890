"""`python -m fullstride` is the command `fullstride`."""

import sys

from fullstride.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
