"""Rows of token ids, dealt out as the micro-batches of one update after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """One micro-batch, of all data-parallel ranks together (B rows of T positions).

    `inputs`, `targets` and `documents` are int32 [B, T]. `targets[b, t]` is what `inputs[b, t]` should predict, -100
    where nothing is learned: a document's last token never predicts the next document's first. `documents` numbers the
    documents of a row from 0, its padding being the last; None without packing, where padding follows the only one.
    `row_ids` are the numbers of the rows that are filled; the rows after them are empty (all padding).
    """

    inputs: np.ndarray
    targets: np.ndarray
    documents: np.ndarray | None
    tokens: int
    supervised: int
    row_ids: list[int]


class Rows(Protocol):
    """What a loader deals: rows of at most `seq_len` tokens, which hold `num_tokens` together.

    `packing` says whether a row may hold several documents, which do not see each other then.
    """

    seq_len: int
    packing: bool
    num_tokens: int

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def write(self, row: int, inputs: np.ndarray, targets: np.ndarray, documents: np.ndarray) -> int:
        """Write one row into three int32 [T], as Batch says, which hold padding, -100 and 0; returns its tokens."""
        ...

    def lengths(self, row: int) -> list[int]:
        """The lengths of a row's documents."""
        ...

    def where(self, row: int) -> list[str]:
        """Where in which file its documents come from, for messages."""
        ...

    def describe(self) -> str:
        """Their documents and tokens, for people."""
        ...

    def digest(self) -> str:
        """What they are, in words that can be compared: a resumed run must find the same."""
        ...


class Loader:
    """Deals every row exactly once per epoch.

    Rows are reshuffled in each epoch with a generator keyed by seed + epoch. `batch_size` counts the
    rows of one micro-batch over all data-parallel ranks. Nothing else is state but `position`, so a new loader that is
    sought to a saved position goes on exactly.
    """

    def __init__(self, rows: Rows, batch_size: int, seed: int, pad_id: int, shuffle: bool = True) -> None:
        assert len(rows), "there is something to deal"
        self.rows = rows
        self.position = 0
        self._batch_size = batch_size
        self._seed = seed
        self._pad_id = pad_id
        self._shuffle = shuffle
        self._order = (-1, np.arange(len(rows)))  # epoch, and its order of rows

    @property
    def rows_per_epoch(self) -> int:
        return len(self.rows)

    @property
    def epoch(self) -> int:
        """The epoch of the next row, from 0."""
        return self.position // self.rows_per_epoch

    @property
    def padding_share(self) -> float:
        """Fraction of all positions of an epoch's rows that hold padding."""
        return 1 - self.rows.num_tokens / (self.rows_per_epoch * self.rows.seq_len)

    def updates_per_epoch(self, grad_accum: int) -> int:
        return -(-self.rows_per_epoch // (self._batch_size * grad_accum))

    def updates_until(self, epochs: int, position: int, grad_accum: int) -> int:
        """Updates from `position`, which others of another size may have led to, to the end of so many epochs; negative
        where that is behind."""
        epoch, begin = divmod(position, self.rows_per_epoch)
        size, whole = self._batch_size * grad_accum, self.updates_per_epoch(grad_accum)
        if epoch >= epochs:
            return (epochs - epoch) * whole - -(-begin // size)
        return (epochs - epoch - 1) * whole + -(-(self.rows_per_epoch - begin) // size)

    def seek(self, position: int) -> None:
        """Makes the row that comes next the one after `position` rows, counted from the start over all epochs."""
        assert position >= 0
        self.position = position

    def next_window(self, grad_accum: int) -> list[Batch]:
        """The micro-batches of one update: `grad_accum` of them, or fewer at the end of an epoch.

        An update never spans two epochs; an epoch's last micro-batch is filled up with empty rows.
        """
        epoch, begin = divmod(self.position, self.rows_per_epoch)
        row_ids = self._epoch_order(epoch)[begin : begin + self._batch_size * grad_accum]
        self.position += len(row_ids)
        return list(self._batches(row_ids))

    def eval_batches(self) -> Iterator[Batch]:
        """Every row once, in order, whatever `position` is."""
        return self._batches(np.arange(self.rows_per_epoch))

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._shuffle and self._order[0] != epoch:
            # NumPy promises the same raw bits in all releases, but not the same permutation().
            noise = np.random.PCG64(self._seed + epoch).random_raw(self.rows_per_epoch)
            self._order = (epoch, np.argsort(noise, kind="stable"))
        return self._order[1]

    def _batches(self, row_ids: np.ndarray) -> Iterator[Batch]:
        for begin in range(0, len(row_ids), self._batch_size):
            yield self._batch(row_ids[begin : begin + self._batch_size].tolist())

    def _batch(self, row_ids: list[int]) -> Batch:
        shape = (self._batch_size, self.rows.seq_len)
        inputs = np.full(shape, self._pad_id, dtype=np.int32)
        targets = np.full(shape, IGNORED, dtype=np.int32)
        documents = np.zeros(shape, dtype=np.int32)
        tokens = sum(self.rows.write(row, inputs[b], targets[b], documents[b]) for b, row in enumerate(row_ids))
        supervised = int(np.count_nonzero(targets != IGNORED))
        return Batch(inputs, targets, documents if self.rows.packing else None, tokens, supervised, row_ids)
