"""Weights behind gather / get / release, so that the block loop does not know where they live."""

from __future__ import annotations

import torch

Views = dict[str, torch.Tensor]


class ReplicatedWeights:
    """Every rank holds every unit whole: there is nothing to gather.

    The protocol: `gather(unit)` starts to bring a unit here, one ahead of its use; `get(unit)` gives its tensors by
    name; after `release(unit)` they may be overwritten.
    """

    def __init__(self, units: dict[str, Views]) -> None:
        self._units = units

    def gather(self, unit: str) -> None:
        """Start to bring `unit` here."""

    def get(self, unit: str) -> Views:
        """The tensors of `unit`, which was gathered."""
        return self._units[unit]

    def release(self, unit: str) -> None:
        """The last reader of `unit` is done."""
