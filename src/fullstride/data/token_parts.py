"""A token file that is being made: raw files in a directory beside it, and a record of how far they are.

A process that is killed leaves them, and the next one goes on from the last piece that is recorded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.data.documents import Place
from fullstride.data.report import Report
from fullstride.data.tokens import DTYPES, Origin, write_header
from fullstride.files import replace_text, sync

RAW = ("tokens", "documents", "supervised")  # documents: lengths, int64; supervised: a byte a token
COPIED = 16 * 2**20  # bytes at a time, a multiple of eight
RECORD = "record.json"


@dataclass(frozen=True)
class Written:
    """Numbers of tokens and documents, of labels among the tokens, and of documents in which not all are labels."""

    tokens: int = 0
    documents: int = 0
    supervised: int = 0
    masked: int = 0


class Parts:
    """The raw files of the token file `out`. `settings` says what they are made from: others are not gone on with."""

    def __init__(self, out: Path, origin: Origin, settings: dict[str, Any]) -> None:
        self.directory = out.with_name(f".{out.name}.parts")
        self.written = Written()
        self._out, self._origin = out, origin
        self._settings = json.loads(json.dumps(settings))

    def resume(self, report: Report) -> Place:
        """The place up to which an earlier process came, whose report is added to `report`; else the first place, and
        empty files."""
        try:
            found = json.loads((self.directory / RECORD).read_text(encoding="utf-8"))
            if found["settings"] == self._settings:
                place, self.written = Place(**found["place"]), Written(**found["written"])
                for name in RAW:
                    if (self.directory / name).stat().st_size < self._size(name):
                        raise ValueError(f"{name} is shorter than recorded")
                    os.truncate(self.directory / name, self._size(name))
                for event in found["events"]:
                    report.add_all(event["file"], event["reason"], event["lines"])
                return place
        except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is of no use
            self.written = Written()
        self.drop()
        self.directory.mkdir(parents=True)
        for name in RAW:
            (self.directory / name).touch()
        return Place()

    def _size(self, name: str) -> int:
        count = self.written.documents if name == "documents" else self.written.tokens
        return count * {"tokens": DTYPES[self._origin.dtype].itemsize, "documents": 8, "supervised": 1}[name]

    def append(
        self, ids: Sequence[np.ndarray], labels: Sequence[np.ndarray | None], after: Place, report: Report
    ) -> None:
        """Documents, each int [n] with bool [n] (None: all); on the disk when this returns, and recorded with the
        place behind them."""
        lengths = np.array([len(document) for document in ids], dtype="<i8")
        dtype = DTYPES[self._origin.dtype]
        bits = [np.ones(len(d), bool) if mask is None else mask for d, mask in zip(ids, labels, strict=True)]
        parts = {
            "tokens": np.concatenate([np.empty(0, dtype), *ids]).astype(dtype, copy=False),
            "documents": lengths,
            "supervised": np.concatenate([np.empty(0, bool), *bits]).view(np.uint8),
        }
        for name, values in parts.items():
            with (self.directory / name).open("ab") as file:
                file.write(values.data)
                file.flush()
                os.fsync(file.fileno())
        self.written = Written(
            self.written.tokens + int(lengths.sum()),
            self.written.documents + len(lengths),
            self.written.supervised + int(parts["supervised"].sum(dtype=np.int64)),
            self.written.masked + sum(mask is not None for mask in labels),
        )
        record = {"settings": self._settings, "place": dataclasses.asdict(after), "events": report.events()}
        replace_text(self.directory / RECORD, json.dumps(record | {"written": dataclasses.asdict(self.written)}))

    def finish(self) -> None:
        """Put the token file together; the raw files go."""
        whole = put_together(self.directory, self._origin, self.written)
        sync(whole)
        whole.replace(self._out)
        sync(self._out.parent)
        self.drop()

    def drop(self) -> None:
        """Remove the raw files."""
        shutil.rmtree(self.directory, ignore_errors=True)


def put_together(raw: Path, origin: Origin, written: Written) -> Path:
    """A token file of the raw files in `raw`, where it is made too."""
    whole, masked = raw / "whole", written.masked > 0
    with whole.open("wb") as out:
        write_header(out, origin, written.documents, written.tokens, masked)
        ends = np.cumsum(np.fromfile(raw / "documents", "<i8"), dtype="<i8")
        out.write(np.concatenate([np.zeros(1, "<i8"), ends]).data)
        for piece in _pieces(raw / "tokens"):
            out.write(piece)
        for piece in _pieces(raw / "supervised") if masked else ():
            out.write(np.packbits(np.frombuffer(piece, np.uint8), bitorder="little").data)
    return whole


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(COPIED):
            yield piece
