"""Everything that training keeps: weights, adapters, gradients, masters and moments, one flat buffer each a unit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullstride.memory.arena import Arena, FlatLayout
from fullstride.model.lora import LoraSettings, adapter_columns, adapter_unit
from fullstride.model.spec import ModelConfig, TensorSpec, Unit, parameter_table
from fullstride.parallel.gradients import GradientUnit, UnshardedGradients
from fullstride.parallel.weights import ReplicatedWeights


@dataclass(frozen=True)
class Precision:
    """dtypes of parameters (and gradients), their masters (None: no separate copy), and the two moments."""

    param: torch.dtype
    master: torch.dtype | None
    m: torch.dtype
    v: torch.dtype


@dataclass(frozen=True)
class TrainedUnit:
    """A trained unit's flat buffers [layout.size]; `index` keys its rounding noise."""

    layout: FlatLayout
    param: torch.Tensor
    master: torch.Tensor | None
    grad: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    index: int


class State:
    """Allocates and holds a model's tensors; says which are trained.

    units: the base model's table and then the adapters'; trained: by unit name (all of the base in full training, the
    adapters under LoRA).
    """

    def __init__(
        self, config: ModelConfig, lora: LoraSettings | None, precision: Precision, arena: Arena, trains: bool = True
    ) -> None:
        self.base = parameter_table(config)
        layers = range(config.num_hidden_layers)
        self.adapters = () if lora is None else tuple(adapter_unit(config, lora, layer) for layer in layers)
        self.units = self.base + self.adapters
        margins = {} if lora is None else adapter_columns(lora)
        layouts = {unit.name: _layout(unit, margins) for unit in self.units}
        flats = {}
        for unit in self.units:
            segment = "weights" if unit in self.base else "adapters"
            flats[unit.name] = arena.zeros(segment, (layouts[unit.name].size,), precision.param)
        self.views = {name: layouts[name].views(flat) for name, flat in flats.items()}
        extended = {name: layouts[name].extended_views(flat) for name, flat in flats.items()}
        self.weights = ReplicatedWeights(
            {unit: self.views[unit] | {f"{name}.extended": t for name, t in extended[unit].items()} for unit in flats}
        )
        self.trained: dict[str, TrainedUnit] = {}
        for index, unit in enumerate(self.units if trains else ()):
            if lora is None or unit in self.adapters:
                layout, param = layouts[unit.name], flats[unit.name]
                size = (layout.size,)
                master = None if precision.master is None else arena.zeros("masters", size, precision.master)
                grad = arena.zeros("gradients", size, precision.param)
                m, v = arena.zeros("moments", size, precision.m), arena.zeros("moments", size, precision.v)
                self.trained[unit.name] = TrainedUnit(layout, param, master, grad, m, v, index)
        untied = not config.tie_word_embeddings
        self.gradients = UnshardedGradients(
            {n: GradientUnit(t.grad, t.layout.views(t.grad), t.layout.decayed) for n, t in self.trained.items()},
            # a tied embedding's gradient is overwritten by the head's backward, which comes first
            zero_whole=frozenset({"embedding"} if untied else ()),
        )

    def tensor(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        """One parameter."""
        return self.views[unit.name][spec.name]

    def values(self, unit: Unit) -> dict[str, torch.Tensor]:
        """The tensors of `unit` in the most digits that there are: the masters', where it has them."""
        trained = self.trained.get(unit.name)
        if trained is None or trained.master is None:
            return self.views[unit.name]
        return trained.layout.views(trained.master)

    def params_written(self, units: tuple[Unit, ...]) -> None:
        """The parameters of `units` were written from outside: bring their masters, if any, up to date."""
        for name in [unit.name for unit in units if unit.name in self.trained]:
            unit = self.trained[name]
            if unit.master is not None:
                unit.master.copy_(unit.param)

    def values_written(self) -> None:
        """`values` were written from outside: bring the parameters up to date."""
        for unit in self.trained.values():
            if unit.master is not None:
                unit.param.copy_(unit.master)


def _layout(unit: Unit, margins: dict[str, int]) -> FlatLayout:
    """`margins`: of the linears that have an adapter, which is folded into them (model/linear)."""
    own = {t.name: margins[t.name] for t in unit.tensors if t.name in margins}
    return FlatLayout.of(((t.name, t.shape, t.decay) for t in unit.tensors), own)
