"""The documents of text and JSONL files, some megabytes at a time, from any place on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fullstride.data.readers import opened
from fullstride.data.report import Report
from fullstride.data.rows import BadRow, Row, parse_record, plain_text, read_record
from fullstride.errors import ConfigError

PIECE = 4 * 2**20  # bytes of input in a piece
LINES = (".jsonl", ".json")  # endings of files with a document a line


@dataclass(frozen=True)
class Place:
    """How far files are read: number of the file, bytes and lines of it."""

    file: int = 0
    offset: int = 0
    line: int = 0


@dataclass
class Piece:
    """Some documents of one file: plain text, and rows of other shapes. `after` is the place behind them, `report`
    what was dropped."""

    texts: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    after: Place = Place()
    num_bytes: int = 0
    report: Report = field(default_factory=Report)


def pieces(files: Sequence[Path], place: Place) -> Iterator[Piece]:
    """The documents of `files` from `place` on. Raises ConfigError for what cannot be read.

    A file is one document; of JSONL a line is one: {"text"}, or a row of one of the shapes of data/rows.
    """
    for number in range(place.file, len(files)):
        file, start = files[number], place if number == place.file else Place(number)
        if file.suffix.lower() in LINES:
            yield from _lines(number, file, start)
        else:
            yield _whole(number, file)


def _whole(number: int, file: Path) -> Piece:
    with opened(file) as stream:
        content = stream.read()
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: not UTF-8 at byte {error.start}; convert it, or name it .jsonl if it has an object a line"
        ) from None
    piece = Piece([text], after=Place(number + 1), num_bytes=len(content))
    if not text.strip():
        piece.texts.clear()
        piece.report.add(str(file), "empty text", 1)
    return piece


def _lines(number: int, file: Path, place: Place) -> Iterator[Piece]:
    piece = Piece()
    with opened(file) as stream:
        stream.seek(place.offset)
        for line in stream:  # only "\n" ends one
            place = dataclasses.replace(place, offset=place.offset + len(line), line=place.line + 1)
            try:
                _add(piece, line, str(file), place.line)
            except BadRow as bad:
                piece.report.add(str(file), str(bad), place.line)
            piece.num_bytes += len(line)
            if piece.num_bytes >= PIECE:
                piece.after = place
                yield piece
                piece = Piece()
    piece.after = Place(number + 1)
    yield piece


def _add(piece: Piece, line: bytes, file: str, number: int) -> None:
    """Put the document of a line, unless it is blank, into `piece`."""
    record = read_record(line)
    if record is None:
        return
    if "text" not in record or "messages" in record:
        piece.rows.append(parse_record(record, file, number)[0])
        return
    text = plain_text(record["text"])
    if not text.strip():
        raise BadRow("empty text")
    piece.texts.append(text)
