"""What blocks keep between forward and backward: a table of tensors, and the buffers made from it.

A tensor that recompute drops still has a buffer, but one for all layers: the forward writes it, the next layer
overwrites it, and before a layer's backward it is computed again. So block code never asks what was kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fullstride.memory.arena import Arena, spare_columns


@dataclass(frozen=True)
class SavedTensor:
    """One row of the table: columns per token (0: one value a token), and the recompute flags that drop it.

    `wide` tensors are float32 (float64 in a float64 model) whatever the model's dtype. `spare` columns follow the
    tensor's own. Of the tokens it has one in `row_shares`: the others' ranks have the rest.
    """

    name: str
    columns: int
    dropped_by: frozenset[str] = frozenset()
    wide: bool = False
    spare: int = 0
    row_shares: int = 1


@dataclass
class Saved:
    """The saved tensors of one layer by name, without and with their spare columns, and what attention returned (out
    and its statistics)."""

    tensors: dict[str, torch.Tensor]
    with_spare: dict[str, torch.Tensor]
    attention: tuple[torch.Tensor, ...] = field(default=())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def extended(self, name: str) -> torch.Tensor:
        """The tensor with its spare columns."""
        return self.with_spare[name]


class SavedBuffers:
    """Allocates for one layer after another; what `recompute` drops is shared by all of them."""

    def __init__(
        self,
        table: tuple[SavedTensor, ...],
        num_tokens: int,
        recompute: frozenset[str],
        arena: Arena,
        dtype: torch.dtype,
    ) -> None:
        self._table, self._num_tokens, self._arena, self._dtype = table, num_tokens, arena, dtype
        self._shared = {row.name: self._buffer(row, "scratch") for row in table if row.dropped_by & recompute}

    def _buffer(self, row: SavedTensor, segment: str) -> torch.Tensor:
        stats = torch.float64 if self._dtype == torch.float64 else torch.float32
        columns = spare_columns(row.columns, row.spare)
        num_rows = self._num_tokens // row.row_shares
        shape: Any = (num_rows, columns) if columns else (num_rows,)
        whole = self._arena.zeros(segment, shape, stats if row.wide else self._dtype)
        return whole[:, : row.columns + row.spare] if row.spare else whole

    def layer(self) -> Saved:
        """Of one more layer."""
        kept = [row for row in self._table if row.name not in self._shared]
        tensors = {row.name: self._buffer(row, "activations") for row in kept} | self._shared
        own = {row.name: tensors[row.name][:, : row.columns] if row.spare else tensors[row.name] for row in self._table}
        return Saved(own, tensors)
