"""The meetings job over a pipeline: LoRA on rows of the AMI set, as one process runs it; files; stages that die."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fullstride.cli.main import main
from fullstride.run.metrics import COLUMNS, read_events, read_metrics
from fullstride.trainer.trainer import Trainer
from tests.conftest import shared
from tests.run.conftest import TINY, exact, keys, make_model, run
from tests.run.test_ranks import check_same, words
from tests.trainer.test_workers import workers

ROWS = 11  # 8 an update: the second window of an epoch is short, and its micro-step is filled up
LEADING = ["strategy", "epoch", "step", "loss", "tokens_per_sec", "step_time_sec", "peak_vram_gb", "lr"]
# float32, sums in another order: 1e-7 a product, some 1e-6 after a few updates; eps keeps AdamW from making steps of
# the sign of gradients that are only noise
TOLERANCE = 1e-5
JOB = {
    "seq_len": 96,
    "batch_size": 4,
    "grad_accum": 2,
    "epochs": 2,
    "lora_rank": 4,
    "lora_dropout": 0.15,
    "eps": 1e-4,
    "schedule": "constant",
    "save_every": 1,
    "keep": 9,
}
PP2 = {"gpus": 2, "pp": 2}
LAYERS = 5  # over two stages: two and three


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(TINY, num_hidden_layers=LAYERS, initializer_range=0.1)
    return make_model(tmp_path_factory.mktemp("models") / "deep", config)


@pytest.fixture(scope="module")
def meetings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first meetings, whose summaries are cut to what a short row of bytes holds; transcripts are long."""
    directory = tmp_path_factory.mktemp("meetings")
    for part, count in (("train", ROWS), ("validation", 2)):
        with shared("data", "ami", f"{part}.jsonl").open(encoding="utf-8") as lines:
            rows = [json.loads(next(lines)) for _ in range(count)]
        for i, row in enumerate(rows):
            row["summary"] = row["summary"][: 20 + 5 * i]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{part}.jsonl").write_text(text, encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def alone(model: Path, meetings: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    run(model, meetings, out, **JOB)
    return out


