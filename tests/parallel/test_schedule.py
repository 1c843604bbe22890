"""Schedules without processes: order, pairing, live micro-batches; dealing layers to stages."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from fullstride.errors import ConfigError
from fullstride.parallel.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    make_schedule,
    peak_live,
    slots,
    split_layers,
)
from fullstride.parallel.simulate import simulate

every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def shapes(name: str, least_ranks: int = 1) -> Iterator[tuple[int, int, int]]:
    """200 times (ranks, micro-batches, chunks), among them fewer micro-batches than ranks and no multiples of them."""
    draw = random.Random(name)
    for _ in range(200):
        chunks = draw.randint(2, 4) if name == "interleaved" else 1
        yield draw.randint(least_ranks, 8), draw.randint(1, 24), chunks


def kinds(name: str) -> str:
    return "FBW" if name == "zb-h1" else "FB"


def unit(action: Action) -> float:
    return 1.0


@every_schedule
def test_every_action_once_and_in_order(name: str) -> None:
    for ranks, microbatches, chunks in shapes(name):
        schedule = make_schedule(name, ranks, microbatches, chunks)
        assert (schedule.num_ranks, schedule.chunks, schedule.microbatches) == (ranks, chunks, microbatches)
        every = {Action(k, s, i) for k in kinds(name) for s in range(ranks * chunks) for i in range(microbatches)}
        told = Counter(itertools.chain(*schedule.orders))
        assert set(told) == every and set(told.values()) == {1}
        for rank, order in enumerate(schedule.orders):
            assert {action.stage % ranks for action in order} == {rank}
            place = {action: i for i, action in enumerate(order)}
            for stage in range(rank, ranks * chunks, ranks):
                for kind in kinds(name):  # ascending
                    places = [place[Action(kind, stage, i)] for i in range(microbatches)]
                    assert places == sorted(places)
                for i in range(microbatches):
                    places = [place[Action(kind, stage, i)] for kind in kinds(name)]
                    assert places == sorted(places)


@every_schedule
def test_one_rank_takes_micro_batch_after_micro_batch(name: str) -> None:
    schedule = make_schedule(name, 1, 3, chunks=2 if name == "interleaved" else 1)
    one = {"interleaved": ["F0", "F1", "B1", "B0"], "zb-h1": ["F0", "B0", "W0"]}.get(name, ["F0", "B0"])
    told = [(f"{action.kind}{action.stage}", action.microbatch) for action in schedule.orders[0]]
    assert told == [(action, i) for i in range(3) for action in one]


@every_schedule
def test_executable_also_without_the_last_micro_batches(name: str) -> None:
    """Where sends never block and receives wait: the simulation ends, with every action after what it needs."""
    for ranks, microbatches, chunks in shapes(name):
        schedule = make_schedule(name, ranks, microbatches, chunks)
        for count in {microbatches, (microbatches + 1) // 2, 1}:
            short = schedule.first(count)
            timeline = simulate(short, unit, transfer=0.25)
            assert len(timeline.end) == ranks * chunks * count * len(kinds(name))
            for stage, i in itertools.product(range(ranks * chunks), range(count)):
                forward, backward = Action("F", stage, i), Action("B", stage, i)
                before = [(forward, backward)]
                if stage:
                    before.append((Action("F", stage - 1, i), forward))
                    before.append((backward, Action("B", stage - 1, i)))
                if name == "zb-h1":
                    before.append((backward, Action("W", stage, i)))
                for first, second in before:
                    moved = 0.25 if first.stage % ranks != second.stage % ranks else 0.0
                    assert timeline.start[second] >= timeline.end[first] + moved


def messages(schedule: Schedule, ends: bool) -> dict[tuple[int, int, str], list[tuple[int, int]]]:
    """{(sender, receiver, kind): (receiving stage, micro-batch)s} in the receivers' order if `ends`, else in the
    senders'."""
    found: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    ranks, last = schedule.num_ranks, schedule.num_ranks * schedule.chunks - 1
    for action in itertools.chain(*schedule.orders):
        step = {"F": 1, "B": -1, "W": 0}[action.kind]
        source, target = (action.stage - step, action.stage) if ends else (action.stage, action.stage + step)
        if step and min(source, target) >= 0 and max(source, target) <= last and source % ranks != target % ranks:
            found.setdefault((source % ranks, target % ranks, action.kind), []).append((target, action.microbatch))
    return found


