"""What every rank of a pipeline does, in which order: pure values, printable and tested without processes.

Stage s of pp * chunks stages lives on rank s % pp. All schedules follow one rule, with two numbers of their own. A rank
starts with `ahead` forwards; after them every backward is followed by one more forward, as long as there are some:

    gpipe        ahead = all of them (Huang et al. 2018, arXiv 1811.06965)
    1f1b         ahead = pp - rank (Harlap et al. 2018, arXiv 1806.03377; its form with a flush)
    interleaved  ahead = 2 (pp - rank - 1) + (chunks - 1) pp + 1, the forwards of a rank's chunks taking turns by groups
                 of pp micro-batches (Narayanan et al. 2021, arXiv 2104.04473)
    zb-h1        1f1b whose backward is halved: B hands on the gradient of the stage's input, W, which nobody waits for,
                 computes the weights' and fills what would be idle. W lags `rank` micro-batches behind B
                 (Qi et al. 2023, arXiv 2401.10241: figure 2's order, written as a rule)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fullstride.errors import ConfigError

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1")


@dataclass(frozen=True, order=True)
class Action:
    """What one rank does with one micro-batch in one stage."""

    kind: str  # "F" forward; "B" backward (in zb-h1: for the input only); "W" backward for the weights (zb-h1 only)
    stage: int  # of all pp * chunks stages
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank in its order. Messages between two ranks in one direction of flow (activations forward,
    gradients backward) are sent in the order in which they are received."""

    name: str
    num_ranks: int
    chunks: int
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]  # per rank

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        return stage % self.num_ranks

    def needs(self, action: Action) -> tuple[Action, ...]:
        """What must be over before `action` begins; on another rank where its stage is another one."""
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind == "F":
            return (Action("F", stage - 1, microbatch),) if stage else ()
        if kind == "W":
            return (Action("B", stage, microbatch),)
        own = Action("F", stage, microbatch)
        return (own, Action("B", stage + 1, microbatch)) if stage + 1 < self.num_stages else (own,)

    def stages(self, rank: int) -> range:
        """Those that live on `rank`."""
        return range(rank, self.num_stages, self.num_ranks)

    @property
    def splits_backward(self) -> bool:
        """Whether weights' gradients have actions of their own."""
        return self.name == "zb-h1"

    def first(self, microbatches: int) -> Schedule:
        """The same for the first so many micro-batches: the others' actions are left out, which nothing waits for."""
        assert 1 <= microbatches <= self.microbatches
        return replace(self._without(lambda m: m >= microbatches), microbatches=microbatches)

    def after(self, microbatches: int) -> Schedule:
        """What is left when the first so many micro-batches are all through."""
        return self._without(lambda m: m < microbatches)

    def _without(self, left_out: Callable[[int], bool]) -> Schedule:
        orders = tuple(tuple(a for a in order if not left_out(a.microbatch)) for order in self.orders)
        return replace(self, orders=orders)

    def ready(self, supplied: int) -> list[int]:
        """By rank, how many actions can be done while only the first `supplied` micro-batches are there, such that all
        that is sent is received: so no rank is left waiting for what another one does only when there are more."""
        counts = [
            next((i for i, a in enumerate(order) if a.microbatch >= supplied), len(order)) for order in self.orders
        ]
        if self.num_ranks == 1:
            return counts
        place = {a: (rank, i) for rank, order in enumerate(self.orders) for i, a in enumerate(order)}

        def open_end(action: Action) -> bool:
            return any(i >= counts[rank] for rank, i in (place[b] for b in self.across(action) if b in place))

        while True:
            cut = [
                next((i for i, a in enumerate(order[:n]) if open_end(a)), n)
                for order, n in zip(self.orders, counts, strict=True)
            ]
            if cut == counts:
                return counts
            counts = cut

    def across(self, action: Action) -> list[Action]:
        """The actions of other ranks from which this one receives, and to which it sends."""
        if action.kind == "W":
            return []
        stages = [s for s in (action.stage - 1, action.stage + 1) if 0 <= s < self.num_stages]
        here = self.rank_of(action.stage)
        return [Action(action.kind, s, action.microbatch) for s in stages if self.rank_of(s) != here]


