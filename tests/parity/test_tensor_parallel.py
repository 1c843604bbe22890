"""The harness over tensor parallelism: a model shared out to ranks trains as one process does."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.parity.harness import LORA, OPTIMIZERS_ROUNDED, Split, Trace, check_equal, cover_pairs, run

pytestmark = pytest.mark.xdist_group("ranks")  # one worker has the processes

METHODS = {"full": {}, "lora": LORA}
FEATURES = {
    "tp": (2, 4),
    "ranks": (2, 4),
    "sequence_parallel": (False, True),
    "zero": (0, 1, 3),
    "accumulation": (1, 3),
    "head_chunks": (1, 3),
    "packing": (False, True),
    "recompute": ((), ("block",), ("norm", "qkv", "ffn")),
    "method": ("full", "lora"),
    "model": ("tied", "untied", "four heads"),
    "optimizer": tuple(OPTIMIZERS_ROUNDED),
}
ASIDE = ("head_chunks", "recompute", "optimizer")


def combinations() -> list[dict[str, Any]]:
    every = (dict(zip(FEATURES, values, strict=True)) for values in itertools.product(*FEATURES.values()))
    return [c for c in every if is_legal(c)]


def is_legal(c: dict[str, Any]) -> bool:
    """Models of two key/value heads take two ranks; ZeRO needs ranks with the same share."""
    shared = c["ranks"] > c["tp"]
    return c["tp"] <= c["ranks"] and (c["tp"] == 2 or c["model"] == "four heads") and (shared or c["zero"] == 1)


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


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_that_of_one_process(sequence_parallel: bool) -> None:
    """Noise belongs to a row and column of the whole, of which a rank may have a part."""
    method = LORA | {"lora_dropout": 0.3}
    split = Split(ranks=4, tp=2, sequence_parallel=sequence_parallel)
    expected = run(Split(), "adamw rounded", method, Path())
    check_equal(run(split, "adamw rounded", method, Path()), expected)
    assert abs(expected.loss[-1] - reference("adamw rounded", "lora", "tied").loss[-1]) > 1e-3  # it is at work
