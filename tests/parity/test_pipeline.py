"""The harness over pipelines: whatever the stages, the order and the micro-batches, they train as one process does."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.parity.harness import LORA, Split, check_equal, cover_pairs, run, same_bits
from tests.parity.test_ranks import METHODS, name, reference

pytestmark = pytest.mark.xdist_group("ranks")  # one worker has the processes

DEEP = "deep tied"
FEATURES = {
    # the models have four layers, so four stages hold one each
    "mesh": ((2, 2, 1), (4, 4, 1), (4, 2, 1), (4, 2, 2)),  # ranks, of them in a pipeline, of them sharing tensors out
    "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1"),
    # one: fewer than stages; with three micro-steps and five rows packed the window ends short
    "microbatches": (1, 2, 5),
    "accumulation": (1, 3),
    "zero": (0, 1, 2, 3),
    "packing": (False, True),
    "recompute": ((), ("block",), ("swiglu", "norm")),
    "method": ("full", "lora"),
    "model": ("deep tied", "deep untied"),
}


def is_legal(c: dict[str, Any]) -> bool:
    """As config/rules has it, and layers enough for two stages a rank; without other rows ZeRO's levels are one."""
    ranks, pp, tp = c["mesh"]
    dp = ranks // (pp * tp)
    if c["schedule"] == "interleaved" and pp > 2:
        return False
    if c["schedule"] == "zb-h1" and (c["recompute"] or (c["zero"] >= 2 and dp > 1) or tp > 1):
        return False
    return dp > 1 or c["zero"] == 1


def combinations() -> list[dict[str, Any]]:
    every = (dict(zip(FEATURES, values, strict=True)) for values in itertools.product(*FEATURES.values()))
    return [c for c in every if is_legal(c)]


def check(combination: dict[str, Any]) -> None:
    split = {**combination}
    ranks, pp, tp = split.pop("mesh")
    method, model = split.pop("method"), split.pop("model")
    optimizer = "adamw" if tp == 1 else "adamw rounded"
    found = run(Split(ranks=ranks, pp=pp, tp=tp, **split), optimizer, METHODS[method], Path(), model)
    check_equal(found, reference(optimizer, method, model))


@pytest.mark.parametrize("combination", cover_pairs(combinations()), ids=name)
def test_pairs_of_features(combination: dict[str, Any]) -> None:
    check(combination)


def matrix() -> list[dict[str, Any]]:
    """Every combination of all but recompute and packing, those in turn."""
    every: dict[tuple, list[dict[str, Any]]] = {}
    for c in combinations():
        every.setdefault(tuple(v for key, v in c.items() if key not in ("recompute", "packing")), []).append(c)
    return [group[i % len(group)] for i, group in enumerate(every.values())]


@pytest.mark.slow
@pytest.mark.parametrize("combination", matrix(), ids=name)
def test_all_combinations(combination: dict[str, Any]) -> None:
    check(combination)


@pytest.mark.parametrize("mesh", [(2, 2), (4, 2)], ids=str)
def test_dropout_is_that_of_one_process(mesh: tuple[int, int]) -> None:
    """Noise belongs to a row among all rows of the micro-step, whichever micro-batch and rank have it."""
    method = LORA | {"lora_dropout": 0.3}
    found = run(Split(ranks=mesh[0], pp=mesh[1], microbatches=5 * mesh[1] // mesh[0]), "adamw", method, Path(), DEEP)
    expected = run(Split(), "adamw", method, Path(), DEEP)
    check_equal(found, expected)
    assert abs(expected.loss[-1] - reference("adamw", "lora", DEEP).loss[-1]) > 1e-3  # it is at work


@pytest.mark.parametrize("method", METHODS)
def test_sums_in_host_memory_of_layers_that_lie_apart(method: str) -> None:
    """A rank of an interleaved pipeline has layers 0 and 2, say, which take turns in two buffers all the same."""
    split = Split(ranks=2, pp=2, schedule="interleaved", zero=2, offload=True, microbatches=2)
    check_equal(run(split, "adamw", METHODS[method], Path(), DEEP), reference("adamw", method, DEEP))


def test_schedules_give_the_same_bits() -> None:
    """They differ in when, not in what: sums are over micro-batches in order."""
    traces = [
        run(Split(ranks=2, pp=2, microbatches=5, schedule=schedule), "adamw", {}, Path(), DEEP)
        for schedule in ("1f1b", "gpipe", "zb-h1")
    ]
    for other in traces[1:]:
        same_bits(other, traces[0])
