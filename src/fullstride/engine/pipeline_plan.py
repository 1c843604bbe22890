"""What a pipeline does when, before it runs: layers dealt to stages by their FLOPs, and the schedule in time."""

from __future__ import annotations

from dataclasses import dataclass

from fullstride.model.flops import Passes, head_flops, layer_flops
from fullstride.model.spec import ModelConfig
from fullstride.parallel.schedule import Action, Schedule, make_schedule, peak_live, split_layers
from fullstride.parallel.simulate import Timeline, picture, simulate


@dataclass(frozen=True)
class PipelinePlan:
    """`layers` and `costs` (FLOPs of a micro-batch) by stage; `timeline` in the unit of the costs."""

    layers: list[range]
    costs: list[Passes]
    timeline: Timeline

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @property
    def peak_live(self) -> list[int]:
        """By stage, the most micro-batches at once whose activations it holds."""
        peaks = {s: n for rank in range(self.schedule.num_ranks) for s, n in peak_live(self.schedule, rank).items()}
        return [peaks[stage] for stage in sorted(peaks)]

    def picture(self, width: int = 120) -> str:
        """See parallel/simulate.picture."""
        return picture(self.timeline, width)


@dataclass(frozen=True)
class Work:
    """The model, and a micro-batch as model/flops.layer_flops takes it: elements of a layer's adapters or None, tokens,
    sum of the squared lengths of its documents."""

    config: ModelConfig
    adapters: int | None
    tokens: int
    squared_lengths: int

    @property
    def layer(self) -> Passes:
        """FLOPs of a layer."""
        return layer_flops(self.config, self.adapters, self.tokens, self.squared_lengths)

    @property
    def head(self) -> Passes:
        """FLOPs of the head."""
        return head_flops(self.config, self.adapters is None, self.tokens)


def deal_layers(work: Work, num_ranks: int, chunks: int) -> list[range]:
    """The layers of every stage, balanced by FLOPs. The embedding, a look-up, counts as nothing.

    Raises ConfigError for fewer layers than stages.
    """
    sizes = work.config.num_hidden_layers, num_ranks * chunks
    return split_layers(*sizes, layer_cost=sum(work.layer), last_cost=sum(work.head), chunks=chunks)


def plan_pipeline(
    name: str, num_ranks: int, microbatches: int, chunks: int = 1, work: Work | None = None
) -> PipelinePlan:
    """The schedule of these arguments (as of parallel/schedule.make_schedule) in time, the model's layers over its
    stages. Without `work` there are no layers, and every rank takes a unit
    of time for a forward and for each half of a backward.

    Raises ConfigError as make_schedule does, and for fewer layers than stages.
    """
    schedule = make_schedule(name, num_ranks, microbatches, chunks)
    if work is None:
        costs = [Passes(*(1 / chunks for _ in Passes._fields))] * schedule.num_stages
        return PipelinePlan([], costs, in_time(schedule, costs))
    layer, head, layers = work.layer, work.head, deal_layers(work, num_ranks, chunks)
    costs = [Passes(*(len(part) * cost for cost in layer)) for part in layers]
    own = costs[-1]  # the head does all its work in the backward (engine/stage)
    costs[-1] = Passes(own.forward, own.for_input + head.forward + head.for_input, own.for_weights + head.for_weights)
    return PipelinePlan(layers, costs, in_time(schedule, costs))


def in_time(schedule: Schedule, costs: list[Passes]) -> Timeline:
    """The simulation where an action takes as long as its FLOPs; transfers cost nothing."""

    def cost(action: Action) -> float:
        passes = costs[action.stage]
        halved = schedule.name == "zb-h1"
        backward = passes.for_input if halved else passes.for_input + passes.for_weights
        return {"F": passes.forward, "B": backward, "W": passes.for_weights}[action.kind]

    return simulate(schedule, cost)
