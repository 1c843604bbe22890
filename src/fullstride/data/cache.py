"""Encoded rows on the disk, found again by what they were made of.

An entry is a directory: a token file, what is known of its documents, and a record of what was dropped on the way, with
checksums of both files. It appears whole or not at all; one that does not check out is made anew. Of several processes
that want the same entry, one makes it and the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.data.examples import Encoded, Example, Facts
from fullstride.data.report import Report
from fullstride.data.token_parts import Written, put_together
from fullstride.data.tokens import DTYPES, Origin, TokenFile
from fullstride.errors import ConfigError
from fullstride.files import whole_directory

UNUSED = 30 * 24 * 3600  # seconds after which an entry goes
MOST_BYTES = 20 * 2**30  # of all entries; the one that was not used for the longest time goes first
TOKENS, FACTS, RECORD = "documents.tokens", "facts.npy", "record.json"
NOWHERE = "off"


def open_cache(name: str, notes: list[str]) -> Cache:
    """What the key `cache-dir` means. Raises ConfigError for the home of somebody who is not known here."""
    if name == NOWHERE:
        return Cache(None, notes)
    home = os.environ.get("XDG_CACHE_HOME", "")  # the standard: an absolute path, or it does not count
    standard = f"{home if Path(home).is_absolute() else '~/.cache'}/fullstride/rows"
    try:
        return Cache(Path(name or standard).expanduser().resolve(), notes)
    except RuntimeError as error:
        if name:
            raise ConfigError(f"cache-dir: {name} is nowhere ({error}); name a directory, or off") from None
        notes.append(f"tokenised rows are not kept ({error}); --cache-dir names a place, or off")
        return Cache(None, notes)


@dataclass
class Cache:
    """Entries in `directory`; None: they are made where nothing lasts. `notes` says why nothing is kept after all."""

    directory: Path | None
    notes: list[str]

    def get(self, settings: dict[str, Any], file: str, report: Report, make: Callable[[], Entry]) -> Encoded:
        """The documents of the source that messages call `file`, made by `make` unless they are here.

        `settings` is all that they depend on (JSON). What was dropped on the way is added to `report`.
        """
        if self.directory is not None:
            name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
            try:
                return self._kept(self.directory / name, file, report, make)
            except OSError as error:
                self.notes.append(
                    f"tokenised rows are not kept ({self.directory}: {error.strerror or error}), so every start "
                    "tokenises again; --cache-dir names another place, or off"
                )
                self.directory = None
        with tempfile.TemporaryDirectory(prefix="fullstride-") as directory:
            make().write(Path(directory))
            return read_entry(Path(directory), file, report)  # what is mapped stays until nobody uses it

    def _kept(self, entry: Path, file: str, report: Report, make: Callable[[], Entry]) -> Encoded:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _turn(entry.with_suffix(".lock")):
            try:
                found = read_entry(entry, file, report)
                with suppress(OSError):  # another user's may be read too
                    os.utime(entry)
                return found
            except (OSError, ValueError, KeyError, TypeError):  # none, or a damaged one; ConfigError is a ValueError
                with whole_directory(entry, overwrite=True) as new:
                    make().write(new)
        prune(entry.parent)
        return read_entry(entry, file, report)


@dataclass
class Entry:
    """What becomes an entry: documents as they come, what their ids mean, and what is dropped meanwhile."""

    documents: Iterable[list[Example]]
    origin: Origin
    report: Report

    def write(self, directory: Path) -> None:
        """All files of an entry. Raises OSError for a disk that does not take them."""
        dtype, written, facts = DTYPES[self.origin.dtype], Written(), [Facts.of([])]
        raw = directory / "raw"
        raw.mkdir()
        with (raw / "tokens").open("wb") as tokens, (raw / "supervised").open("wb") as supervised:
            for part in self.documents:
                known = Facts.of(part)
                facts.append(known)
                for example in part:
                    tokens.write(example.ids.astype(dtype).data)
                    supervised.write(example.supervised.view(np.uint8).data)
                written = Written(
                    written.tokens + int(known.lengths.sum()),
                    written.documents + len(part),
                    written.supervised + int(known.supervised.sum()),
                    written.masked + len(part),
                )
        array = np.concatenate([known.array() for known in facts])
        array[:, 0].astype("<i8").tofile(raw / "documents")
        put_together(raw, self.origin, written).rename(directory / TOKENS)
        shutil.rmtree(raw)
        np.save(directory / FACTS, array)
        events = [[event["reason"], event["lines"]] for event in self.report.events()]
        checksums = {name: _checksum(directory / name) for name in (TOKENS, FACTS)}
        (directory / RECORD).write_text(json.dumps({"checksums": checksums, "events": events}), encoding="utf-8")


def read_entry(directory: Path, file: str, report: Report) -> Encoded:
    """An entry, mapped. Raises OSError, ValueError, KeyError or TypeError for none or a damaged one."""
    record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    for name in (TOKENS, FACTS):
        if _checksum(directory / name) != record["checksums"][name]:
            raise ValueError(f"{directory / name} is damaged")
    facts = Facts.from_array(np.load(directory / FACTS, allow_pickle=False))
    events = [(reason, [int(line) for line in lines]) for reason, lines in record["events"]]
    found = Encoded(file, TokenFile(directory / TOKENS) if len(facts.lines) else None, facts)
    for reason, lines in events:
        report.add_all(file, reason, lines)
    return found


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            value = zlib.crc32(block, value)
    return value


@contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """Hold `lock`, once nobody else does; the kernel lets go of it however the process ends."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prune(directory: Path) -> None:
    """Remove entries that were not used for long, and the oldest ones while all together are too large."""
    entries = []
    for path in directory.iterdir():
        with suppress(OSError):  # another process does the same
            size = sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else 0
            entries.append((path.stat().st_mtime, size, path))
    left = sum(size for _, size, _ in entries)
    for used, size, path in sorted(entries):
        if used > time.time() - UNUSED and left <= MOST_BYTES:
            break
        left -= size
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)  # what is mapped stays until nobody uses it
        elif used <= time.time() - UNUSED:
            path.unlink(missing_ok=True)


def tokenizer_state(tokenizer: Any) -> str:
    """A SHA-256 of all that decides what a tokenizer makes of a row."""
    state = [
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        tokenizer.eos_token_id,
        tokenizer.bos_token_id,
        sorted((i, str(token.content), token.special) for i, token in tokenizer.added_tokens_decoder.items()),
    ]
    return hashlib.sha256(json.dumps(state, sort_keys=True, default=str).encode()).hexdigest()
