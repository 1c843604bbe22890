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
    assert learning_rate("cosine", 50, 100, 2.0, final_fraction=0.0) == pytest.approx(1.0)  # half way: the middle
    assert learning_rate("linear", 25, 100, 2.0, final_fraction=0.0) == pytest.approx(1.5)
    assert learning_rate("wsd", 90, 100, 2.0) == 2.0  # stable until the last tenth
    assert learning_rate("wsd", 95, 100, 2.0, final_fraction=0.0) == pytest.approx(1.0)


def test_warmup_as_a_fraction() -> None:
    assert learning_rate("constant", 5, 100, 1.0, warmup=0.1) == pytest.approx(0.5)
    assert learning_rate("constant", 11, 100, 1.0, warmup=0.1) == 1.0


def test_one_update_alone() -> None:
    for schedule in SCHEDULES:
        assert 0 < learning_rate(schedule, 1, 1, 1.0) <= 1.0


def test_unknown_schedule() -> None:
    with pytest.raises(UsageError, match="cosine, linear, constant, wsd, got 'step'"):
        learning_rate("step", 1, 10, 1.0)
