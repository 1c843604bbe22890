"""keep-best, the disk's room, and traces of updates."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fullstride import ConfigError
from fullstride.config.training import FinetuneConfig
from fullstride.engine.checkpoint import find_checkpoint, step_of, steps
from fullstride.run import saving
from fullstride.run import training as module
from fullstride.run.metrics import read_events, read_metrics
from tests.run.conftest import exact, run


def checkpoints(out: Path) -> tuple[list[int], int]:
    """Steps that are kept, and the best of them."""
    return steps(out / "checkpoints"), step_of(find_checkpoint(out / "checkpoints", "best"))


def with_evaluations(patch: pytest.MonkeyPatch, losses: dict[int, float]) -> None:
    """Evaluations that say what they are told to, by step; the one before the first update too."""
    original = module.Run.evaluate

    def evaluate(self: module.Run) -> float | None:
        original(self)
        self.eval_loss = losses[self.done]
        return self.eval_loss

    patch.setattr(module.Run, "evaluate", evaluate)


LOSSES = {0: 9.0, 2: 3.0, 3: 3.5, 4: 1.0, 6: 2.0, 8: 1.5, 10: 1.6}
BEST = {"keep_best": True, "eval_every": 2, "save_every": 3, "keep": 1, "steps": 10, "epochs": None}


@pytest.mark.parametrize("more", [{}, {"async_save": True}], ids=["waited for", "in the background"])
def test_the_best_is_kept_beside_the_newest(
    more: dict[str, Any], model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_evaluations(monkeypatch, LOSSES)
    run(model_dir, data_dir, tmp_path / "run", **BEST, **more)
    assert checkpoints(tmp_path / "run") == ([4, 10], 4)
    events = read_events(tmp_path / "run" / "log.jsonl")
    assert [(e["step"], e["eval_loss"]) for e in events if e["event"] == "best"] == [(2, 3.0), (4, 1.0)]
    assert [e["step"] for e in events if e["event"] == "checkpoint"] == [2, 3, 4, 6, 9, 10]


def test_a_resumed_run_knows_the_best(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_evaluations(monkeypatch, LOSSES)
    run(model_dir, data_dir, tmp_path / "run", **BEST | {"steps": 6})
    assert checkpoints(tmp_path / "run") == ([4, 6], 4)
    run(model_dir, data_dir, tmp_path / "run", **BEST)
    assert checkpoints(tmp_path / "run") == ([4, 10], 4)


def test_going_back_before_the_best_forgets_it(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        with_evaluations(patch, LOSSES)
        run(model_dir, data_dir, tmp_path / "run", **BEST | {"keep": 9, "steps": 6})
    with_evaluations(monkeypatch, LOSSES | {4: 5.0, 6: 4.0, 8: 4.5})
    run(model_dir, data_dir, tmp_path / "run", **BEST | {"keep": 9, "steps": 8, "resume": 2})
    assert checkpoints(tmp_path / "run")[1] == 2  # 3.0, of the first call


def test_keep_best_needs_evaluations(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep-best needs rows to evaluate on; give eval-data"):
        run(model_dir, data_dir / "train.jsonl", tmp_path / "run", keep_best=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["lora", "full"])
def test_checkpoints_have_the_size_that_the_disk_is_asked_for(
    method: str, model_dir: Path, data_dir: Path, tmp_path: Path
) -> None:
    run(model_dir, data_dir, tmp_path / "run", method=method, steps=1, epochs=None)
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    found = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    config = FinetuneConfig(model="m", data="d", method=method, device="cpu").decided("cpu")
    start = next(e for e in read_events(tmp_path / "run" / "log.jsonl") if e["event"] == "start")
    expected = saving.checkpoint_bytes(config, start["trainable_parameters"])
    assert 0 <= found - expected < 50_000  # headers, and where units begin


def test_a_disk_that_is_too_small_is_told_before_the_first_update(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    with pytest.raises(ConfigError, match=r"out: the run will write up to .* GB \(3 checkpoints of .*; lower keep"):
        run(model_dir, data_dir, tmp_path / "run", save_every=1)
    assert not read_metrics(tmp_path / "run" / "metrics.csv")
    monkeypatch.undo()
    run(model_dir, data_dir, tmp_path / "run", save_every=1, steps=1, epochs=None)


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_trace_of_some_updates(
    gpus: int, model_dir: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"steps": 6, "epochs": None, "batch_size": 2 // gpus, "gpus": gpus}
    run(model_dir, data_dir, tmp_path / "run", profile=2, **more)
    told = capsys.readouterr().out
    assert "CPU time an update (of 2 traced)" in told and "aten::" in told
    directory = tmp_path / "run" / "profile"
    assert sorted(file.name for file in directory.iterdir()) == [
        *(f"rank{i}.json.gz" for i in range(gpus)),
        "table.txt",
    ]
    for rank in range(gpus):
        assert json.loads(gzip.decompress((directory / f"rank{rank}.json.gz").read_bytes()))["traceEvents"]
    # the table comes between updates 5 and 6: three to warm up, two traced
    assert told.index("step 5/6") > told.index("CPU time an update") > told.index("step 4/6")
    run(model_dir, data_dir, tmp_path / "plain", **more)
    assert exact(tmp_path / "run") == exact(tmp_path / "plain")