@every_schedule
def test_messages_are_wanted_in_the_order_in_which_they_are_sent(name: str) -> None:
    for ranks, microbatches, chunks in shapes(name, least_ranks=2):
        schedule = make_schedule(name, ranks, microbatches, chunks)
        for count in (microbatches, (microbatches + 1) // 2):
            sent = messages(schedule.first(count), ends=False)
            assert sent == messages(schedule.first(count), ends=True)
            assert sum(map(len, sent.values())) == 2 * (ranks * chunks - 1) * count


def live(schedule: Schedule, rank: int, until: str) -> int:
    """Most micro-batches, of all stages of a rank together, between F and `until`."""
    count = peak = 0
    for action in schedule.orders[rank]:
        count += (action.kind == "F") - (action.kind == until)
        peak = max(peak, count)
    return peak


@every_schedule
def test_peak_live_micro_batches(name: str) -> None:
    for ranks, microbatches, chunks in shapes(name, least_ranks=2):
        schedule = make_schedule(name, ranks, microbatches, chunks)
        for rank in range(ranks):
            peak = peak_live(schedule, rank)
            if name == "interleaved":
                # for the first rank chunks * ranks + ranks - 1, as in Korthikanti et al. 2022, arXiv 2205.05198
                most = 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1
                whole = microbatches % ranks == 0
                assert live(schedule, rank, "B") <= most
                assert not whole or live(schedule, rank, "B") == min(most, microbatches * chunks)
                for chunk in range(chunks):
                    # a micro-batch of the chunk lives for so many forwards of the rank; of `ranks * chunks` in a row,
                    # `ranks` in a row are the chunk's
                    span = 2 * (chunks - 1 - chunk) * ranks + 2 * (ranks - rank - 1) + 1
                    rounds, rest = divmod(span, ranks * chunks)
                    formula = min(microbatches, rounds * ranks + min(ranks, rest))
                    told = peak[chunk * ranks + rank]
                    assert told == formula if whole else told <= formula
            else:
                # zb-h1: what the first rank of 1f1b holds, on each (Qi et al., section 2.3); 1f1b's last ranks hold
                # less, but it is the weights' gradients put off that fill the bubble at the end
                most = {"gpipe": microbatches, "1f1b": ranks - rank, "zb-h1": ranks}[name]
                assert peak == {rank: min(microbatches, most)} == {rank: live(schedule, rank, kinds(name)[-1])}
            if name == "zb-h1":  # what only the input's gradient reads
                assert live(schedule, rank, "B") == min(microbatches, ranks - rank)


@every_schedule
def test_no_buffer_is_written_before_its_last_reader(name: str) -> None:
    for ranks, microbatches, chunks in shapes(name):
        schedule = make_schedule(name, ranks, microbatches, chunks)
        places = slots(schedule)
        assert list(places) == list(range(ranks * chunks))
        for count in (microbatches, (microbatches + 1) // 2):
            for rank, order in enumerate(schedule.first(count).orders):
                peaks = peak_live(schedule, rank)
                held: dict[tuple[int, int], int] = {}  # (stage, slot): micro-batch
                for action in order:
                    place = action.stage, places[action.stage][action.microbatch]
                    assert 0 <= place[1] < peaks[action.stage]
                    if action.kind == "F":
                        assert place not in held
                        held[place] = action.microbatch
                    assert held[place] == action.microbatch
                    if action.kind == kinds(name)[-1]:
                        del held[place]
                assert not held


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("zigzag", 2, 4), r"no pp-schedule 'zigzag'; set one of 1f1b, gpipe, interleaved, zb-h1"),
        (("gpipe", 0, 4), r"pp must be at least 1, got 0"),
        (("gpipe", 2, 0), r"microbatches must be at least 1, got 0"),
        (("interleaved", 2, 4, 1), r"interleaved needs at least 2 chunks a rank, got 1; set chunks to 2"),
        (("1f1b", 2, 4, 3), r"1f1b has 1 chunk a rank, got 3; set chunks to 1"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(arguments: tuple, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_schedule(*arguments)


# ---- layers


@pytest.mark.parametrize(("layers", "stages"), [(7, 2), (30, 4), (36, 2), (5, 5), (1, 1)])
def test_every_layer_is_there_once(layers: int, stages: int) -> None:
    parts = split_layers(layers, stages)
    assert list(itertools.chain(*parts)) == list(range(layers))
    sizes = [len(part) for part in parts]
    assert len(sizes) == stages and max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


def test_the_split_balances_time() -> None:
    """Against all splits there are: least maximum, then least sum of squares. Costs are small integers: exact."""
    draw = random.Random(0)
    for _ in range(200):
        layers = draw.randint(1, 11)
        stages = draw.randint(1, min(5, layers))
        layer, first, last = draw.randint(1, 4), draw.randint(0, 9), draw.randint(0, 9)

        def weight(bounds: tuple[int, ...], layer: int = layer, first: int = first, last: int = last) -> tuple:
            costs = [layer * (end - start) for start, end in itertools.pairwise(bounds)]
            costs[0] += first
            costs[-1] += last
            return max(costs), sum(cost**2 for cost in costs)

        parts = split_layers(layers, stages, layer, first, last)
        assert list(itertools.chain(*parts)) == list(range(layers)) and all(parts)
        cuts = itertools.combinations(range(1, layers), stages - 1)
        assert weight((0, *(part.stop for part in parts))) == min(weight((0, *cut, layers)) for cut in cuts)


def test_the_head_makes_its_stage_shorter() -> None:
    assert [len(part) for part in split_layers(36, 2, layer_cost=1.0, last_cost=4.0)] == [20, 16]


def test_more_stages_than_layers() -> None:
    with pytest.raises(ConfigError, match=r"3 layers .* 4 pipeline stages; set pp to at most 3"):
        split_layers(3, 4)
    with pytest.raises(ConfigError, match=r"5 layers .* 8 pipeline stages; set pp to at most 2"):
        split_layers(5, 8, chunks=2)
    with pytest.raises(ConfigError, match=r"1 layers .* 2 pipeline stages; leave chunks = 2 out"):
        split_layers(1, 2, chunks=2)
