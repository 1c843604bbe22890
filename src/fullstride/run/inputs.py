"""What a run was started with, in words that can be compared: a resumed run must find the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fullstride.data.tokens import DIGITS

EDGE = 2**20  # bytes read at each end of a file of weights


def weights_digest(directory: Path) -> str:
    """A SHA-256 over names, sizes and both ends of the weight files: another model shows there, at no cost."""
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as weights:
            digest.update(weights.read(EDGE))
            weights.seek(max(EDGE, size - EDGE))
            digest.update(weights.read())
    return f"sha256 {digest.hexdigest()[:DIGITS]}"
