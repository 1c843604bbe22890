"""A micro-batch: what the host derives from tokens, targets and documents, and the device buffers that it goes to.

The device buffers keep their addresses and (but for the number of documents, which grows in powers of two) shapes, so a
captured graph sees each new micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fullstride.memory.arena import Arena, FlatLayout
from fullstride.model.head import HeadRows
from fullstride.ops.attention import Documents
from fullstride.ops.cross_entropy import IGNORED

GROWTH = 4  # of the places for documents
# attention's operations launch a document per place of a grid's second or third dimension; CUDA has so many of those
MOST_PLACES = 2**16 - 1
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
    tokens_1k: int  # supervised tokens in the first 1024 positions

    @property
    def tokens(self) -> int:
        """Number of supervised tokens."""
        return len(self.index)

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
            tokens_1k=int((index % seq_len < FIRST_POSITIONS).sum()),
        )


def document_places(documents: int, rows: int, tokens: int) -> int:
    """Places for the documents of a packed micro-batch: steps of four, so that a run meets few numbers of them.

    Each number has CUDA graphs of its own, which keep what attention returned.
    """
    places = GROWTH * rows
    while places < documents:
        places *= GROWTH
    return min(places, tokens, max(documents, MOST_PLACES))


def to_device(values: np.ndarray, out: torch.Tensor) -> None:
    """Copy without making the host wait for work that is under way (from pinned memory, which torch recycles)."""
    source = torch.from_numpy(np.ascontiguousarray(values))
    out.copy_(source.pin_memory() if out.is_cuda else source, non_blocking=True)


class DeviceBatch:
    """The static buffers of one micro-batch of `rows` x `seq_len` tokens, filled by one copy.

    ids, positions: int32 [N]; rng: int64 [3] (seed, step, micro-step: ops/rounding); z_loss: one element, float32.
    """

    def __init__(
        self, arena: Arena, rows: int, seq_len: int, head_chunks: int, stats: torch.dtype, **attention: bool
    ) -> None:
        """attention: `deterministic` and `flash4` of ops/attention.Documents."""
        n = rows * seq_len
        self.rows, self.seq_len, self._attention = rows, seq_len, attention
        self.chunk = -(-n // head_chunks)
        m = self.chunk * head_chunks
        # int32 words, rng first: int64 must be aligned; every part starts at 256 bytes, as attention's kernels want
        sizes = {"rng": 6, "z_loss": 1, "ids": n, "positions": n, "index": m, "targets": m, "boundaries": n + 1}
        layout = FlatLayout.of((name, (size,), False) for name, size in sizes.items())
        self._device = arena.zeros("batch", (layout.size,), torch.int32)
        self._host = np.zeros(layout.size, dtype=np.int32)
        self._words = layout.views(torch.from_numpy(self._host))
        parts = layout.views(self._device)
        self.rng, self.z_loss = parts["rng"].view(torch.int64), parts["z_loss"].view(torch.float32)
        self.ids, self.positions, self._boundaries = parts["ids"], parts["positions"], parts["boundaries"]
        loss, lse = (arena.zeros("batch", (m,), stats) for _ in range(2))
        self.head = HeadRows(parts["index"], parts["targets"], loss, lse, self.chunk, 0)
        self.documents = Documents(self._boundaries[: rows + 1], rows, seq_len, packed=False)

    def load(self, host: HostBatch, rng: tuple[int, int, int], z_loss: float) -> None:
        """Copy a micro-batch in, without waiting; afterwards `documents` and `head` describe it."""
        words, n = self._words, self.rows * self.seq_len
        words["rng"].view(torch.int64).copy_(torch.tensor(rng))
        words["z_loss"].view(torch.float32).fill_(z_loss)
        fills = {"ids": 0, "positions": 0, "index": -1, "targets": IGNORED, "boundaries": n}
        for name, fill in fills.items():
            values, target = getattr(host, name), words[name].numpy()
            target[: len(values)] = values
            target[len(values) :] = fill
        to_device(self._host, self._device)
        places = document_places(len(host.boundaries) - 1, self.rows, n) if host.packed else self.rows
        boundaries = self._boundaries[: places + 1]
        self.documents = Documents(boundaries, self.rows, self.seq_len, host.packed, **self._attention)
        self.head.num_chunks = -(-host.tokens // self.chunk)
