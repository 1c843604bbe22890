"""The key `log`: what sinks get, on resuming too; missing packages; and a sink that fails."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from fullstride import ConfigError
from fullstride.run.metrics import read_metrics
from tests.run.conftest import run


class Calls:
    """A stand-in for wandb and trackio: their functions, and what they were called with."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.rows: dict[int, dict[str, float]] = {}
        self.finished, self.fails_at = 0, 0
        self.id = "run-7"

    def init(self, **keys: Any) -> Calls:
        self.inits.append(keys)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise OSError("no\nnetwork")
        self.rows[step] = values

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    for name in ("wandb", "trackio"):
        module = types.ModuleType(name)
        for function in ("init", "log", "finish"):
            setattr(module, function, getattr(calls, function))
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def check_rows(rows: dict[int, dict[str, float]], out: Path) -> None:
    written = read_metrics(out / "metrics.csv")
    assert sorted(rows) == [int(row["step"]) for row in written]
    for row in written:
        expected = {k: float(v) for k, v in row.items() if v and k not in ("strategy", "epoch", "step")}
        assert rows[int(row["step"])] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_every_row_goes_there_and_on_resuming_to_the_same_run(
    name: str, stand_in: Calls, model_dir: Path, data_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run(model_dir, data_dir, out, steps=2, epochs=None, log=name, eval_every=1)
    run(model_dir, data_dir, out, steps=4, epochs=None, log=name, eval_every=1)
    check_rows(stand_in.rows, out)
    assert "eval_loss" in stand_in.rows[1] and "loss" in stand_in.rows[1]
    first, second = stand_in.inits
    assert first["name"] == "run" and first["config"]["lora_rank"] == 16 and stand_in.finished == 2
    if name == "wandb":
        assert (first["id"], second["id"], second["resume"]) == (None, "run-7", "allow")
    else:
        assert (first["resume"], second["resume"]) == ("never", "allow")


def test_a_sink_that_fails_does_not_end_the_run(
    stand_in: Calls, model_dir: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.fails_at = 2
    assert run(model_dir, data_dir, tmp_path / "run", steps=4, epochs=None, log="wandb").steps == 4
    assert capsys.readouterr().out.count("log: wandb gets nothing more (OSError: no network)") == 1
    assert list(stand_in.rows) == [1]


def test_a_sink_that_does_not_start_is_an_error(
    stand_in: Calls, model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: Any) -> None:
        raise RuntimeError("not logged in")

    monkeypatch.setattr(sys.modules["wandb"], "init", fails)
    with pytest.raises(ConfigError, match=r"log: wandb does not start \(RuntimeError: not logged in\); mend that"):
        run(model_dir, data_dir, tmp_path / "run", log="wandb")


def test_missing_packages_are_told_before_anything_is_written(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorboard", "wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=rf"log: {name} is not installed .*: pip install 'fullstride\[log\]'"):
            run(model_dir, data_dir, tmp_path / "run", log=name)
    with pytest.raises(ConfigError, match="log must be among tensorboard, wandb, trackio"):
        run(model_dir, data_dir, tmp_path / "run", log="tensorbored")
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
def test_tensorboard_shows_one_history(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, more = tmp_path / "run", {"epochs": None, "log": "tensorboard", "save_every": 2}
    run(model_dir, data_dir, out, steps=3, **more)
    run(model_dir, data_dir, out, steps=5, resume=2, **more)
    found = EventAccumulator(str(out / "tensorboard"))
    found.Reload()
    losses = {event.step: event.value for event in found.Scalars("loss")}
    assert losses == pytest.approx({int(r["step"]): float(r["loss"]) for r in read_metrics(out / "metrics.csv")})
    assert len(found.Scalars("loss")) == 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_offline(model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = tmp_path / "run"
    run(model_dir, data_dir, out, steps=2, epochs=None, log="wandb")
    assert list((out / "wandb").glob("offline-run-*/*.wandb"))
    assert json.loads((out / "wandb.json").read_text())["id"] in str(list((out / "wandb").iterdir()))
    assert os.environ["WANDB_MODE"] == "offline"
