"""Token files: documents as numbers, one after the other, in a safetensors file that is mapped, not read.

A file holds the tensors `documents`, int64 [n + 1], where each of the n documents begins and the last one ends;
`tokens`, uint16 [N] where the vocabulary fits, else uint32; and, where not every token is a label, `supervised`, uint8
[ceil(N / 8)], a bit a token, lowest first. Its metadata says with what it was made (Origin). Any reader of safetensors
opens it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fullstride.errors import ConfigError

FORMAT = "fullstride tokens 1"
DTYPES = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4"), "I64": np.dtype("<i8"), "U8": np.dtype("u1")}
MOST_HEADER = 2**20  # bytes; ours has some hundreds
ALIGNMENT = 64
EDGE = 2**20  # bytes that a digest reads at each end
DIGITS = 16  # of a digest in hexadecimal; 64 bits


@dataclass(frozen=True)
class Origin:
    """What the ids mean: the number of ids there are, whose they are (a directory or a Hub id), a hash of its
    vocabulary, and the token that ends a document."""

    vocab_size: int
    tokenizer: str
    tokenizer_hash: str
    end_token: int

    @property
    def dtype(self) -> str:
        """Of tokens, as safetensors calls it."""
        return "U16" if self.vocab_size <= 2**16 else "U32"


def vocabulary_hash(vocabulary: Mapping[str, int]) -> str:
    """A SHA-256 over tokens and their ids: what ids mean, however a tokenizer's files are written."""
    digest = hashlib.sha256()
    for token, number in sorted(vocabulary.items(), key=lambda item: item[1]):
        digest.update(f"{number} {token}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()[:DIGITS]


def write_header(file: BinaryIO, origin: Origin, num_documents: int, num_tokens: int, masked: bool) -> None:
    """The beginning of a token file; documents, tokens and (with `masked`) supervision bits follow as raw numbers."""
    sizes = {"documents": ("I64", num_documents + 1), "tokens": (origin.dtype, num_tokens)}
    if masked:
        sizes["supervised"] = ("U8", -(-num_tokens // 8))
    metadata = {"format": FORMAT} | {name: str(value) for name, value in dataclasses.asdict(origin).items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, count) in sizes.items():
        begin, end = end, end + count * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    file.write(struct.pack("<Q", len(text)) + text)


class TokenFile:
    """A token file, mapped: `tokens` [N], `documents` int64 [n + 1], `supervised` bits [ceil(N / 8)] or None.

    Raises ConfigError for a file that is none, or is damaged. Ids are looked at when they are read: `span`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            header, begin = self._read_header()
            self.origin = self._origin(header.pop("__metadata__", None))
            arrays = {name: self._map(name, entry, begin) for name, entry in header.items()}
            self.tokens, self.documents = arrays.pop("tokens"), arrays.pop("documents")
            self.supervised: np.ndarray | None = arrays.pop("supervised", None)
            self._check(arrays)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; name a readable token file") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
            raise ConfigError(
                f"{path} is no token file, or a damaged one ({error}); make it (again) with fullstride tokenize"
            ) from None

    def _read_header(self) -> tuple[dict[str, Any], int]:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(MOST_HEADER, size - 8):
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(file.read(length))
        return header, 8 + length

    def _origin(self, metadata: Any) -> Origin:
        if metadata["format"] != FORMAT:
            raise ValueError(f"its format is {metadata['format']!r}, not {FORMAT!r}")
        found = Origin(
            int(metadata["vocab_size"]),
            metadata["tokenizer"],
            metadata["tokenizer_hash"],
            int(metadata["end_token"]),
        )
        if not isinstance(found.tokenizer, str) or not isinstance(found.tokenizer_hash, str):
            raise ValueError("tokenizer and tokenizer_hash must be text")
        if not 0 < found.vocab_size <= 2**31 or not 0 <= found.end_token < found.vocab_size:
            raise ValueError(f"vocabulary of {found.vocab_size}, end token {found.end_token}")
        return found

    def _map(self, name: str, entry: Any, begin: int) -> np.ndarray:
        dtype, (count,), (first, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not 0 <= first <= end <= self.path.stat().st_size - begin or end - first != count * dtype.itemsize:
            raise ValueError(f"{name} is cut off")
        return np.memmap(self.path, dtype, "r", begin + first, (count,)) if count else np.empty(0, dtype)

    def _check(self, unknown: Mapping[str, Any]) -> None:
        total = len(self.tokens)
        if unknown:
            raise ValueError(f"unknown tensors {', '.join(unknown)}")
        if self.tokens.dtype != DTYPES[self.origin.dtype] or self.documents.dtype != DTYPES["I64"]:
            raise ValueError("its tensors have other dtypes")
        if self.supervised is not None and self.supervised.shape != (-(-total // 8),):
            raise ValueError("supervised has another length")
        ends = np.asarray(self.documents)
        if len(ends) < 1 or ends[0] != 0 or ends[-1] != total or (np.diff(ends) <= 0).any():
            raise ValueError("documents do not follow one another to the last token")

    def __len__(self) -> int:
        return len(self.tokens)

    def span(self, begin: int, end: int) -> np.ndarray:
        """Ids [begin, end) as int32. Raises ConfigError for one that the vocabulary does not have."""
        ids = self.tokens[begin:end]
        if len(ids) and int(ids.max()) >= self.origin.vocab_size:
            at = begin + int(np.argmax(ids >= self.origin.vocab_size))
            raise ConfigError(
                f"{self.path}: token {at} is {self.tokens[at]}, but the vocabulary has {self.origin.vocab_size}; "
                "the file is damaged: make it again with fullstride tokenize"
            )
        return ids.astype(np.int32)

    def labels(self, begin: int, end: int) -> np.ndarray | None:
        """Which of the tokens [begin, end) are labels, bool; None: all."""
        if self.supervised is None:
            return None
        bits = np.unpackbits(self.supervised[begin // 8 : -(-end // 8)], bitorder="little")
        return bits[begin % 8 :][: end - begin].astype(bool)

    def digest(self) -> str:
        """Counts, and a SHA-256 over the header's words and both ends: other data shows there, at no cost."""
        digest = hashlib.sha256(f"{self.origin.tokenizer_hash} {len(self.documents)} {len(self)} ".encode())
        with self.path.open("rb") as file:
            digest.update(file.read(EDGE))
            file.seek(max(0, self.path.stat().st_size - EDGE))
            digest.update(file.read())
        return f"{len(self)} tokens (sha256 {digest.hexdigest()[:DIGITS]})"
