"""Everything that training keeps: weights, adapters, gradients, masters and moments, one flat buffer each a unit.

ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) shares flat buffers out to the ranks that train on different rows:

    zero   masters, moments   gradients               weights
    0      whole              whole, all-reduced      whole
    1      part               whole, reduced to part  whole
    2      part               part (blocks)           whole
    3      part               part (blocks)           part, gathered for use

One rank alone owns the whole. From level 2 on, or where blocks' gradients live in host memory, they still add up apart
from what the backward writes, for which two blocks' buffers are enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fullstride.engine.split import UnitSplit, tables
from fullstride.memory.arena import Arena, FlatLayout
from fullstride.memory.offload import Offloaded
from fullstride.model.lora import LoraSettings, adapter_columns
from fullstride.model.spec import ModelConfig, TensorSpec, Unit
from fullstride.model.tensor_parallel import split_config
from fullstride.parallel.comm import Communicator
from fullstride.parallel.gradients import (
    AllToAllGradients,
    GradientUnit,
    ShardedGradients,
    UnshardedGradients,
)
from fullstride.parallel.shards import Part, ShardMap
from fullstride.parallel.transport import Zeros, make_transport
from fullstride.parallel.weights import GatheredWeights, ReplicatedWeights, Views, WeightUnit

Stretch = tuple[slice, bool, bool]  # see engine/split


@dataclass(frozen=True)
class Precision:
    """dtypes of parameters, their masters (None: no separate copy), the two moments, and gradients' sums (None: as
    parameters)."""

    param: torch.dtype
    master: torch.dtype | None
    m: torch.dtype
    v: torch.dtype
    grad: torch.dtype | None = None


@dataclass(frozen=True)
class Sharing:
    """What ranks share out (the level `zero`), and how: whether blocks' gradients are exchanged by all-to-all; whether
    weights are gathered and gradients exchanged by copy engines; whether a rank's gradients live in host memory."""

    zero: int = 1
    all_to_all: bool = False
    gather_by_copy: bool = False
    send_by_copy: bool = False
    offload: bool = False


@dataclass(frozen=True)
class TrainedUnit:
    """What this rank updates of a trained unit: elements `part` of its flat buffers, each [part], in stretches that
    tensor parallelism treats alike; `index` keys its rounding noise."""

    layout: FlatLayout
    part: slice
    param: torch.Tensor
    master: torch.Tensor | None
    m: torch.Tensor
    v: torch.Tensor
    index: int
    stretches: tuple[Stretch, ...]


