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


def plan_pipeline(
    name: str, num_ranks: int, microbatches: int, chunks: int = 1, work: Work | None = None
) -> PipelinePlan:
    """The schedule of these arguments (as of parallel/schedule.make_schedule) in time, the model's layers over its
    stages. The embedding, a look-up, counts as nothing. Without `work` there are no layers, and every rank takes a unit
    of time for a forward and for each half of a backward.

    Raises ConfigError as make_schedule does, and for fewer layers than stages.
    """
    schedule = make_schedule(name, num_ranks, microbatches, chunks)
    if work is None:
        costs = [Passes(*(1 / chunks for _ in Passes._fields))] * schedule.num_stages
        return PipelinePlan([], costs, in_time(schedule, costs))
    layer = layer_flops(work.config, work.adapters, work.tokens, work.squared_lengths)
    head = head_flops(work.config, work.adapters is None, work.tokens)
    sizes = work.config.num_hidden_layers, schedule.num_stages
    layers = split_layers(*sizes, layer_cost=sum(layer), last_cost=sum(head), chunks=chunks)
    costs = [Passes(*(len(part) * cost for cost in layer)) for part in layers]
    costs[-1] = Passes(*(own + more for own, more in zip(costs[-1], head, strict=True)))
    return PipelinePlan(layers, costs, in_time(schedule, costs))


def in_time(schedule: Schedule, costs: list[Passes]) -> Timeline:
    """The simulation where an action takes as long as its FLOPs; transfers cost nothing."""

    def cost(action: Action) -> float:
        passes = costs[action.stage]
        halved = schedule.name == "zb-h1"
        backward = passes.for_input if halved else passes.for_input + passes.for_weights
        return {"F": passes.forward, "B": backward, "W": passes.for_weights}[action.kind]

    return simulate(schedule, cost)
