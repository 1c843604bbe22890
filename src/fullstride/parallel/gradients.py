"""Gradients behind one protocol: where the backward writes them, how they are reduced over ranks, and who gets what.

    start_micro_step(first, last) -> zero(units) -> take(block) / full(unit) ... notify(unit) ... -> end_micro_step()
    finish() -> shards(units)                                                                      for the optimizer

`take(block)` gives the buffers that a block's backward writes, once a micro-step; `full(unit)` those of what is not a
block, any number of times. Matrices are overwritten by the first product, unless `accumulates(unit)`: so they need no
zeroing; norm weights and biases are always added into. `notify(unit)` says that the unit's gradient of this micro-step
is complete: what communication it causes overlaps the backward of the next.

Units that do not train have no buffers (an empty dictionary), and nothing happens to them. `finish()` does what the
last micro-step would have done, where a short window ended without one; then `shards(units)` gives the sums over
micro-steps and ranks, in this rank's part of the flat buffers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from fullstride.ops.accumulate import accumulate
from fullstride.ops.rounding import GRAD_ROUNDING, RECEIVED_ROUNDING, stream
from fullstride.parallel.comm import Communicator, Work
from fullstride.parallel.transport import Transport
from fullstride.parallel.weights import Views


@dataclass(frozen=True)
class GradientUnit:
    """One unit's buffer for the backward, flat and padded, and its named views. `added` of it is added into from the
    start; `part` of it is this rank's."""

    flat: torch.Tensor
    views: Views
    added: slice
    part: slice


class Sums(Protocol):
    """Where this rank's parts of units add up: flat [part] by unit, in parameters' dtype or float32; on the device, or
    brought there when wanted (memory/offload)."""

    def __contains__(self, unit: str, /) -> bool: ...

    def fetch(self, unit: str, /) -> None:
        """Start to bring it."""

    def get(self, unit: str, /) -> torch.Tensor:
        """The sum that was fetched, or to be overwritten."""
        ...

    def put(self, unit: str, /) -> None:
        """It was written."""

    def settle(self) -> None:
        """All that was started is done before what follows."""


