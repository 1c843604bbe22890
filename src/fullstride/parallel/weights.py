"""Weights behind gather / get / release, so that the block loop does not know where they live.

    gather(unit) -> get(unit) ... -> release(unit)                       for every use
    start_writing() -> shard(unit), then written(unit) ... -> settle()   for the optimizer

`gather(unit)` starts to bring a unit here, one ahead of its use; `get(unit)` gives its tensors by name; after
`release(unit)` they may be overwritten. After `start_writing()`, when no rank uses any more what was gathered, the
optimizer writes `shard(unit)`, this rank's part of the unit's flat buffer, and says `written(unit)`; after `settle()`
every rank's next use sees it.

Quantised weights would be gathered in the same way: a flat buffer of bytes a unit, with views of other dtypes.
Offloaded ones too: their shards lie in pinned memory, and the gather begins with a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fullstride.parallel.comm import Communicator, Work
from fullstride.parallel.transport import Transport

Views = dict[str, torch.Tensor]


@dataclass(frozen=True)
class WeightUnit:
    """One unit: a flat buffer for the whole, padded, and its named views; and this rank's part, which is a view of it
    where weights are whole on every rank."""

    flat: torch.Tensor
    views: Views
    part: torch.Tensor


class ReplicatedWeights:
    """Every rank holds every unit whole: there is nothing to gather. What a rank's optimizer has written is spread."""

    resident = True  # what is beside the weights in their buffers stays there

    def __init__(self, units: Mapping[str, WeightUnit], owners: Communicator, transport: Transport) -> None:
        """owners: the ranks that share out the optimizer's work; transport: among them."""
        self._units, self._owners, self._transport = units, owners, transport
        self._pending: list[Work] = []

    def gather(self, unit: str) -> None:
        """Start to bring `unit` here."""

    def get(self, unit: str) -> Views:
        """The tensors of `unit`, which was gathered."""
        return self._units[unit].views

    def release(self, unit: str) -> None:
        """The last reader of `unit` is done."""

    def keep(self, unit: str) -> None:
        """The tensors of `unit`, gathered and not released, were written, the same on every rank: keep that."""

    def shard(self, unit: str) -> torch.Tensor:
        """This rank's part of the flat `unit`, which its optimizer writes."""
        return self._units[unit].part

    def start_writing(self) -> None:
        """Shards are about to be written, on every rank."""
        self._transport.fence().wait()

    def written(self, unit: str) -> None:
        """`shard(unit)` was written: start to spread it."""
        u = self._units[unit]
        self._pending.append(self._transport.spread(u.part, u.flat))

    def settle(self) -> None:
        """What was written has been spread."""
        for work in self._pending:
            work.wait()
        self._pending.clear()
        self._transport.fence().wait()


class GatheredWeights(ReplicatedWeights):
    """Every rank holds its part of every unit. Units share buffers for the whole: blocks two by turns, for instance.

    Who is in a buffer is not kept here: between captured graphs, which do not run this code again, it could not be.
    """

    resident = False

    def __init__(self, units: Mapping[str, WeightUnit], owners: Communicator, transport: Transport) -> None:
        super().__init__(units, owners, transport)
        self._coming: dict[str, Work] = {}

    def gather(self, unit: str) -> None:
        u = self._units[unit]
        self._coming[unit] = self._transport.gather(u.part, u.flat)

    def get(self, unit: str) -> Views:
        if unit in self._coming:
            self._coming.pop(unit).wait()
        return self._units[unit].views

    def keep(self, unit: str) -> None:
        u, n = self._units[unit], self._units[unit].part.numel()
        self.start_writing()
        u.part.copy_(u.flat[self._owners.rank * n : (self._owners.rank + 1) * n])
        self.settle()

    def written(self, unit: str) -> None:
        """The next gather brings it."""
