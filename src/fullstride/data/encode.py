"""From what `data` names to encoded documents: read, rendered, tokenised, or found in the cache."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from fullstride.data import chat, readers, render, rows
from fullstride.data.cache import Cache, Entry, tokenizer_state
from fullstride.data.chat import Encoder, nothing_left
from fullstride.data.examples import Encoded, Examples
from fullstride.data.mix import mix
from fullstride.data.readers import Record, Scan, Source
from fullstride.data.report import REPEATED, Report
from fullstride.data.rows import rows_of
from fullstride.data.sources import Part
from fullstride.data.tokens import DIGITS, Origin
from fullstride.errors import ConfigError, DataError

# what decides, beside the data and the settings, what rows become
CODE = (readers, rows, render, chat)
LIBRARIES = ("transformers", "tokenizers", "jinja2")

Scans = dict[Source, Scan]


class SourceEncoder:
    """Sources as encoded documents: `encoder` says how, its report gets what is dropped. `advance` is told how many
    records are done."""

    def __init__(self, encoder: Encoder, cache: Cache, advance: Callable[[int], None]) -> None:
        self._encoder, self._cache, self._advance = encoder, cache, advance
        tokenizer = encoder.tokenizer
        template = str(tokenizer.chat_template)
        tells_date = "strftime_now" in template and "date_string" not in template
        self._settings: dict[str, Any] = {
            **{name: getattr(encoder, name) for name in ("seq_len", "truncate", "supervise", "thinking")},
            "tokenizer": tokenizer_state(tokenizer),
            "code": [inspect.getsource(module) for module in CODE],
            "libraries": [metadata.version(name) for name in LIBRARIES],
            "date": time.strftime("%Y-%m-%d") if tells_date else "",
        }
        vocabulary = len(tokenizer)
        self._origin = Origin(vocabulary, "", self._settings["tokenizer"][:DIGITS], 0)

    def encode(self, source: Source, scan: Scan) -> Encoded:
        """The documents of one source."""
        told = 0

        def records() -> Iterator[tuple[int, Record]]:
            nonlocal told
            for numbered in source.records():
                told += 1
                self._advance(1)
                yield numbered
            if source.state() != scan.state:
                raise ConfigError(f"{source.name} changed while it was read; start again once it is whole")

        def make() -> Entry:
            report = Report()
            encoder = dataclasses.replace(self._encoder, report=report)
            documents = encoder.encode_all(rows_of(records(), source.name, report))
            return Entry(documents, self._origin, report)

        found = self._cache.get({**self._settings, "data": scan.digest}, source.name, self._encoder.report, make)
        self._advance(max(0, scan.count - told))
        return found

    def examples(self, parts: Sequence[Part], scans: Scans, seed: int) -> tuple[Examples, list[str]]:
        """The documents of an epoch, and what weights make of them in words. Raises DataError without any."""
        encoded = [[self.encode(source, scans[source]) for source in part.sources] for part in parts]
        everything = [source for part in encoded for source in part]
        if not any(map(len, everything)):
            hints = [hint for part in parts for source in part.sources if (hint := source.hint())]
            raise nothing_left(self._encoder.seq_len, self._encoder.report, hints)
        weights = [part.weight for part in parts if part.weight is not None]
        if not weights:
            return Examples(everything), []
        names, counts = [part.name for part in parts], [sum(map(len, part)) for part in encoded]
        if 0 in counts:
            raise DataError(
                f"{names[counts.index(0)]} has a weight and no row to train on: "
                f"{'; '.join(self._encoder.report.summary()) or 'it is empty'}; correct it or leave it out"
            )
        chosen, notes = mix(names, counts, weights, seed)
        firsts = np.cumsum([0, *counts])
        return Examples(everything, np.concatenate([a + b for a, b in zip(chosen, firsts[:-1], strict=True)])), notes


def scan_all(parts: Sequence[Part]) -> Scans:
    """What all sources hold."""
    return {source: source.scan() for source in dict.fromkeys(source for part in parts for source in part.sources)}


def report_repeated(examples: Examples, report: Report, known: Examples | None = None) -> None:
    """Count documents that come again after encoding, which is not a fault: they stay. With `known`: those in there."""
    hashes, files = examples.facts.hashes, examples.files()
    if known is None:
        again = np.ones(len(hashes), dtype=bool)
        again[np.unique(hashes, return_index=True)[1]] = False
        reason = "the same as an earlier one (kept)"
    else:
        again, reason = np.isin(hashes, known.facts.hashes), "also in the training data (kept)"
    told = set()
    for i in np.flatnonzero(again).tolist():
        place = examples.sources[int(files[i])].file, int(examples.facts.lines[i])
        if place not in told:
            told.add(place)
            report.add(place[0], reason, place[1], REPEATED)
