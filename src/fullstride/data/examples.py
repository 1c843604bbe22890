"""Encoded documents: one in memory (Example), and those of whole sources, which are mapped from token files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from fullstride.data.tokens import TokenFile
from fullstride.errors import DataError


@dataclass(frozen=True)
class Example:
    """One row of token ids: `ids` int32 [n], `supervised` bool [n]: which tokens are labels.

    `supervised[0]` is False: nothing comes before the first token to predict it.
    """

    ids: np.ndarray
    supervised: np.ndarray
    file: str
    line: int


@dataclass(frozen=True)
class Facts:
    """What is known of n documents without a look at them, int64 [n] each: tokens, labels among them, the line that
    they come from, their largest id, and 64 bits of a hash of ids and mask: equal ones are equal documents."""

    lengths: np.ndarray
    supervised: np.ndarray
    lines: np.ndarray
    largest: np.ndarray
    hashes: np.ndarray

    @staticmethod
    def of(examples: Iterable[Example]) -> Facts:
        """That of documents in memory."""
        rows = [(len(e.ids), int(e.supervised.sum()), e.line, int(e.ids.max(initial=0)), _hash(e)) for e in examples]
        return Facts.from_array(np.array(rows, dtype=np.int64).reshape(-1, 5))

    @staticmethod
    def from_array(array: np.ndarray) -> Facts:
        """Of int64 [n, 5], a column each."""
        return Facts(*np.ascontiguousarray(array.T))

    def array(self) -> np.ndarray:
        """int64 [n, 5]."""
        return np.stack([self.lengths, self.supervised, self.lines, self.largest, self.hashes], axis=1)


def _hash(example: Example) -> int:
    digest = hashlib.blake2b(example.ids.tobytes(), digest_size=8)
    digest.update(np.packbits(example.supervised).tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


@dataclass(frozen=True)
class Encoded:
    """The documents of one source: a token file, and what is known of them. `file` is what messages call the source."""

    file: str
    tokens: TokenFile | None  # None: there are none
    facts: Facts

    def __len__(self) -> int:
        return len(self.facts.lengths)

    def example(self, i: int) -> Example:
        """A copy of one."""
        assert self.tokens is not None
        begin, end = self.tokens.documents[i : i + 2].tolist()
        supervised = self.tokens.labels(begin, end)
        assert supervised is not None, "no document is all labels: its first token is none"
        return Example(self.tokens.span(begin, end), supervised, self.file, int(self.facts.lines[i]))


class Examples(Sequence[Example]):
    """The documents of several sources, `order` of them (int64 [n]: numbers that count through all), or all."""

    def __init__(self, sources: Sequence[Encoded], order: np.ndarray | None = None) -> None:
        self.sources = sources
        self._firsts = np.cumsum([0, *map(len, sources)])
        self._order = np.arange(self._firsts[-1]) if order is None else order
        array = np.concatenate([np.empty((0, 5), np.int64), *(source.facts.array() for source in sources)])
        self.facts = Facts.from_array(array[self._order])

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, i: int) -> Example: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Example]: ...
    def __getitem__(self, i: int | slice) -> Example | Sequence[Example]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        number = int(self._order[i])
        at = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self.sources[at].example(number - int(self._firsts[at]))

    @property
    def whole(self) -> Examples:
        """All documents once, whatever the order."""
        return Examples(self.sources)

    def files(self) -> np.ndarray:
        """The number of the source of each, int64 [n]."""
        return np.searchsorted(self._firsts, self._order, side="right") - 1


def facts_of(examples: Sequence[Example]) -> Facts:
    """What is known of documents without a look at them, or with one."""
    return examples.facts if isinstance(examples, Examples) else Facts.of(examples)


def check_ids(examples: Sequence[Example], vocab_size: int) -> None:
    """Raises DataError for a token that the model has no embedding for. More embeddings than tokens is legal."""
    largest = facts_of(examples).largest
    for i in np.flatnonzero(largest >= vocab_size):
        example = examples[int(i)]
        raise DataError(
            f"{example.file} line {example.line}: token id {largest[i]}, but the model has {vocab_size} embedding "
            f"rows (ids 0 to {vocab_size - 1}); use the tokenizer that belongs to the model"
        )
