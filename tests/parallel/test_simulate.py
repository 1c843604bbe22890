"""Schedules in time: the published bubbles, and the picture."""

from __future__ import annotations

import random

import pytest

from fullstride.parallel.schedule import SCHEDULES, Action, Schedule, make_schedule
from fullstride.parallel.simulate import Timeline, picture, simulate


def run(name: str, ranks: int, microbatches: int, chunks: int = 1, **costs: float) -> Timeline:
    return simulate(make_schedule(name, ranks, microbatches, chunks), lambda action: costs[action.kind])


def shapes(name: str) -> list[tuple[int, int]]:
    """200 times (ranks, micro-batches)."""
    draw = random.Random(name)
    return [(draw.randint(1, 8), draw.randint(1, 24)) for _ in range(200)]


@pytest.mark.parametrize("backward", [1.0, 2.0])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_without_chunks(name: str, backward: float) -> None:
    """(p-1) of m+p-1 forwards and backwards are waited for (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1, who
    divide by m). Times are small integers; only the division rounds."""
    for p, m in shapes(name):
        expected = 0.0 if p == 1 else (p - 1) / (m + p - 1)
        assert run(name, p, m, F=1.0, B=backward).bubble == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_the_bubble_with_chunks(backward: float) -> None:
    """Each chunk takes a v-th of the time, so what is waited for is a v-th too (section 2.2.2)."""
    for p, factor in shapes("interleaved"):
        v, m = 2 + factor % 3, p * (1 + factor // 4)
        expected = 0.0 if p == 1 else (p - 1) / (v * m + p - 1)
        assert run("interleaved", p, m, v, F=1.0, B=backward).bubble == pytest.approx(expected, abs=1e-12)


def test_chunks_with_any_number_of_micro_batches() -> None:
    """What is left out of the last group takes no time: never longer than with a whole group, and more than without
    it."""
    for p, m in shapes("rest"):
        fewer, more = m // p * p, -(-m // p) * p
        total = run("interleaved", p, m, 2, F=1.0, B=2.0).total
        assert total <= run("interleaved", p, more, 2, F=1.0, B=2.0).total
        assert fewer in (0, m) or total > run("interleaved", p, fewer, 2, F=1.0, B=2.0).total


def test_the_bubble_of_zb_h1() -> None:
    """Qi et al. 2023, arXiv 2401.10241, section 2.3: ranks idle for (p-1) (T_F + T_B - T_W) beside
    m (T_F + T_B + T_W) of work, with equal times (p-1) / (3m + p-1).

    Theirs is for m >= p. With fewer, the last rank has nothing but F0 B0 F1 B1 ... until its last B ends at
    p-1 + 2m; p-1 ranks later the first one's does, and its last W a unit after that: 2m + 2p - 1.
    """
    for p, m in shapes("zb-h1"):
        total = 3 * m + p - 1 if m >= p else 2 * m + 2 * p - 1
        assert run("zb-h1", p, m, F=1.0, B=1.0, W=1.0).bubble == pytest.approx(1 - 3 * m / total, abs=1e-12)


def test_zb_h1_is_the_shorter_the_longer_its_weights_take() -> None:
    """The same formula with other times, as long as W fits where it is put (T_W <= T_F and T_B)."""
    for p, m in shapes("zb-h1, times"):
        for f, b, w in ((2.0, 2.0, 1.0), (3.0, 2.0, 2.0), (2.0, 3.0, 1.0)):
            total = run("zb-h1", p, max(p, m), F=f, B=b, W=w).total
            assert total == max(p, m) * (f + b + w) + (p - 1) * (f + b - w)


def test_a_transfer_delays_what_comes_from_another_rank() -> None:
    schedule = make_schedule("1f1b", 2, 1)
    timeline = simulate(schedule, lambda action: 1.0, transfer=0.5)
    starts = {str(action): start for action, start in timeline.start.items()}
    assert starts == {"F0 of stage 0": 0.0, "F0 of stage 1": 1.5, "B0 of stage 1": 2.5, "B0 of stage 0": 4.0}
    assert timeline.total == 5.0 and timeline.bubble == pytest.approx(0.6)


def test_ranks_that_wait_for_one_another_are_told() -> None:
    swapped = (Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0))
    with pytest.raises(ValueError, match="for ever: rank 0 before B0 of stage 0, rank 1 before F0 of stage 1"):
        simulate(Schedule("swapped", 2, 1, 1, swapped), lambda action: 1.0)


# ---- pictures


def test_the_picture_of_a_small_schedule() -> None:
    told = picture(run("1f1b", 2, 3, F=1.0, B=2.0), width=61)
    assert told.splitlines() == [
        "rank 0 0>>>1>>>........0<<<<<<<2>>>1<<<<<<<....2<<<<<<<",
        "rank 1 ....0>>>0<<<<<<<1>>>1<<<<<<<2>>>2<<<<<<<........",
        "",
        "0> forward of micro-batch 0, 0< backward, . idle",
        "bubble 25.0 %; peak live micro-batches by rank: 2, 1",
    ]


def test_chunks_and_weights_are_told_apart() -> None:
    chunks = picture(run("interleaved", 2, 2, 2, F=1.0, B=1.0), width=60)
    assert chunks.startswith("rank 0 0a>>>1a>>>0b>>>1b>>>.....0b<<<.....1b<<<0a<<<1a<<<\n")
    assert "peak live micro-batches by rank: 2+2, 2+1" in chunks
    weights = picture(run("zb-h1", 2, 2, F=1.0, B=1.0, W=1.0))
    assert weights.splitlines()[1] == "rank 1 .....0>>>>0<<<<1>>>>1<<<<0****1****"


def test_what_is_too_short_for_its_number_shows_its_mark_alone() -> None:
    """Digits of two micro-batches side by side would read as another one's."""
    rows = picture(run("zb-h1", 2, 2, F=1.0, B=1.0, W=0.2), width=44).splitlines()[:2]
    assert rows == ["rank 0 0>>>>1>>>>.....0<<<<*....1<<<<*", "rank 1 .....0>>>>0<<<<1>>>>1<<<<**...."]


@pytest.mark.parametrize("name", SCHEDULES)
def test_pictures_fit_and_say_what_ran(name: str) -> None:
    for microbatches in (1, 8, 24, 130):
        timeline = run(name, 4, microbatches, 3 if name == "interleaved" else 1, F=1.0, B=1.7, W=0.01)
        lines = picture(timeline).splitlines()
        assert max(map(len, lines)) <= 120 and len({len(line) for line in lines[:4]}) == 1
        assert ("..." in lines[0][50:70] and " ... " in lines[3]) or microbatches < 24
        assert [line.split()[:2] for line in lines[:4]] == [["rank", str(rank)] for rank in range(4)]
        assert f"bubble {100 * timeline.bubble:.1f} %" in lines[-1]
        assert lines[0].startswith("rank 0 0") and f"{microbatches - 1}" in lines[0][-40:]
