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


def allocate_saved(
    table: tuple[SavedTensor, ...],
    num_layers: int,
    num_tokens: int,
    recompute: frozenset[str],
    arena: Arena,
    dtype: torch.dtype,
) -> list[Saved]:
    """One Saved a layer; tensors that `recompute` drops are shared by all layers."""
    stats = torch.float64 if dtype == torch.float64 else torch.float32

    def buffer(row: SavedTensor, segment: str) -> torch.Tensor:
        columns = spare_columns(row.columns, row.spare)
        num_rows = num_tokens // row.row_shares
        shape: Any = (num_rows, columns) if columns else (num_rows,)
        whole = arena.zeros(segment, shape, stats if row.wide else dtype)
        return whole[:, : row.columns + row.spare] if row.spare else whole

    def layer() -> Saved:
        tensors = {row.name: buffer(row, "activations") for row in kept} | shared
        own = {row.name: tensors[row.name][:, : row.columns] if row.spare else tensors[row.name] for row in table}
        return Saved(own, tensors)

    shared = {row.name: buffer(row, "scratch") for row in table if row.dropped_by & recompute}
    kept = [row for row in table if row.name not in shared]
    return [layer() for _ in range(num_layers)]