def test_a_pipeline_trains_as_one_process(model: Path, meetings: Path, alone: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    result = run(model, meetings, out, **JOB | PP2)
    assert result.steps == 4 and result.eval_loss is not None
    check_same(out, alone)
    with (out / "metrics.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header[: len(LEADING)] == LEADING and header == list(COLUMNS)
    told = [dict(zip(header, row, strict=True)) for row in rows]
    assert [(row["strategy"], row["epoch"], row["step"]) for row in told] == [
        ("pp2", str(epoch), str(2 * epoch - 1 + i)) for epoch in (1, 2) for i in (0, 1)
    ]
    empty = {name for row in told for name, value in row.items() if not value}
    assert empty <= {"mfu", "eval_loss"} and all(float(row["tokens_per_sec"]) > 0 for row in told)
    assert float(told[0]["loss"]) > float(told[-1]["loss"])

    newest = [load_file(out / name / "adapter_model.safetensors") for name in ("adapter", "adapters/epoch_2")]
    first = load_file(out / "adapters" / "epoch_1" / "adapter_model.safetensors")
    assert len(first) == LAYERS * 7 * 2 and first.keys() == newest[0].keys() == newest[1].keys()
    theirs = load_file(alone / "adapter" / "adapter_model.safetensors")
    for name, weight in theirs.items():
        assert weight.any() and first[name].any() and torch.equal(newest[0][name], newest[1][name]), name
        assert (newest[0][name] - weight).norm() <= TOLERANCE * weight.norm(), name
        assert not torch.equal(first[name], weight)

    check_peft(model, out / "adapter", len(theirs))
    capsys.readouterr()
    asked = ["--prompt", "Summarise: hello", "--max-new-tokens", "4", "--dtype", "fp32", "--device", "cpu"]
    assert main(["generate", "--model", str(model), "--adapter", str(out / "adapter"), *asked]) == 0
    assert main(["generate", "--model", str(model), "--adapter", str(alone / "adapter"), *asked]) == 0
    answers = capsys.readouterr().out
    half = len(answers) // 2
    assert answers[:half] == answers[half:]
    assert not workers()


def check_peft(model: Path, adapter: Path, tensors: int) -> None:
    """PEFT loads every tensor of the adapter, and it changes what the model computes."""
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    before = base(ids).logits.detach()
    loaded = PeftModel.from_pretrained(base, adapter)
    state = get_peft_model_state_dict(loaded)
    assert len(state) == tensors and all(value.any() for value in state.values())
    assert not torch.allclose(loaded(ids).logits, before, atol=1e-4)


def test_a_stage_that_is_killed_and_other_splits(model: Path, meetings: Path, tmp_path: Path, capsys) -> None:
    """A stage dies in the middle of an update; the same command goes on, then over rows (dp 2), then alone, as one
    process would have done it.

    The batch of a rank stays, so an update over dp 2 has twice the rows; the one process gets them as one micro-step.
    """
    out, whole = tmp_path / "run", tmp_path / "whole"
    command = words(keys(model, meetings, out, **JOB | PP2 | {"epochs": None, "steps": 3}))
    step = Trainer.step

    def kill(self: Trainer, *arrays: Any) -> None:
        step(self, *arrays)
        if self._updates == 2:  # its first micro-step: some of that waits for the second
            os.kill(workers()[0], signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", kill)
        assert main(command) == 1
    printed = capsys.readouterr()
    assert "fullstride: error: rank 0 was killed by SIGKILL" in printed.err
    assert "rank 0 failed after step 2; checkpoint of step 2 is good" in printed.out
    assert not workers() and not list(out.rglob("*.partial"))
    assert main(command) == 0
    events = [event["event"] for event in read_events(out / "log.jsonl")]
    assert events.count("resume") == 1 and events[-1] == "end"

    small = JOB | {"epochs": None}
    run(model, meetings, out, **small | {"gpus": 2, "steps": 4})
    run(model, meetings, out, **small | {"steps": 6})
    for steps, rows in ((3, 4), (4, 8), (6, 4)):
        run(model, meetings, whole, **small | {"steps": steps, "batch_size": rows})
        toml = (whole / "run.toml").read_text()  # a batch may not change on resume: here it stands for another split
        for other in (4, 8):
            toml = toml.replace(f"batch-size = {other}\n", f"batch-size = {8 if steps == 3 else 4}\n")
        (whole / "run.toml").write_text(toml)
    check_same(out, whole)
    told = read_metrics(out / "metrics.csv")
    assert [row["strategy"] for row in told] == ["pp2"] * 3 + ["dp2-zero1"] + ["single"] * 2
    epochs = [sum(int(row["tokens"]) for row in told if row["epoch"] == epoch) for epoch in "123"]
    assert len(set(epochs)) == 1  # every row once


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2")
def test_smollm2_over_a_pipeline(tmp_path: Path) -> None:
    """A real model on real meetings with the job's own settings but its length: 30 layers over two stages."""
    made = subprocess.run(
        [sys.executable, str(shared("tools", "make_smollm2.py")), str(tmp_path / "model")],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(made.stderr.strip().splitlines()[-1])
    small = {"seq_len": 128, "batch_size": 2, "grad_accum": 2, "steps": 2, "lora_dropout": 0.15, "beta2": 0.999}
    small |= {"eval_data": str(short_evaluation(tmp_path)), "lr": 2e-4}
    for name, split in (("one", {}), ("pp", PP2)):
        run(tmp_path / "model", shared("data", "ami"), tmp_path / name, **small | split)
    ours, theirs = (np.array([[float(x or 0) for x in row] for row in exact(tmp_path / n)]) for n in ("pp", "one"))
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)
    state = load_file(tmp_path / "pp" / "adapter" / "adapter_model.safetensors")
    assert len(state) == 30 * 7 * 2 and all(value.any() for value in state.values())
    check_peft(tmp_path / "model", tmp_path / "pp" / "adapter", len(state))


def short_evaluation(directory: Path) -> Path:
    with shared("data", "ami", "validation.jsonl").open(encoding="utf-8") as lines:
        (directory / "evaluation.jsonl").write_text(next(lines), encoding="utf-8")
    return directory / "evaluation.jsonl"