class UnshardedGradients:
    """Every rank keeps full gradients; on the last micro-step each unit is reduced as soon as it is complete, into this
    rank's part, or where that is the whole into every rank's."""

    def __init__(self, units: Mapping[str, GradientUnit], comm: Communicator) -> None:
        self._units, self._comm = units, comm
        self._first = self._last = False
        self._pending: list[Work] = []

    @property
    def variant(self) -> Hashable:
        """What the work of a micro-step depends on, for the keys of captured graphs."""
        return self._first, self._last and self._comm.size > 1

    @property
    def reduced(self) -> bool:
        """Whether `finish` finds everything reduced."""
        return self._last or self._comm.size == 1

    def start_micro_step(self, first: bool, last: bool) -> None:
        """first, last: of the update."""
        self._first, self._last = first, last

    def added_into(self, units: Iterable[str]) -> list[torch.Tensor]:
        """What of `units` has to be zero when this micro-step begins."""
        parts = [u.flat[u.added] for name, u in self._units.items() if name in units] if self._first else []
        return [part for part in parts if part.numel()]

    def zero(self, units: Iterable[str]) -> None:
        """Zero what this micro-step adds into from its start."""
        for part in self.added_into(units):
            part.zero_()

    def accumulates(self, unit: str) -> bool:
        """Whether matrices of `unit` are added into in this micro-step, or overwritten."""
        return not self._first

    def take(self, unit: str) -> Views:
        """The buffers that the backward of a block writes."""
        return self.full(unit)

    def full(self, unit: str) -> Views:
        """The buffers that the backward of `unit` writes; empty for a frozen unit."""
        return self._units[unit].views if unit in self._units else {}

    def notify(self, unit: str) -> None:
        """`unit` is complete for this micro-step."""
        if self._last and unit in self._units:
            self._reduce(unit)

    def _reduce(self, unit: str) -> None:
        u = self._units[unit]
        part = u.flat[u.part]
        one = len(part) == len(u.flat)
        self._pending.append(self._comm.all_reduce(part) if one else self._comm.reduce_scatter(u.flat, part))

    def end_micro_step(self) -> None:
        """All units are complete for this micro-step."""
        for work in self._pending:
            work.wait()
        self._pending.clear()

    def finish(self) -> None:
        """The update begins; what the last micro-step would have reduced is reduced now."""
        if not self.reduced:
            for unit in self._units:
                self._reduce(unit)
            self.end_micro_step()

    def shards(self, units: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(unit, this rank's part of its flat gradient) one after the other, each until the next is asked for."""
        for unit in units:
            yield unit, self._part(unit)

    def written(self, unit: str) -> None:
        """What `shards` gave of `unit` was changed: keep that."""

    def _part(self, unit: str) -> torch.Tensor:
        u = self._units[unit]
        return u.flat[u.part]

    def held(self, unit: str) -> tuple[slice, torch.Tensor]:
        """Between micro-steps: which elements of the flat gradient are here, and their sums so far."""
        u = self._units[unit]
        held = u.part if self._last else slice(0, len(u.flat))
        return held, u.flat[held]


class ShardedGradients(UnshardedGradients):
    """Units with a sum are reduced in every micro-step, and add up in it; blocks share two buffers by turns. The others
    stay full until the last micro-step, as above.

    A block's sum is fetched when its buffer is taken, two blocks before it is added into, and put back after that.
    """

    def __init__(
        self,
        units: Mapping[str, GradientUnit],
        comm: Communicator,
        sums: Sums,
        blocks: frozenset[str],
        rng: torch.Tensor,
        indices: Mapping[str, int],
    ) -> None:
        """`blocks` are the units that are taken, not just full. rng: the micro-step's, whose noise `indices` key by
        unit (see ops/rounding)."""
        super().__init__({name: unit for name, unit in units.items() if name not in sums}, comm)
        self._sharded = {name: unit for name, unit in units.items() if name in sums}
        self._sums, self._blocks, self._rng, self._indices = sums, blocks, rng, indices
        self._under_way: dict[int, tuple[str, Work]] = {}  # by the buffer's address: who is in it

    def added_into(self, units: Iterable[str]) -> list[torch.Tensor]:
        own = [u.flat[u.added] for name, u in self._sharded.items() if name in units and name not in self._blocks]
        return super().added_into(units) + [part for part in own if part.numel()]

    def accumulates(self, unit: str) -> bool:
        return unit not in self._sums and super().accumulates(unit)

    def take(self, unit: str) -> Views:
        if unit in self._sharded:
            u = self._sharded[unit]
            self._settle(u)
            if not self._first:
                self._sums.fetch(unit)
            u.flat[u.added].zero_()
        return self.full(unit)

    def full(self, unit: str) -> Views:
        return self._sharded[unit].views if unit in self._sharded else super().full(unit)

    def notify(self, unit: str) -> None:
        if unit not in self._sharded:
            return super().notify(unit)
        u = self._sharded[unit]
        self._under_way[u.flat.data_ptr()] = unit, self._send(unit, u)

    def end_micro_step(self) -> None:
        for unit, _ in list(self._under_way.values()):
            self._settle(self._sharded[unit])
        self._sums.settle()
        super().end_micro_step()

    def shards(self, units: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Each sum is fetched one ahead."""
        units = list(units)
        for unit, following in zip(["", *units], [*units, ""], strict=True):
            self._sums.fetch(following)
            if unit:
                yield unit, self._part(unit)

    def written(self, unit: str) -> None:
        if unit in self._sums:
            self._sums.put(unit)

    def _part(self, unit: str) -> torch.Tensor:
        return self._sums.get(unit) if unit in self._sums else super()._part(unit)

    def held(self, unit: str) -> tuple[slice, torch.Tensor]:
        if unit not in self._sums:
            return super().held(unit)
        self._sums.fetch(unit)
        return self._sharded[unit].part, self._sums.get(unit)

    def _settle(self, u: GradientUnit) -> None:
        """What was sent from this buffer has arrived, and is in the sum."""
        name, work = self._under_way.pop(u.flat.data_ptr(), ("", None))
        if work is not None:
            work.wait()
            self._receive(name, self._sharded[name])
            self._sums.put(name)

    def _send(self, unit: str, u: GradientUnit) -> Work:
        return self._comm.reduce_scatter(u.flat, u.flat[u.part])

    def _receive(self, unit: str, u: GradientUnit) -> None:
        self._add(unit, u.flat[u.part][None], GRAD_ROUNDING, overwrite=self._first)

    def _add(self, unit: str, terms_Pn: torch.Tensor, purpose: int, overwrite: bool, skip: int = -1) -> None:
        total, first, key = self._sums.get(unit), self._sharded[unit].part.start, stream(purpose, self._indices[unit])
        accumulate(total, terms_Pn, self._rng, key, first, overwrite=overwrite, skip=skip)


class AllToAllGradients(ShardedGradients):
    """As ShardedGradients, but blocks are exchanged and not reduced: a finished block first adds its own piece into its
    sum, and what the other ranks sent is added, in one go, when its buffer is needed again."""

    def __init__(
        self,
        units: Mapping[str, GradientUnit],
        comm: Communicator,
        sums: Sums,
        blocks: frozenset[str],
        rng: torch.Tensor,
        indices: Mapping[str, int],
        received: Mapping[str, torch.Tensor],
        transport: Transport,
    ) -> None:
        """received: as many elements as a unit's flat buffer, shared by the units that share that; transport: of the
        exchange."""
        super().__init__(units, comm, sums, blocks, rng, indices)
        self._received, self._transport = received, transport

    def _send(self, unit: str, u: GradientUnit) -> Work:
        # the exchange begins after what is issued so far: its own piece has been added when others may overwrite it
        self._add(unit, u.flat[u.part][None], GRAD_ROUNDING, overwrite=self._first)
        return self._transport.exchange(u.flat, self._received[unit])

    def _receive(self, unit: str, u: GradientUnit) -> None:
        pieces = self._received[unit].view(self._comm.size, -1)
        self._add(unit, pieces, RECEIVED_ROUNDING, overwrite=False, skip=self._comm.rank)
