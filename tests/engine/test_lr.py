"""The four schedules."""

from __future__ import annotations

import itertools

import pytest

from fullstride.engine.lr import SCHEDULES, learning_rate
from fullstride.errors import UsageError


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_then_the_shape_ends_where_it_should(schedule: str) -> None:
    rates = [learning_rate(schedule, step, 100, 1.0, warmup=10, final_fraction=0.1) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))


def test_values_in_between() -> None:
    assert learning_rate("cosine", 51, 101, 2.0, final_fraction=0.0) == pytest.approx(1.0)  # half way: the middle
    assert learning_rate("linear", 26, 101, 2.0, final_fraction=0.0) == pytest.approx(1.5)
    assert learning_rate("cosine", 60, 110, 2.0, warmup=10, final_fraction=0.0) == pytest.approx(1.0)
    assert learning_rate("wsd", 90, 100, 2.0) == 2.0  # stable until the last tenth
    assert learning_rate("wsd", 95, 100, 2.0, final_fraction=0.0) == pytest.approx(1.0)


def test_warmup_as_a_fraction() -> None:
    assert learning_rate("constant", 5, 100, 1.0, warmup=0.1) == pytest.approx(0.5)
    assert learning_rate("constant", 11, 100, 1.0, warmup=0.1) == 1.0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_first_update_without_warmup_has_the_whole_rate(schedule: str) -> None:
    for num_steps in (1, 2, 3, 100):
        assert learning_rate(schedule, 1, num_steps, 2e-4) == 2e-4


def test_unknown_schedule() -> None:
    with pytest.raises(UsageError, match="cosine, linear, constant, wsd, got 'step'"):
        learning_rate("step", 1, 10, 1.0)
