"""The demonstration, with a tiny model quickly and with the real one slowly."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fullstride.run import demo as module
from fullstride.run.demo import demo
from tests.run.conftest import make_model

SECTIONS = (
    "An unseen meeting:",
    "Its summary by a person:",
    "The model's summary before training:",
    "The model's summary after training:",
    "loss on the held-out meetings: ",
    "adapter (PEFT): ",
)


def test_shows_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    make_model(tmp_path / "demo-model")
    monkeypatch.setattr(module, "CPU_STEPS", 2)
    monkeypatch.setattr(module, "MOST_NEW_TOKENS", 5)
    result = demo(str(tmp_path), "cpu")
    printed = capsys.readouterr().out
    places = [printed.index(section) for section in SECTIONS]
    assert places == sorted(places)
    assert f"adapter (PEFT): {result.adapter}" in printed and str(result.out / "loss.png") in printed


@pytest.mark.slow
def test_the_real_model_learns_in_minutes(tmp_path: Path, capsys) -> None:
    started = time.perf_counter()
    result = demo(str(tmp_path), "cpu")
    seconds = time.perf_counter() - started
    assert result.eval_loss_before is not None and result.eval_loss is not None
    assert result.eval_loss < 0.9 * result.eval_loss_before
    assert seconds < 300  # on two cores
    after = capsys.readouterr().out.split(SECTIONS[3])[1]
    assert after.strip().startswith("Discussion:")  # the house style of the sample's summaries