class State:
    """Allocates and holds a model's tensors; says which are trained.

    base and adapters are this rank's units, unsplit, base_table and adapter_table all of the model's. trained: by unit
    name (all of the base in full training, the adapters under LoRA). comm: the ranks that hold the same tensors;
    owners: those of them that share out the state; tp: the ranks that share out the tensors (engine/split).
    """

    def __init__(
        self,
        config: ModelConfig,
        lora: LoraSettings | None,
        precision: Precision,
        arena: Arena,
        rng: torch.Tensor,
        *,
        trains: bool = True,
        sharing: Sharing | None = None,
        comm: Communicator | None = None,
        tp: Communicator | None = None,
        sequence: bool = False,
        held: Sequence[range] = (),
    ) -> None:
        """rng: for the noise of gradients' sums (ops/rounding). sequence: tp's ranks share the rows of the residual
        stream too. held: layers of this rank's stages; none: all."""
        self._arena, self._precision, self._rng = arena, precision, rng
        self._sharing, self._comm = sharing or Sharing(), comm or Communicator()
        self.owners = self._comm if self._sharing.zero >= 1 else Communicator()
        self.tp = tp or Communicator()
        self.layers = [layer for layers in held or [range(config.num_hidden_layers)] for layer in layers]
        self.base_table, self.adapter_table = tables(config, lora)
        self._held = _held(config, self.layers)
        self.base, self.adapters = (
            tuple(unit for unit in table if unit.name in self._held) for table in (self.base_table, self.adapter_table)
        )
        self.units = self.base + self.adapters
        margins = {} if lora is None else adapter_columns(lora)
        base, adapters = tables(split_config(config, self.tp.size), lora)
        self._layouts = {unit.name: _layout(unit, margins) for unit in base + adapters}
        pairs = zip(base + adapters, self.base_table + self.adapter_table, strict=True)
        given = self.tp, sequence
        self.splits = {own.name: UnitSplit(own, unit, self._layouts[own.name], *given) for own, unit in pairs}
        self._maps = {name: ShardMap(layout.size, self.owners.size) for name, layout in self._layouts.items()}
        self.tied = config.tie_word_embeddings
        self.weights = self._make_weights()
        self.trained: dict[str, TrainedUnit] = {}
        for index, unit in enumerate(self.base_table + self.adapter_table if trains else ()):
            if unit in (self.base if lora is None else self.adapters):
                self.trained[unit.name] = self._make_trained(unit.name, index)
        self.gradients = self._make_gradients()

    # ---- allocation

    def _turn(self, unit: str) -> str:
        """This rank's blocks, which may lie apart, take turns in two buffers, their adapters too; "" for what is not a
        block."""
        kind, _, rest = unit.partition(".")
        number, _, adapter = rest.partition(".")
        return f"{adapter or 'block'} {self.layers.index(int(number)) % 2}" if kind == "blocks" else ""

    def _owned(self, unit: str) -> slice:
        return self._maps[unit].owned(self.owners.rank)

    def _shared_buffers(
        self, segment: str, slots: dict[str, str], dtype: torch.dtype, *, part: bool = False, make: Zeros | None = None
    ) -> Views:
        """A flat buffer for every unit (whole, or this rank's part), those of one slot (by unit name) in one memory,
        which `make` makes."""
        lengths = {unit: self._maps[unit].part if part else self._maps[unit].whole for unit in slots}
        sizes: dict[str, int] = {}
        for unit, slot in slots.items():
            sizes[slot] = max(sizes.get(slot, 0), lengths[unit])
        buffers = {slot: self._arena.zeros(segment, (size,), dtype, make) for slot, size in sizes.items()}
        return {unit: buffers[slot][: lengths[unit]] for unit, slot in slots.items()}

    def _make_weights(self) -> ReplicatedWeights:
        gathered = self._sharing.zero >= 3 and self.owners.size > 1
        names = [unit.name for unit in self.units]
        segments = {unit.name: "weights" if unit in self.base else "adapters" for unit in self.units}
        sizes = {name: self._maps[name].part if gathered else self._maps[name].whole for name in names}
        transport, dtype = make_transport(self.owners, self._sharing.gather_by_copy), self._precision.param
        held = {name: self._arena.zeros(segments[name], (sizes[name],), dtype, transport.zeros) for name in names}
        # an untied embedding is done with before the head is wanted
        slots = {name: self._turn(name) or ("ends" if not self.tied else name) for name in names}
        flats = self._shared_buffers("gathered", slots, self._precision.param) if gathered else held
        units = {}
        for name, flat in flats.items():
            layout = self._layouts[name]
            extended = {f"{tensor}.extended": view for tensor, view in layout.extended_views(flat).items()}
            part = held[name] if gathered else flat[self._owned(name)]
            units[name] = WeightUnit(flat, layout.views(flat) | extended, part)
        self._flats = flats
        self.views = {name: self._layouts[name].views(flat) for name, flat in flats.items()}
        return (GatheredWeights if gathered else ReplicatedWeights)(units, self.owners, transport)

    def _make_trained(self, name: str, index: int) -> TrainedUnit:
        precision, zeros, part = self._precision, self._arena.zeros, self._owned(name)
        size = (self._maps[name].part,)
        master = None if precision.master is None else zeros("masters", size, precision.master)
        m, v = zeros("moments", size, precision.m), zeros("moments", size, precision.v)
        stretches = tuple(self.splits[name].stretches(part))
        return TrainedUnit(self._layouts[name], part, self.weights.shard(name), master, m, v, index, stretches)

    def _make_gradients(self) -> UnshardedGradients:
        """Sums in another dtype than the products' have to be apart from what the backward writes, so then every unit
        has them; else blocks, from zero 2 on."""
        dtype, param = self._precision.grad or self._precision.param, self._precision.param
        apart, offload = dtype != param, self._sharing.offload
        assert self._sharing.zero >= 2 or self._comm.size == 1 or not (apart or offload)
        sharded = apart or offload or self._sharing.zero >= 2
        slots = {name: (self._turn(name) if sharded else "") or name for name in self.trained}
        flats = self._shared_buffers("gradients", slots, param)
        units = {name: GradientUnit(flat, *self._gradient(name, flat)) for name, flat in flats.items()}
        if not sharded:
            return UnshardedGradients(units, self._comm)
        blocks = frozenset(name for name in self.trained if self._turn(name))
        summed = [name for name in self.trained if apart or name in blocks]
        given = units, self._comm, self._make_sums(summed, dtype), blocks, self._rng
        indices = {name: unit.index for name, unit in self.trained.items()}
        if not self._sharing.all_to_all or self._comm.size == 1:  # alone there is nobody to exchange with
            return ShardedGradients(*given, indices)
        transport = make_transport(self._comm, self._sharing.send_by_copy)
        received_slots = {name: slots[name] for name in summed}
        received = self._shared_buffers("gradients", received_slots, param, make=transport.zeros)
        return AllToAllGradients(*given, indices, received, transport)

    def _make_sums(self, units: list[str], dtype: torch.dtype) -> Offloaded:
        """What does not take turns stays on the device: the buffer to bring it to would be as large as itself."""
        away = [name for name in units if self._sharing.offload and self._turn(name)]
        slots = {name: self._turn(name) if name in away else name for name in units}
        buffers = self._shared_buffers("gradients", slots, dtype, part=True)
        return Offloaded(
            buffers, {name: self._arena.host("gradients", (self._maps[name].part,), dtype) for name in away}
        )

    def _gradient(self, name: str, flat: torch.Tensor) -> tuple[Views, slice, slice]:
        """(views, what is added into from the start, this rank's part) of a unit's gradient."""
        layout = self._layouts[name]
        # the gradient of a tied embedding is overwritten by the head's backward, which comes first, if it is here
        matrices_too = name == "embedding" and not (self.tied and "head" in self._held)
        return layout.views(flat), slice(0 if matrices_too else layout.decayed, layout.size), self._owned(name)

    # ---- what is in them, whole

    def tensor(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        """One parameter, where weights are whole on every rank, or while the unit is open."""
        return self.views[unit.name][spec.name]

    @contextmanager
    def open_share(self, unit: Unit) -> Iterator[Views]:
        """This rank's share of the parameters of `unit` (all of them without tensor parallelism), to read and to write:
        what is written must be the same on every rank that has the same share.

        A collective: all ranks open the same units in the same order.
        """
        self.weights.gather(unit.name)
        self.weights.get(unit.name)
        try:
            yield self.views[unit.name]
            self.weights.keep(unit.name)
        finally:
            self.weights.release(unit.name)

    @contextmanager
    def open(self, unit: Unit) -> Iterator[Views]:
        """The parameters of `unit`, whole, to read and to write: what is written must be the same on every rank. A
        collective as `open_share`."""
        with self.open_share(unit) as views:
            if self.tp.size == 1:
                yield views
                return
            with self._unsplit(unit.name, self._flats[unit.name]) as whole:
                yield whole

    @contextmanager
    def open_values(self, unit: Unit) -> Iterator[Views]:
        """As `open`, in the most digits that there are: the masters', where `unit` has them."""
        trained = self.trained.get(unit.name)
        if trained is None or trained.master is None:
            with self.open(unit) as views:
                yield views
            return
        flat = self._brought(unit.name, trained.master)
        with self._unsplit(unit.name, flat) as whole:
            yield whole
        trained.master.copy_(flat[trained.part])

    @contextmanager
    def _unsplit(self, unit: str, flat: torch.Tensor) -> Iterator[Views]:
        """The unsplit tensors of which `flat` is this rank's share: what is written is cut into it."""
        split = self.splits[unit]
        whole = split.gather(flat)
        yield split.whole_layout.views(whole)
        if self.tp.size > 1:
            split.cut(whole, flat)

    def _brought(self, unit: str, part: torch.Tensor) -> torch.Tensor:
        """A flat buffer of which every owner has its `part`. A collective."""
        if self.owners.size == 1:
            return part
        flat = part.new_empty(self._maps[unit].whole)
        self.owners.all_gather(part, flat).wait()
        return flat

    def values(self, unit: Unit) -> Views:
        """Copies on the CPU of what `open_values` gives. A collective."""
        with self.open_values(unit) as views:
            return {name: view.cpu().clone(memory_format=torch.contiguous_format) for name, view in views.items()}

    def values_dtype(self, unit: Unit) -> torch.dtype:
        """The dtype that `open_values` gives."""
        precision, trained = self._precision, self.adapter_table or self.base_table
        return precision.master if precision.master and self.trained and unit in trained else precision.param

    def held(self, unit: str, device: str = "cpu") -> dict[str, Part]:
        """What this rank needs of a trained unit that was saved, by name: its parts of parameters, masters (if any) and
        moments, themselves. Where they are split: the whole on `device`, to be filled, for `restore`."""
        if self.tp.size == 1:
            return self._cut(unit, self._maps[unit].unpadded(self.owners.rank))
        size, buffers = self.splits[unit].whole_layout.size, self._buffers(unit).items()
        return {name: Part(torch.empty(size, dtype=b.dtype, device=device), 0, size) for name, b in buffers}

    def restore(self, unit: str, parts: Mapping[str, Part]) -> None:
        """The parts that `held` gave were filled: let them be what this rank keeps."""
        if self.tp.size == 1:
            return
        for name, buffer in self._buffers(unit).items():
            flat = buffer.new_zeros(self._maps[unit].whole)
            self.splits[unit].cut(parts[name].values, flat)
            buffer.copy_(flat[self._owned(unit)])

    def share(self, unit: str) -> dict[str, Part]:
        """What this rank saves of that: an equal part of all ranks', whether they hold the whole or not; where tensors
        are split, a copy on the CPU. A collective."""
        if self.tp.size == 1:
            return self._cut(unit, ShardMap(self._maps[unit].size, self._comm.size).unpadded(self._comm.rank))
        size = self.splits[unit].whole_layout.size
        rank, ranks = self._comm.rank * self.tp.size + self.tp.rank, self._comm.size * self.tp.size
        wanted, parts = ShardMap(size, ranks).unpadded(rank), {}
        for name, buffer in self._buffers(unit).items():
            whole = self.splits[unit].gather(self._brought(unit, buffer))
            parts[name] = Part(whole[wanted].to("cpu", copy=True), wanted.start, size)
        return parts

    def _cut(self, unit: str, wanted: slice) -> dict[str, Part]:
        u = self.trained[unit]
        own = slice(wanted.start - u.part.start, wanted.stop - u.part.start)
        return {name: Part(b[own], wanted.start, u.layout.size) for name, b in self._buffers(unit).items()}

    def _buffers(self, unit: str) -> dict[str, torch.Tensor]:
        u = self.trained[unit]
        named = {"param": u.param, "master": u.master, "m": u.m, "v": u.v}
        return {name: buffer for name, buffer in named.items() if buffer is not None}

    def gradient(self, unit: Unit) -> Views:
        """What this rank holds of the gradient of the loss sum, on the CPU, for debugging: its own rows' sum, or once
        that is reduced all ranks' sum in this rank's part; zeros elsewhere and for a frozen unit. Of what tensor
        parallelism shares out: with the others' shares, and then a collective."""
        dtype, device = self._precision.grad or self._precision.param, self._arena.device
        flat = torch.zeros(self._maps[unit.name].whole, dtype=dtype, device="cpu" if self.tp.size == 1 else device)
        if unit.name in self.trained:
            part, values = self.gradients.held(unit.name)
            flat[part] = values.to(flat)
            for stretch, _, term in self.splits[unit.name].stretches(slice(0, len(flat))):
                if term:
                    self.tp.all_reduce(flat[stretch]).wait()
        split = self.splits[unit.name]
        return {name: view.cpu() for name, view in split.whole_layout.views(split.gather(flat)).items()}

    def params_written(self, units: tuple[Unit, ...]) -> None:
        """The parameters of `units` were written from outside: bring their masters, if any, up to date."""
        for name in [unit.name for unit in units if unit.name in self.trained]:
            unit = self.trained[name]
            if unit.master is not None:
                unit.master.copy_(unit.param)

    def values_written(self) -> None:
        """The most digits were written from outside: bring the parameters up to date."""
        self.weights.start_writing()
        for unit in self.trained.values():
            if unit.master is not None:
                unit.param.copy_(unit.master)
        self.parts_written()

    def parts_written(self) -> None:
        """This rank's parts of the trained parameters were written, after `weights.start_writing()`: spread them, as
        far as they are held whole."""
        for name in self.trained:
            self.weights.written(name)
        self.weights.settle()


def _held(config: ModelConfig, layers: list[int]) -> frozenset[str]:
    """The units that belong to `layers`. A tied embedding belongs to both ends, so there may be two of it."""
    names = {f"blocks.{layer}{kind}" for layer in layers for kind in ("", ".adapter")}
    top = config.num_hidden_layers - 1 in layers
    if 0 in layers or (top and config.tie_word_embeddings):
        names.add("embedding")
    return frozenset(names | ({"head"} if top else set()))


def _layout(unit: Unit, margins: dict[str, int]) -> FlatLayout:
    """`margins`: of the linears that have an adapter, which is folded into them (model/linear)."""
    own = {t.name: margins[t.name] for t in unit.tensors if t.name in margins}
    return FlatLayout.of(((t.name, t.shape, t.decay) for t in unit.tensors), own)
