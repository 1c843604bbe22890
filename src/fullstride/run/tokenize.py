"""Text and JSONL -> a token file: on all cores, in bounded memory, and going on where it was stopped."""

from __future__ import annotations

import dataclasses
import glob
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.config.commands import TokenizeConfig
from fullstride.config.keys import build
from fullstride.data.chat import Encoder
from fullstride.data.documents import Piece, pieces
from fullstride.data.report import Report
from fullstride.data.token_parts import Parts
from fullstride.data.tokens import DTYPES, Origin, TokenFile, vocabulary_hash
from fullstride.errors import ConfigError, DataError
from fullstride.files import locked
from fullstride.run.directory import check_writable
from fullstride.run.progress import Meter
from fullstride.run.source import find_model, load_tokenizer

UNLIMITED = 2**31  # tokens of a row: none is cut
AHEAD = 1  # pieces at the tokenizer beyond the one that is waited for


@dataclass(frozen=True)
class TokenizeResult:
    """What a token file holds, and how many rows were dropped."""

    out: Path
    documents: int
    tokens: int
    supervised: int
    dropped: int


def tokenize(**keys: Any) -> TokenizeResult:
    """Tokenise as `fullstride tokenize --key value ...` does; keys as keyword arguments, with underscores.

    Raises ConfigError (with its kinds UsageError and DataError) for what cannot be tokenised.
    """
    return run_tokenize(build(TokenizeConfig, keys))


def run_tokenize(config: TokenizeConfig) -> TokenizeResult:
    """See `tokenize`. The token file appears whole; what a stopped call leaves beside it, the next one goes on with."""
    files = input_files(config.data)
    directory = find_model(config.model)
    out = Path(config.out or f"tokens/{files[0].stem}.tokens").resolve()
    if out.exists() and not config.overwrite:
        raise ConfigError(f"out: {out} exists; give --overwrite, or choose another --out")
    if out.exists():
        try:
            TokenFile(out)
        except ConfigError:
            raise ConfigError(f"out: {out} is no token file, and is not replaced; choose another --out") from None
    if out in files:
        raise ConfigError(f"out: {out} is what is to be tokenised; choose another --out")
    check_writable("out", out.parent)
    tokenizer = load_tokenizer(directory)
    name = str(directory) if Path(config.model).expanduser().is_dir() else config.model
    origin, report = origin_of(tokenizer, name), Report()
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    parts = Parts(out, origin, dataclasses.asdict(origin) | {"files": stats})
    with _alone(out):
        try:
            _fill(parts, files, PieceEncoder(tokenizer, origin), report)
        except ConfigError:  # what was read must change: what was made of it is of no use
            parts.drop()
            raise
        for line in report.summary():
            print(f"data: {line}")
        if not parts.written.documents:
            parts.drop()
            found = "; ".join(report.summary()) or "the files are empty"
            raise DataError(f"data: no document to tokenise in {config.data}: {found}")
        parts.finish()
    written = parts.written
    print(
        f"{written.documents:,} documents, {written.tokens:,} tokens ({written.supervised:,} supervised), "
        f"{origin.dtype.lower().replace('u', 'uint')}, vocabulary {origin.vocab_size:,}: {out}"
    )
    return TokenizeResult(out, written.documents, written.tokens, written.supervised, report.total)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keeps other processes from making `out`; the kernel lets go of it however this one ends. Raises ConfigError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = out.with_name(f".{out.name}.lock")
    with locked(lock, f"out: another process is making {out}; wait for it, or choose another --out", out):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _fill(parts: Parts, files: list[Path], encoder: PieceEncoder, report: Report) -> None:
    """Tokenise what `parts` has not got yet."""
    place, sizes = parts.resume(report), [file.stat().st_size for file in files]
    with Meter("tokenize", sum(sizes), sum(sizes[: place.file]) + place.offset) as meter, ThreadPoolExecutor(1) as pool:
        # the tokenizer's threads work on a piece while the one before is written here, and the next one is read
        under_way: deque[tuple[Piece, Future[list[Any]]]] = deque()
        for piece in chain(pieces(files, place), [None]):
            if piece is not None:
                under_way.append((piece, pool.submit(encoder.texts, piece)))
            while under_way and (piece is None or len(under_way) > AHEAD):
                ready, encodings = under_way.popleft()
                ids, labels = encoder.documents(ready, encodings.result())
                report.merge(ready.report)
                parts.append(ids, labels, ready.after, report)
                meter.advance(ready.num_bytes)


def input_files(names: str, key: str = "data") -> list[Path]:
    """The files of a comma-separated list of names and patterns, a pattern's in order. Raises ConfigError, which names
    `key`, for none."""
    found: list[Path] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        given = [name] if Path(name).is_file() else sorted(glob.glob(name, recursive=True))  # noqa: PTH207 (absolute too)
        matching = [Path(path).resolve() for path in given if Path(path).is_file()]
        if not matching:
            raise ConfigError(f"{key}: no such file: {name}; give files or patterns, such as 'texts/*.txt'")
        found += matching
    if not found:
        raise ConfigError(f"{key}: no file in {names!r}; give files or patterns, such as 'texts/*.txt'")
    return list(dict.fromkeys(found))


def origin_of(tokenizer: Any, name: str) -> Origin:
    """What the ids of `tokenizer`, which is called `name`, mean. Raises ConfigError for one that cannot be used."""
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"model: {name} has no tokenizer.json, which tokenising on all cores needs")
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no end token: set eos_token in its tokenizer_config.json")
    vocabulary = tokenizer.get_vocab()
    return Origin(max(vocabulary.values()) + 1, name, vocabulary_hash(vocabulary), int(tokenizer.eos_token_id))


class PieceEncoder:
    """Documents as ids: a text between the tokenizer's first token, if it puts one, and its end token; a row of
    another shape as fine-tuning renders it, with its answers as labels."""

    def __init__(self, tokenizer: Any, origin: Origin) -> None:
        backend = tokenizer.backend_tokenizer
        # text that spells a special token stays text: it ends no document
        self._plain = type(backend).from_str(backend.to_str())
        self._plain.encode_special_tokens = True
        self._plain.no_truncation()
        self._plain.no_padding()
        first = list(tokenizer("")["input_ids"][:1])
        self._first = first if first == [tokenizer.bos_token_id] else []
        self._tokenizer, self._origin = tokenizer, origin

    def texts(self, piece: Piece) -> list[Any]:
        """The library's encodings of its texts, made outside Python's lock."""
        return self._plain.encode_batch_fast(piece.texts, add_special_tokens=False)

    def documents(self, piece: Piece, encodings: list[Any]) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
        """Ids of each document, texts first, and which of them are labels (None: all)."""
        dtype = DTYPES[self._origin.dtype]
        ids = [np.array([*self._first, *encoding.ids, self._origin.end_token], dtype=dtype) for encoding in encodings]
        rows = Encoder(self._tokenizer, UNLIMITED, piece.report, "error").encode(piece.rows)
        labels: list[np.ndarray | None] = [None] * len(ids)
        return [*ids, *(row.ids.astype(dtype) for row in rows)], [*labels, *(row.supervised for row in rows)]
