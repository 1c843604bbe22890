"""Files and Hub splits as records, one at a time: a line of JSONL as bytes, a row of anything else as a dictionary."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from fullstride.data.rows import COLUMNS, BadRow
from fullstride.errors import ConfigError

MOST_LINE = 64 * 2**20  # bytes; memory for more is not taken, whatever the file is
HEAD = 2**16  # bytes that tell what a file is
BLOCK = 2**20  # bytes read at a time
BATCH = 256  # rows of Parquet that are in memory together

# what files begin with that are not text, and what to do with them
MAGIC = {
    b"\x1f\x8b": "compressed with gzip; unpack it (gunzip)",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it (unzstd)",
    b"BZh": "compressed with bzip2; unpack it (bunzip2)",
    b"\xfd7zXZ": "compressed with xz; unpack it (unxz)",
    b"PK\x03\x04": "a ZIP archive; unpack it (unzip)",
    b"PAR1": "Parquet; let its name end in .parquet",
    b"ARROW1": "Arrow; convert it to Parquet or JSONL",
    b"\xff\xfe": "text in UTF-16; convert it (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "text in UTF-16; convert it (iconv -f UTF-16 -t UTF-8)",
}

Record = bytes | dict[str, Any] | BadRow


@dataclass(frozen=True)
class Scan:
    """What a source holds: a SHA-256 of its content, and about how many records. `state` is another once it changes."""

    digest: str
    count: int
    state: Any


class Source(Protocol):
    """Somewhere that records come from; `name` is what messages call it."""

    @property
    def name(self) -> str:
        """For messages and the log."""
        ...

    def scan(self) -> Scan:
        """Read it once, without a look at the records."""
        ...

    def state(self) -> Any:
        """What Scan says of it."""
        ...

    def records(self) -> Iterator[tuple[int, Record]]:
        """Every record with its number, from 1; BadRow for one that cannot be read. Raises ConfigError."""
        ...

    def hint(self) -> str:
        """What it may be, if no row is found in it; "" without an idea."""
        ...


@dataclass(frozen=True)
class JsonlFile:
    """A JSONL file, or the lines [first, past) of it, counted from 1."""

    path: Path
    first: int = 1
    past: int | None = None

    @property
    def name(self) -> str:
        return str(self.path)

    def scan(self) -> Scan:
        """See Source."""
        with opened(self.path) as file:
            digest, count = hashlib.sha256(f"{self.first} {self.past} ".encode()), 0
            while block := file.read(BLOCK):
                digest.update(block)
                count += block.count(b"\n")
        return Scan(digest.hexdigest(), count if self.past is None else self.past - self.first, self.state())

    def state(self) -> Any:
        """See Source."""
        return _state(self.path)

    def records(self) -> Iterator[tuple[int, Record]]:
        """See Source."""
        with opened(self.path) as file:
            self._refuse(file.read(HEAD))
            file.seek(0)
            for number, line in enumerate(lines(file), start=1):
                if number == self.past:
                    return
                if number >= self.first:
                    yield number, line

    def _refuse(self, head: bytes) -> None:
        for magic, what in MAGIC.items():
            if head.startswith(magic):
                raise ConfigError(f"{self.path} is not JSONL but {what}")
        if b"\0" in head and not any(_is_json(line) for line in head.split(b"\n")):
            raise ConfigError(f"{self.path} is a binary file, not JSONL; name a file with a JSON object a line")

    def hint(self) -> str:
        """See Source."""
        with opened(self.path) as file:
            head = file.read(HEAD).removeprefix(b"\xef\xbb\xbf").lstrip()
        if head[:1] == b"[":
            return f"{self.path} begins with [, as a JSON array does; make JSONL of it: jq -c '.[]' IN.json > OUT.jsonl"
        if head[:1] == b"{" and head[1:].lstrip(b" \t\r").startswith(b"\n"):
            return f"{self.path} has objects over several lines; make JSONL of it: jq -c . IN.json > OUT.jsonl"
        return ""


def lines(file: BinaryIO) -> Iterator[bytes | BadRow]:
    """The lines of a binary file; BadRow for one over MOST_LINE, which is skipped.

    Only "\\n" ends a line of JSONL: str.splitlines would also cut inside a text that holds U+2028.
    """
    while line := file.readline(MOST_LINE):
        if len(line) < MOST_LINE or line.endswith(b"\n"):
            yield line
            continue
        while len(line) == MOST_LINE and not line.endswith(b"\n"):
            line = file.readline(MOST_LINE)
        yield BadRow(f"line over {MOST_LINE // 2**20} MB")


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """`path` to read from. Raises ConfigError for what cannot be read."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; name a readable file") from error


def _state(path: Path) -> tuple[int, int]:
    with opened(path) as file:
        found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class ParquetFile:
    """A Parquet file, read through pyarrow some hundred rows at a time."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def scan(self) -> Scan:
        """See Source."""
        digest = hashlib.sha256()
        with opened(self.path) as file:
            while block := file.read(BLOCK):
                digest.update(block)
            with self._table(file) as table:
                return Scan(digest.hexdigest(), table.metadata.num_rows, self.state())

    def state(self) -> Any:
        """See Source."""
        return _state(self.path)

    def records(self) -> Iterator[tuple[int, Record]]:
        """See Source."""
        number = 0
        with opened(self.path) as file, self._table(file) as table:
            columns = [name for name in table.schema_arrow.names if name in COLUMNS]
            for batch in table.iter_batches(BATCH, columns=columns):
                for record in _rows(batch):
                    number += 1
                    yield number, record

    @contextmanager
    def _table(self, file: BinaryIO) -> Iterator[Any]:
        """The file as pyarrow has it."""
        try:
            import pyarrow  # pyright: ignore[reportMissingImports]
            import pyarrow.parquet  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                f"{self.path}: Parquet needs the extra hub: pip install 'fullstride[hub]'; or convert it to JSONL"
            ) from error
        try:
            yield pyarrow.parquet.ParquetFile(file)
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(
                f"{self.path} cannot be read as Parquet ({' '.join(str(error).split())}); write it again"
            ) from error

    def hint(self) -> str:
        """See Source."""
        with opened(self.path) as file, self._table(file) as table:
            names = table.schema_arrow.names
        return "" if set(names) & set(COLUMNS) else f"{self.path} has the columns {', '.join(names)}"


def _rows(batch: Any) -> Iterator[dict[str, Any] | BadRow]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # bytes in a column of strings: which row's?
        for i in range(batch.num_rows):
            try:
                yield batch.slice(i, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield BadRow("not UTF-8")


@dataclass(frozen=True, eq=False)
class HubSplit:
    """A split of a dataset that the `datasets` library has loaded; rows are numbered from 1."""

    name: str
    rows: Any

    def scan(self) -> Scan:
        """See Source."""
        return self._scan

    @cached_property
    def _scan(self) -> Scan:
        digest, count = hashlib.sha256(), 0
        for row in self.rows:
            digest.update(json.dumps(row, default=str, sort_keys=True).encode())
            count += 1
        return Scan(digest.hexdigest(), count, None)

    def state(self) -> Any:
        """See Source."""
        return None

    def records(self) -> Iterator[tuple[int, Record]]:
        """See Source."""
        return enumerate(self.rows, start=1)

    def hint(self) -> str:
        """See Source."""
        return ""
