"""What a run was started with, in words that can be compared: a resumed run must find the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from fullstride.data.chat import Example
from fullstride.data.loader import Loader

EDGE = 2**20  # bytes read at each end of a file of weights
DIGITS = 16  # of a digest in hexadecimal; 64 bits


def data_digest(examples: Sequence[Example], loader: Loader) -> str:
    """Counts, and a SHA-256 over ids and masks of all documents in the order of the loader's rows."""
    digest = hashlib.sha256()
    for row in loader.rows:
        digest.update(len(row).to_bytes(8, "little"))
        for i in row:
            digest.update(len(examples[i].ids).to_bytes(8, "little"))
            digest.update(examples[i].ids.tobytes())
            digest.update(examples[i].supervised.tobytes())
    return f"{loader.rows_per_epoch} rows of {loader.num_tokens} tokens (sha256 {digest.hexdigest()[:DIGITS]})"


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
