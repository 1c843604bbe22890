"""Options at random: whatever they are, a pipeline trains as one process does, or is refused when it is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fullstride.config import LORA_TARGETS, Options
from fullstride.engine.step import split_stages
from fullstride.errors import ConfigError
from fullstride.trainer.setting import Setting
from tests.parity.harness import EVERY_MODEL, SEQ_LEN, Split, Trace, check_equal, options_of, run

pytestmark = pytest.mark.xdist_group("ranks")  # one worker has the processes

# (ranks, pp); of three ranks a pool more would be started, and what is odd is in the micro-batches
MESHES = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))


@st.composite
def methods(draw: st.DrawFn) -> dict[str, Any]:
    if draw(st.booleans()):
        return {"method": "full"}
    targets = draw(st.lists(st.sampled_from(LORA_TARGETS), min_size=1, max_size=7, unique=True))
    dropout = draw(st.sampled_from((0.0, 0.3)))
    return {"method": "lora", "lora_rank": 3, "lora_targets": tuple(targets), "lora_dropout": dropout}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Split, dict[str, Any], str]:
    """(split, options of the method, model): legal or not."""
    method, (ranks, pp) = draw(methods()), draw(st.sampled_from(MESHES))
    pick = {
        "zero": (0, 1, 2, 3),
        "all_to_all": (False, False, True),
        "gather_by_copy": (False, False, True),
        "send_by_copy": (False, False, True),
        "offload": (False, False, True),
        "microbatches": (1, 2, 3, 5),
        "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1") if pp > 1 else ("1f1b",),
        "recompute": ((), (), ("block",), ("swiglu", "norm"), ("att", "qkv")),
        "packing": (False, True),
        "head_chunks": (1, 3),
        # noise is keyed by micro-step too: with dropout the reference has the one
        "accumulation": (1,) if method.get("lora_dropout") else (1, 2, 3),
    }
    values = {name: draw(st.sampled_from(choices)) for name, choices in pick.items()}
    chunks = draw(st.sampled_from((0, 0, 1, 2, 3)))
    split = Split(ranks=ranks, pp=pp, chunks=chunks, **values)
    if pp == 1:
        split = replace(split, microbatches=1)
    return split, method, draw(st.sampled_from(("deep tied", "deep untied")))


def refusal(split: Split, method: dict[str, Any], model: str) -> ConfigError | None:
    """What the Trainer's constructor says against it, before there are processes."""
    try:
        options = Options(**options_of(split, method)).resolved()
        setting = Setting(options, split.microbatches, SEQ_LEN, split.accumulation)
        split_stages(EVERY_MODEL[model], *setting.engine(EVERY_MODEL[model]))
    except ConfigError as error:
        return error
    return None


references: dict[Any, Trace] = {}


def reference(split: Split, method: dict[str, Any], model: str) -> Trace:
    """One process, one micro-step; of the same rows where noise is keyed by them."""
    alone = Split(packing=split.packing and bool(method.get("lora_dropout")))
    key = alone, tuple(method.items()), model
    if key not in references:
        references[key] = run(alone, "adamw", method, Path(), model)
    return references[key]


def check(case: tuple[Split, dict[str, Any], str], counts: dict[str, int]) -> None:
    split, method, model = case
    if error := refusal(*case):
        assert any(remedy in str(error) for remedy in ("set ", "leave ", "what works now")), error
        counts["refused"] += 1
        return
    check_equal(run(split, "adamw", method, Path(), model), reference(*case))
    counts["equal"] += 1


def look(number: int) -> dict[str, int]:
    """`number` cases, the same in every run."""
    counts = {"equal": 0, "refused": 0}

    # nothing is minimised: a case takes a second, and says what it is
    @settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def each(case: tuple[Split, dict[str, Any], str]) -> None:
        check(case, counts)

    each()
    return counts


def test_ten_cases() -> None:
    assert look(10)["equal"] >= 3


@pytest.mark.slow
def test_fifty_cases() -> None:
    counts = look(100)
    assert counts["equal"] >= 50 and counts["refused"] >= 10
