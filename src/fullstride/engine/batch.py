"""A micro-batch: what the host derives from tokens, targets and documents, and the device buffers that it goes to.

The device buffers keep their addresses and (but for the number of documents, which grows in powers of two) shapes, so a
captured graph sees each new micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fullstride.memory.arena import Arena
from fullstride.model.head import HeadRows
from fullstride.ops.attention import Documents
from fullstride.ops.cross_entropy import IGNORED

FIRST_POSITIONS = 1024  # `loss_1k` is over these positions of each row


@dataclass(frozen=True)
class HostBatch:
    """One micro-batch on the host, all int32: ids, positions [N]; boundaries [documents + 1]; index, targets [M]."""

    ids: np.ndarray
    positions: np.ndarray
    boundaries: np.ndarray
    packed: bool
    index: np.ndarray  # rows of the N tokens that are supervised
    targets: np.ndarray
    first_1k: np.ndarray  # bool [M]

    @property
    def tokens(self) -> int:
        """Number of supervised tokens."""
        return len(self.index)

    @property
    def tokens_1k(self) -> int:
        """Number of supervised tokens in the first 1024 positions."""
        return int(self.first_1k.sum())

    @classmethod
    def of(cls, inputs: np.ndarray, targets: np.ndarray, documents: np.ndarray | None) -> HostBatch:
        """From int32 [B, T] arrays. A document is a run of equal numbers within a row; None: one document a row."""
        rows, seq_len = inputs.shape
        starts_row = np.zeros((rows, seq_len), dtype=bool)
        starts_row[:, 0] = True
        if documents is not None:
            starts_row[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts = np.flatnonzero(starts_row)
        positions = np.arange(rows * seq_len) - starts[np.cumsum(starts_row.reshape(-1)) - 1]
        index = np.flatnonzero(targets.reshape(-1) != IGNORED)
        return cls(
            ids=inputs.reshape(-1).astype(np.int32),
            positions=positions.astype(np.int32),
            boundaries=np.append(starts, rows * seq_len).astype(np.int32),
            packed=len(starts) > rows,
            index=index.astype(np.int32),
            targets=targets.reshape(-1)[index].astype(np.int32),
            first_1k=index % seq_len < FIRST_POSITIONS,
        )


def to_device(values: np.ndarray, out: torch.Tensor) -> None:
    """Copy without making the host wait for work that is under way (from pinned memory, which torch recycles)."""
    source = torch.from_numpy(np.ascontiguousarray(values))
    out.copy_(source.pin_memory() if out.is_cuda else source, non_blocking=True)


class DeviceBatch:
    """The static buffers of one micro-batch of `rows` x `seq_len` tokens."""

    def __init__(
        self, arena: Arena, rows: int, seq_len: int, head_chunks: int, stats: torch.dtype, deterministic: bool
    ) -> None:
        n = rows * seq_len
        self.rows, self.seq_len, self.deterministic = rows, seq_len, deterministic
        self.chunk = -(-n // head_chunks)
        m = self.chunk * head_chunks

        def ints(size: int) -> torch.Tensor:
            return arena.zeros("batch", (size,), torch.int32)

        self.ids, self.positions, self._boundaries = ints(n), ints(n), ints(n + 1)
        self._index, self._targets = ints(m), ints(m)
        self.first_1k = arena.zeros("batch", (m,), torch.bool)
        self._loss, self._lse = (arena.zeros("batch", (m,), stats) for _ in range(2))
        self.documents: Documents
        self.head: HeadRows

    def load(self, host: HostBatch) -> None:
        """Copy a micro-batch in; afterwards `documents` and `head` describe it."""
        n, m = len(self.ids), len(self._index)
        to_device(host.ids, self.ids)
        to_device(host.positions, self.positions)
        num = 1 << (max(len(host.boundaries) - 1, self.rows) - 1).bit_length() if host.packed else self.rows
        boundaries = self._boundaries[: min(num, n) + 1]
        to_device(_filled(host.boundaries, len(boundaries), n), boundaries)
        self.documents = Documents(boundaries, self.rows, self.seq_len, host.packed, self.deterministic)
        to_device(_filled(host.index, m, -1), self._index)
        to_device(_filled(host.targets, m, IGNORED), self._targets)
        to_device(_filled(host.first_1k, m, False), self.first_1k)
        num_chunks = -(-host.tokens // self.chunk)
        self.head = HeadRows(self._index, self._targets, self._loss, self._lse, self.chunk, num_chunks)


def _filled(values: np.ndarray, size: int, fill: int | bool) -> np.ndarray:
    out = np.full(size, fill, dtype=values.dtype)
    out[: len(values)] = values
    return out
