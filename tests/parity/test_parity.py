"""The harness over every way to split the work: pairs of features here, all combinations with `slow`."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import pytest

from tests.parity.harness import LORA, OPTIMIZERS, Split, Trace, check_equal, cover_pairs, run, same_bits

METHODS = {"full": {}, "lora": LORA}
RECOMPUTE = {
    "none": (),
    "swiglu": ("swiglu",),
    "norm,qkv": ("norm", "qkv"),
    "ffn,att": ("ffn", "att"),
    "block": ("block",),
}
FEATURES = {
    "accumulation": (1, 2, 4),
    "packing": (False, True),
    "recompute": tuple(RECOMPUTE.values()),
    "head_chunks": (1, 3),
    "resume_after": (0, 3),
}


def combinations() -> list[Split]:
    names = list(FEATURES)
    return [Split(**dict(zip(names, values, strict=True))) for values in itertools.product(*FEATURES.values())]


def pairwise() -> list[Split]:
    """A small set of splits in which every pair of values of two features occurs."""
    chosen = cover_pairs([{name: getattr(split, name) for name in FEATURES} for split in combinations()])
    return [Split(**values) for values in chosen]


@cache
def reference(optimizer: str, method: str) -> Trace:
    return run(Split(), optimizer, METHODS[method], Path())


@pytest.mark.parametrize("split", pairwise(), ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_pairs_of_features(optimizer: str, method: str, split: Split, tmp_path: Path) -> None:
    check_equal(run(split, optimizer, METHODS[method], tmp_path), reference(optimizer, method))


@pytest.mark.slow
@pytest.mark.parametrize("split", combinations(), ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_combinations(optimizer: str, method: str, split: Split, tmp_path: Path) -> None:
    check_equal(run(split, optimizer, METHODS[method], tmp_path), reference(optimizer, method))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_reference_learns(method: str) -> None:
    """The harness compares runs that move: the loss falls, and the clip is at work."""
    trace = reference("adamw", method)
    assert trace.loss[-1] < trace.loss[0] - 0.01
    assert max(trace.grad_norm) > 0.7


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("flags", RECOMPUTE.values(), ids=RECOMPUTE)
def test_recompute_gives_the_same_bits(flags: tuple[str, ...], method: str) -> None:
    a = run(Split(recompute=flags), "adamw", METHODS[method], Path())
    same_bits(a, reference("adamw", method))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_resume_gives_the_same_bits(method: str, dropout: float, tmp_path: Path) -> None:
    settings = METHODS[method] | ({"lora_dropout": dropout} if method == "lora" else {})
    a = run(Split(resume_after=3, accumulation=2), "adamw", settings, tmp_path)
    same_bits(a, run(Split(accumulation=2), "adamw", settings, tmp_path))