def make_schedule(name: str, num_ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule `name` (SCHEDULES) for any number of ranks and micro-batches; `chunks` stages a rank, at least 2 for
    interleaved and 1 for the others. One rank takes micro-batch after micro-batch, whatever the name.

    Raises ConfigError for a name or a number that does not fit, with the nearest that does.
    """
    _check(name, num_ranks, microbatches, chunks)
    if num_ranks == 1:
        kinds = "FBW" if name == "zb-h1" else "FB"
        alone = [
            Action(kind, stage, microbatch)
            for microbatch in range(microbatches)
            for kind in kinds
            for stage in (range(chunks) if kind == "F" else reversed(range(chunks)))
        ]
        return Schedule(name, num_ranks, chunks, microbatches, (tuple(alone),))
    orders = tuple(_order(name, rank, num_ranks, microbatches, chunks) for rank in range(num_ranks))
    # groups are whole: a last one of fewer micro-batches than ranks is one of which some are left out
    return Schedule(name, num_ranks, chunks, microbatches, orders).first(microbatches)


def forward_only(num_ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Micro-batches through all stages and not back, for evaluation."""
    whole = -(-microbatches // num_ranks) * num_ranks
    orders = (
        _in_groups("F", range(rank, num_ranks * chunks, num_ranks), whole, num_ranks) for rank in range(num_ranks)
    )
    return Schedule("forward", num_ranks, chunks, whole, tuple(map(tuple, orders))).first(microbatches)


def _check(name: str, num_ranks: int, microbatches: int, chunks: int) -> None:
    if name not in SCHEDULES:
        raise ConfigError(f"there is no pp-schedule {name!r}; set one of {', '.join(SCHEDULES)}")
    for key, value in (("pp", num_ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ConfigError(f"{key} must be at least 1, got {value}; set {key} to 1 or more")
    if name == "interleaved" and chunks < 2:
        raise ConfigError(
            f"pp-schedule = interleaved needs at least 2 chunks a rank, got {chunks}; "
            "set chunks to 2, or pp-schedule to 1f1b"
        )
    if name != "interleaved" and chunks > 1:
        raise ConfigError(
            f"pp-schedule = {name} has 1 chunk a rank, got {chunks}; set chunks to 1, or pp-schedule to interleaved"
        )


def _order(name: str, rank: int, num_ranks: int, microbatches: int, chunks: int) -> tuple[Action, ...]:
    """The actions of `rank` by the rule above, the last group of micro-batches filled up."""
    ahead = {
        "gpipe": microbatches,
        "1f1b": num_ranks - rank,
        "zb-h1": num_ranks - rank,
        "interleaved": 2 * (num_ranks - rank - 1) + (chunks - 1) * num_ranks + 1,
    }[name]
    group = num_ranks if name == "interleaved" else microbatches
    stages = range(rank, num_ranks * chunks, num_ranks)
    forwards = _in_groups("F", stages, microbatches, group)
    backwards = _in_groups("B", stages[::-1], microbatches, group)
    lag = rank if name == "zb-h1" else len(backwards)
    weights = [Action("W", b.stage, b.microbatch) for b in backwards] if name == "zb-h1" else []
    order = forwards[:ahead]
    for i, backward in enumerate(backwards):
        order.append(backward)
        if i >= lag:
            order.append(weights[i - lag])
        order += forwards[i + ahead : i + ahead + 1]
    return tuple(order + weights[max(0, len(weights) - lag) :])


def _in_groups(kind: str, stages: Sequence[int], microbatches: int, group: int) -> list[Action]:
    """Groups of micro-batches one after another, all whole, each through all `stages` before the next."""
    starts = range(0, microbatches, group)
    return [Action(kind, stage, start + i) for start in starts for stage in stages for i in range(group)]


def peak_live(schedule: Schedule, rank: int) -> dict[int, int]:
    """{stage: most micro-batches at once whose forward has begun and whose last action is not over}, of `rank`."""
    last = "W" if schedule.name == "zb-h1" else "B"
    live = dict.fromkeys(range(rank, schedule.num_stages, schedule.num_ranks), 0)
    peak = dict(live)
    for action in schedule.orders[rank]:
        if action.kind == "F":
            live[action.stage] += 1
            peak[action.stage] = max(peak[action.stage], live[action.stage])
        elif action.kind == last:
            live[action.stage] -= 1
    return peak


def slots(schedule: Schedule) -> dict[int, tuple[int, ...]]:
    """{stage: by micro-batch, which of the stage's `peak_live` buffers it uses}.

    A stage takes up micro-batches, and is done with them, in ascending order. So those alive are consecutive, at most
    the peak of them, and their numbers modulo the peak differ.
    """
    peaks = {stage: peak for rank in range(schedule.num_ranks) for stage, peak in peak_live(schedule, rank).items()}
    return {stage: tuple(i % peaks[stage] for i in range(schedule.microbatches)) for stage in sorted(peaks)}


def split_layers(
    num_layers: int,
    num_stages: int,
    layer_cost: float = 1.0,
    first_cost: float = 0.0,
    last_cost: float = 0.0,
    chunks: int = 1,
) -> list[range]:
    """The layers of every stage: contiguous, all of them, at least one each, such that the costliest stage costs least
    and, among those, the sum of squares is least. `first_cost` and `last_cost`, in the unit of `layer_cost`, are what
    the first stage (embedding) and the last (head, loss) do besides. chunks: stages a rank, for the message.

    Layers cost the same, so each goes to whichever stage has least: that is optimal for every sum of a convex function
    of the stages' costs at once (Federgruen and Groenevelt 1986), and for the maximum. Ties go to later stages.

    Raises ConfigError with both numbers when a stage would have none.
    """
    assert layer_cost > 0
    if num_layers < num_stages:
        remedy = f"set pp to at most {num_layers // chunks}" if num_layers >= chunks else f"leave chunks = {chunks} out"
        raise ConfigError(f"{num_layers} layers cannot be split over {num_stages} pipeline stages; {remedy}")
    counts = [1] * num_stages
    extra = [0.0] * num_stages
    extra[0] += first_cost
    extra[-1] += last_cost
    for _ in range(num_layers - num_stages):
        counts[min(range(num_stages), key=lambda s: (extra[s] + counts[s] * layer_cost, -s))] += 1
    bounds = [sum(counts[:stage]) for stage in range(num_stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(bounds)]
