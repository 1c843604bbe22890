"""The harness over ranks: whatever they share out, they train as one process does."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.parity.harness import (
    LORA,
    OPTIMIZERS,
    Split,
    Trace,
    check_equal,
    cover_pairs,
    run,
    same_bits,
)

pytestmark = pytest.mark.xdist_group("ranks")  # one worker has the processes

METHODS = {"full": {}, "lora": LORA}
FEATURES = {
    "ranks": (1, 2, 4),
    # rows: ten, or five packed ones; with 4 ranks and 3 or 4 micro-steps some ranks have none at the end, and with 4
    # the window ends before the last micro-step
    "accumulation": (1, 3, 4),
    "zero": (0, 1, 2, 3),
    "all_to_all": (False, True),
    "gather_by_copy": (False, True),
    "send_by_copy": (False, True),
    "offload": (False, True),
    "packing": (False, True),
    "recompute": ((), ("block",)),
    "method": ("full", "lora"),
    "model": ("tied", "untied"),
    "optimizer": tuple(OPTIMIZERS),
}

ASIDE = ("gather_by_copy", "send_by_copy", "recompute", "optimizer")


def combinations() -> list[dict[str, Any]]:
    """All that are legal; but one rank has nobody to exchange with, so there both reductions are one (test_offload)."""
    every = (dict(zip(FEATURES, values, strict=True)) for values in itertools.product(*FEATURES.values()))
    return [c for c in every if is_legal(c)]


def is_legal(c: dict[str, Any]) -> bool:
    """As config/rules has it; but on one rank only once what is the same there."""
    alone, shared = c["ranks"] == 1, c["zero"] >= 2
    if alone and (c["all_to_all"] or c["gather_by_copy"]):
        return False
    return (
        (shared or not c["all_to_all"])
        and (c["zero"] >= 1 or not c["gather_by_copy"])
        and (c["all_to_all"] or not c["send_by_copy"])
        and (alone or shared or not c["offload"])
    )


@cache
def reference(optimizer: str, method: str, model: str) -> Trace:
    return run(Split(), optimizer, METHODS[method], Path(), model)


def check(combination: dict[str, Any]) -> None:
    split = {**combination}
    optimizer, method, model = (split.pop(name) for name in ("optimizer", "method", "model"))
    found = run(Split(**split), optimizer, METHODS[method], Path(), model)
    check_equal(found, reference(optimizer, method, model))


def name(combination: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in combination.items())


@pytest.mark.parametrize("combination", cover_pairs(combinations()), ids=name)
def test_pairs_of_features(combination: dict[str, Any]) -> None:
    check(combination)


def matrix() -> list[dict[str, Any]]:
    """Every combination of all features but ASIDE, those in turn: with each of them it is too many."""
    every: dict[tuple, list[dict[str, Any]]] = {}
    for c in combinations():
        every.setdefault(tuple(value for key, value in c.items() if key not in ASIDE), []).append(c)
    return [group[i % len(group)] for i, group in enumerate(every.values())]


@pytest.mark.slow
@pytest.mark.parametrize("combination", matrix(), ids=name)
def test_all_combinations(combination: dict[str, Any]) -> None:
    check(combination)


@pytest.mark.parametrize("zero", [1, 3])
def test_dropout_is_that_of_one_process(zero: int) -> None:
    """Noise belongs to a row among all ranks' rows: with one micro-step an update the same masks are drawn."""
    method = LORA | {"lora_dropout": 0.3}
    found = run(Split(ranks=2, zero=zero), "adamw", method, Path())
    expected = run(Split(), "adamw", method, Path())
    check_equal(found, expected)
    assert abs(expected.loss[-1] - reference("adamw", "lora", "tied").loss[-1]) > 1e-3  # it is at work


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("all_to_all", [False, True])
def test_gathered_weights_give_the_bits_of_weights_that_stay(method: str, all_to_all: bool) -> None:
    a, b = (
        run(Split(ranks=2, accumulation=3, zero=zero, all_to_all=all_to_all), "adamw", METHODS[method], Path())
        for zero in (2, 3)
    )
    same_bits(a, b)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("zero", "method"), [(1, "full"), (2, "lora"), (3, "full"), (3, "lora")])
def test_copies_give_the_bits_of_collectives(ranks: int, zero: int, method: str) -> None:
    """They move the same bits, and what is received is summed in the same order."""
    split = Split(ranks=ranks, accumulation=3, zero=zero, all_to_all=zero >= 2)
    a, b = (
        run(
            replace(split, gather_by_copy=by_copy, send_by_copy=by_copy and zero >= 2), "adamw", METHODS[method], Path()
        )
        for by_copy in (False, True)
    )
    same_bits(a, b)
