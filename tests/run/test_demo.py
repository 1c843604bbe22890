"""The demonstration, with a tiny model quickly and with the real one slowly."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fullstride.engine.decode import Decoder
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


def check_in_peft(model: Path, adapter: Path | None) -> None:
    """PEFT finds all of the adapter's tensors and nothing else, and computes the logits that we do."""
    assert adapter is not None
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, str(adapter))
    loaded = peft.load_adapter(str(adapter), adapter_name="default")
    assert not loaded.unexpected_keys
    assert not [name for name in loaded.missing_keys if "lora_" in name]
    ids = [1, 5, 9, 30, 200, 7, 7, 42]
    with torch.no_grad():
        theirs = peft(torch.tensor([ids])).logits[0, -1]
        with peft.disable_adapter():
            plain = peft(torch.tensor([ids])).logits[0, -1]
    ours = Decoder.from_pretrained(model, adapter, torch.float32, torch.device("cpu")).logits(ids)
    assert (ours - theirs).norm() < 1e-4 * theirs.norm()  # float32, sums in another order in every layer
    assert (plain - theirs).norm() > 1e-3 * theirs.norm()  # the adapter does something


def test_shows_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    make_model(tmp_path / "demo-model")
    monkeypatch.setattr(module, "CPU_STEPS", 2)
    monkeypatch.setattr(module, "MOST_NEW_TOKENS", 5)
    result = demo(str(tmp_path), "cpu")
    printed = capsys.readouterr().out
    places = [printed.index(section) for section in SECTIONS]
    assert places == sorted(places)
    check_in_peft(tmp_path / "demo-model", result.adapter)
    assert f"adapter (PEFT): {result.adapter}" in printed and str(result.out / "loss.png") in printed


@pytest.mark.slow
def test_the_real_model_learns_in_minutes(tmp_path: Path, capsys) -> None:
    started = time.perf_counter()
    result = demo(str(tmp_path), "cpu")
    seconds = time.perf_counter() - started
    assert result.eval_loss_before is not None and result.eval_loss is not None
    assert result.eval_loss < 0.9 * result.eval_loss_before
    assert seconds < 300  # on two cores
    check_in_peft(tmp_path / "demo-model", result.adapter)
    after = capsys.readouterr().out.split(SECTIONS[3])[1]
    assert after.strip().startswith("Discussion:")  # the house style of the sample's summaries
