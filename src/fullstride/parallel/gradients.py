"""Gradients behind one protocol: where the backward writes them, and when they are whole.

    zero() -> start_micro_step(first) -> full(unit) ... notify(unit) ... -> end_micro_step() -> shard(unit)

`full(unit)` gives the buffers that a unit's backward writes. Matrices are overwritten by the first product of the first
micro-step and added into after that (`accumulate` says which), so they need no zeroing; norm weights and biases are
always added into. `notify(unit)` says that the unit's gradient of this micro-step is complete.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullstride.parallel.weights import Views


@dataclass(frozen=True)
class GradientUnit:
    """One unit's gradient: the flat buffer, its named views, and where its undecayed tensors begin in it."""

    flat: torch.Tensor
    views: Views
    decayed: int


class UnshardedGradients:
    """Every rank keeps full gradients; on one rank there is nothing to reduce."""

    def __init__(self, units: dict[str, GradientUnit], zero_whole: frozenset[str]) -> None:
        """`zero_whole` names units whose matrices are added into from the start (an untied embedding)."""
        self._units = units
        starts = {name: 0 if name in zero_whole else unit.decayed for name, unit in units.items()}
        parts = (units[name].flat[start:] for name, start in starts.items())
        self.added_into = [part for part in parts if part.numel()]  # from the start, so zeroed first
        self.accumulate = False

    def zero(self) -> None:
        """Zero what is added into from the start; called before the first micro-step of an update."""
        for part in self.added_into:
            part.zero_()

    def start_micro_step(self, first: bool) -> None:
        """After this, `accumulate` says whether matrices are added into, or overwritten."""
        self.accumulate = not first

    def full(self, unit: str) -> Views:
        """The buffers that the backward of `unit` writes; empty for a frozen unit."""
        return self._units[unit].views if unit in self._units else {}

    def notify(self, unit: str) -> None:
        """`unit` is complete for this micro-step."""

    def end_micro_step(self) -> None:
        """All units are complete for this micro-step."""

    def shard(self, unit: str) -> torch.Tensor:
        """This rank's part of the flat gradient of `unit`, for the optimizer: here the whole."""
        return self._units[unit].flat
