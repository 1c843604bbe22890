"""A micro-batch: what the host derives from tokens, targets and documents, and the device buffers that it goes to.

The device buffers keep their addresses and, but for the number of places for documents, which grows by fours, their
shapes; so a captured graph sees each new micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from fullstride.memory.arena import Arena, FlatLayout
from fullstride.model.head import HeadRows
from fullstride.ops.attention import Documents
from fullstride.ops.cross_entropy import IGNORED

GROWTH = 4  # of the places for documents
STAGES = 4  # micro-batches that may be on their way to a GPU
# attention's operations launch a document per place of a grid's second or third dimension; CUDA has so many of those
MOST_PLACES = 2**16 - 1
FILLS = {"ids": 0, "positions": 0, "index": -1, "targets": IGNORED, "boundaries": None}  # None: the number of tokens
FIRST_POSITIONS = 1024  # `loss_1k` is over these positions of each row


@dataclass(frozen=True)
class HostBatch:
    """One micro-batch on the host, all int32: ids, positions [N]; boundaries [documents + 1]; index, targets [M]."""

    ids: np.ndarray
    positions: np.ndarray
    boundaries: np.ndarray
    most: int  # documents of the rank that has the most
    packed: bool  # whether that is more than one a row
    index: np.ndarray  # rows of the N tokens that are supervised
    targets: np.ndarray

    @property
    def tokens(self) -> int:
        """Number of supervised tokens."""
        return len(self.index)

    @classmethod
    def of(cls, inputs: np.ndarray, targets: np.ndarray, documents: np.ndarray | None, most: int = 0) -> HostBatch:
        """From int32 [B, T] arrays. A document is a run of equal numbers within a row; None: one document a row.

        most: documents of the rank that has the most, if that is not this one: ranks must issue the same collectives
        from the same graphs, so what chooses a graph is the same on all of them.
        """
        rows, seq_len = inputs.shape
        if documents is None:
            starts, positions = _whole_rows(rows, seq_len)
        else:
            starts_row = np.ones((rows, seq_len), dtype=bool)
            np.not_equal(documents[:, 1:], documents[:, :-1], out=starts_row[:, 1:])
            starts = np.flatnonzero(starts_row).astype(np.int32)
            lengths = np.diff(starts, append=np.int32(rows * seq_len))
            positions = np.arange(rows * seq_len, dtype=np.int32) - np.repeat(starts, lengths)
        flat = targets.reshape(-1)
        # IGNORED is the only negative target
        index = _numbers(len(flat)) if flat.min() >= 0 else np.flatnonzero(flat >= 0).astype(np.int32)
        return cls(
            ids=inputs.reshape(-1),
            positions=positions,
            boundaries=np.append(starts, np.int32(rows * seq_len)),
            most=max(most, len(starts)),
            packed=max(most, len(starts)) > rows,
            index=index,
            targets=flat if len(index) == len(flat) else flat[index],
        )


@cache
def _numbers(count: int) -> np.ndarray:
    """0, 1, ... int32."""
    numbers = np.arange(count, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers


@cache
def _whole_rows(rows: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, positions) of rows that are one document each."""
    starts, positions = _numbers(rows * seq_len)[::seq_len], np.tile(_numbers(seq_len), rows)
    positions.flags.writeable = False
    return starts, positions


def document_places(documents: int, rows: int, tokens: int) -> int:
    """Places for the documents of a packed micro-batch: steps of four, so that a run meets few numbers of them.

    Each number has CUDA graphs of its own, which keep what attention returned.
    """
    places = GROWTH * rows
    while places < documents:
        places *= GROWTH
    return min(places, tokens, max(documents, MOST_PLACES))


class Staging:
    """Host buffers [size] of one dtype for copies to a device buffer that the host does not wait for.

    They are used in turn, and on a GPU pinned: one is written while copies from the others may still be under way, and
    only the one that comes round again is waited for.
    """

    def __init__(self, out: torch.Tensor, segment: str, arena: Arena) -> None:
        """`out`: the device buffer [size]; `segment`: where the arena counts its host buffers."""
        self._out, self._turn = out, 0
        self.buffers = [arena.host(segment, tuple(out.shape), out.dtype) for _ in range(STAGES)]
        self._copied = [torch.cuda.Event() for _ in self.buffers] if out.is_cuda else []

    def next(self) -> int:
        """Which of `buffers` to write next; it holds what it held when it was sent."""
        self._turn = (self._turn + 1) % len(self.buffers)
        if self._copied:
            self._copied[self._turn].synchronize()
        return self._turn

    def send(self) -> None:
        """Copy it to the device."""
        self._out.copy_(self.buffers[self._turn], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()


def _arrays(layout: FlatLayout, buffer: torch.Tensor) -> dict[str, np.ndarray]:
    return {name: view.numpy() for name, view in layout.views(buffer).items()}


class DeviceBatch:
    """The static buffers of one micro-batch of `rows` x `seq_len` tokens, filled by one copy.

    ids, positions: int32 [N]; rng: int64 [4] (seed, step, micro-step, first row: ops/dropout); z_loss: one element,
    float32.
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
        sizes = {"rng": 8, "z_loss": 1, "ids": n, "positions": n, "index": m, "targets": m, "boundaries": n + 1}
        layout = FlatLayout.of((name, (size,), False) for name, size in sizes.items())
        device = arena.zeros("batch", (layout.size,), torch.int32)
        self._staging = Staging(device, "batch", arena)
        self._words = [] if device.is_meta else [_arrays(layout, buffer) for buffer in self._staging.buffers]
        # of every staging buffer, what was written last and how long it was: what all rows have in common stays there
        self._written: list[dict[str, tuple[Any, int]]] = [
            {name: (None, len(words[name])) for name in FILLS} for words in self._words
        ]
        parts = layout.views(device)
        self.rng, self.z_loss = parts["rng"].view(torch.int64), parts["z_loss"].view(torch.float32)
        self.ids, self.positions, self._boundaries = parts["ids"], parts["positions"], parts["boundaries"]
        loss, lse = (arena.zeros("batch", (m,), stats) for _ in range(2))
        self.head = HeadRows(parts["index"], parts["targets"], loss, lse, self.chunk, 0)
        self.documents = Documents(self._boundaries[: rows + 1], rows, seq_len, packed=False)

    def load(self, host: HostBatch, rng: tuple[int, int, int, int], z_loss: float) -> None:
        """Copy a micro-batch in, without waiting; afterwards `documents` and `head` describe it."""
        turn, n = self._staging.next(), self.rows * self.seq_len
        words, written = self._words[turn], self._written[turn]
        words["rng"].view(np.int64)[:] = rng
        words["z_loss"].view(np.float32)[:] = z_loss
        for name, fill in FILLS.items():
            values, target, (last, length) = getattr(host, name), words[name], written[name]
            if values is last and not values.flags.writeable:
                continue
            target[: len(values)] = values
            target[len(values) : length] = n if fill is None else fill
            written[name] = values, len(values)
        self._staging.send()
        places = document_places(host.most, self.rows, n) if host.packed else self.rows
        boundaries = self._boundaries[: places + 1]
        self.documents = Documents(boundaries, self.rows, self.seq_len, host.packed, **self._attention)
        self.head.num_chunks = -(-host.tokens // self.chunk)
