"""Fine-tuning over two worker processes: the same run as over one, its resume over another number, its failures."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from fullstride.cli.main import main
from fullstride.config.keys import parse
from fullstride.config.training import FinetuneConfig
from fullstride.data.loader import Batch, Loader
from fullstride.run.finetune import run_finetune
from fullstride.run.metrics import read_events, read_metrics
from fullstride.run.training import Run
from fullstride.trainer.trainer import Trainer
from tests.run.conftest import exact, keys, run, write_rows
from tests.trainer.test_workers import workers

# float32, sums in another order: 1e-7 a product, some 1e-6 after a few updates; eps keeps AdamW from making steps of
# the sign of gradients that are only noise
SMALL = {"epochs": 2, "lora_rank": 4, "eps": 1e-4, "save_every": 1, "keep": 9}
TOLERANCE = 1e-5
SRC = Path(__file__).resolve().parents[2] / "src"
ROWS = 21  # four ranks' rows a micro-step, two of those an update: the last window has four rows and one


@pytest.fixture
def data(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    write_rows(directory / "train.jsonl", ROWS)
    write_rows(directory / "validation.jsonl", 3, first=100)
    return directory


def tokens_by_epoch(out: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in read_metrics(out / "metrics.csv"):
        found[row["epoch"]] = found.get(row["epoch"], 0) + int(row["supervised_tokens"])
    return found


def check_same(out: Path, other: Path) -> None:
    ours, theirs = (np.array([[float(x or 0) for x in row] for row in exact(path)]) for path in (out, other))
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)


@pytest.mark.parametrize("zero", [1, 3])
def test_two_ranks_train_as_one(zero: int, model_dir: Path, data: Path, tmp_path: Path) -> None:
    alone, ranks = tmp_path / "alone", tmp_path / "ranks"
    one = run(model_dir, data, alone, **SMALL | {"batch_size": 4})
    two = run(model_dir, data, ranks, **SMALL | {"gpus": 2, "zero": zero})
    assert one.steps == two.steps == 6
    check_same(ranks, alone)
    assert {row["strategy"] for row in read_metrics(ranks / "metrics.csv")} == {f"dp2-zero{zero}"}
    assert one.adapter is not None and two.adapter is not None
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (two.adapter, one.adapter))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert (ours[name] - weight).norm() <= TOLERANCE * weight.norm(), name
    assert not workers()


def test_every_row_once_an_epoch(model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a run goes on over another number of ranks within an epoch."""
    seen: list[int] = []
    deal = Loader.next_window

    def note(self: Loader, grad_accum: int) -> list[Batch]:
        batches = deal(self, grad_accum)
        seen.extend(row for batch in batches for row in batch.row_ids)
        return batches

    monkeypatch.setattr(Loader, "next_window", note)
    out = tmp_path / "run"
    run(model_dir, data, out, **SMALL | {"epochs": None, "steps": 2, "gpus": 2})
    config = parse(FinetuneConfig, [str(out / "run.toml"), "--gpus", "1", "--epochs", "2"])
    assert (config.gpus, config.dp) == (1, 0)
    result = run_finetune(config)
    # 16 rows in two updates of eight, then five in two of four, then an epoch of six updates of four
    assert result.steps == 2 + 2 + 6
    assert sorted(seen[:ROWS]) == sorted(seen[ROWS:]) == list(range(ROWS))
    assert len(set(tokens_by_epoch(out).values())) == 1 and tokens_by_epoch(out).keys() == {"1", "2"}
    assert [row["strategy"] for row in read_metrics(out / "metrics.csv")] == ["dp2-zero1"] * 2 + ["single"] * 8


def words(values: dict[str, Any]) -> list[str]:
    given = {f"--{name.replace('_', '-')}": str(value) for name, value in values.items() if value is not None}
    return ["finetune", *(word for flag in given.items() for word in flag)]


@pytest.mark.parametrize("place", ["step", "save", "export"])
def test_a_worker_that_is_killed(
    place: str, model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The command ends with its rank and signal, nothing is left, and the same command completes the run."""
    out = tmp_path / "run"
    command = words(keys(model_dir, data, out, **SMALL | {"gpus": 2, "zero": 3}))
    name = {"step": "step", "save": "save_checkpoint", "export": "export_adapter"}[place]
    call = getattr(Trainer, name)

    def kill(self: Trainer, *args: Any, **more: Any) -> None:
        if self._updates == 3:
            os.kill(workers()[1], signal.SIGKILL)
        call(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, name, kill)
        assert main(command) == 1
    printed = capsys.readouterr()
    assert "fullstride: error: rank 1 was killed by SIGKILL" in printed.err
    saved = 3 if place == "step" else 2
    assert f"rank 1 failed after step 3; checkpoint of step {saved} is good" in printed.out
    last = read_events(out / "log.jsonl")[-1]
    assert (last["event"], last["rank"], last["step"]) == ("failed", 1, 3)
    assert not workers() and not list(out.rglob("*.partial"))

    assert main(command) == 0
    whole = tmp_path / "whole"
    run(model_dir, data, whole, **SMALL | {"batch_size": 4})
    check_same(out, whole)


def test_a_worker_that_raises_tells_its_traceback(
    model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'fullstride.trainer.worker' in sys.orig_argv:\n"
        "    from fullstride.engine.step import Engine\n"
        "    def fault(*_):\n"
        "        raise ArithmeticError('the fault')\n"
        "    Engine._update_piece = fault\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(words(keys(model_dir, data, tmp_path / "run", **SMALL | {"gpus": 2}))) == 1
    told = capsys.readouterr().err
    assert (
        re.search("fullstride: error: rank [01] failed:", told) and "ArithmeticError: the fault" in told
    )  # whoever is first


def test_a_stop_saves_the_state(model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Run.record

    def stop(self: Run, row: dict[str, Any]) -> None:
        record(self, row)
        if row["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "run"
    command = words(keys(model_dir, data, out, **SMALL | {"gpus": 2, "save_every": 0}))
    with monkeypatch.context() as patch:
        patch.setattr(Run, "record", stop)
        assert main(command) == 130
    assert json.loads((out / "checkpoints" / "step_00000002" / "state.json").read_text())["step"] == 2
    assert not workers()
    assert main(command) == 0
    assert len(read_metrics(out / "metrics.csv")) == 6


def agents(command: list[str], *, port: int) -> list[subprocess.Popen]:
    """Two torchrun agents with a process each, as on two machines that share a file system."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    words += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    env = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{SRC}", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [*words, "--node-rank", str(node), "-m", "fullstride", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for node in range(2)
    ]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_machines_train_as_one(model_dir: Path, data: Path, tmp_path: Path) -> None:
    """And a stop of one of them stops both at the same update; the same command completes the run."""
    out, whole = tmp_path / "run", tmp_path / "whole"
    small = SMALL | {"schedule": "constant", "warmup": 0, "save_every": 0}  # rates that do not depend on the length
    command = words(keys(model_dir, data, out, **small | {"gpus": 0, "zero": 3, "epochs": 40}))
    both = agents(command, port=free_port())
    until = time.monotonic() + 60
    while not read_metrics(out / "metrics.csv") and time.monotonic() < until:
        time.sleep(0.05)
    both[1].send_signal(signal.SIGTERM)
    ends = [process.communicate(timeout=60) for process in both]
    assert both[0].returncode != 0 and both[1].returncode != 0
    done = len(read_metrics(out / "metrics.csv"))
    assert done > 0 and f"interrupted: state of step {done} is saved" in ends[0][0], ends
    assert ends[1][0] == "", "one prints for all"

    command = words(keys(model_dir, data, out, **small | {"gpus": 0, "zero": 3, "steps": done + 2, "epochs": None}))
    both = agents(command, port=free_port())
    ends = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    assert f"resumed at step {done} of {done + 2}" in ends[0][0]
    run(model_dir, data, whole, **small | {"batch_size": 4, "steps": done + 2, "epochs": None})
    check_same(out, whole)


KILL = "os.kill(os.getpid(), signal.SIGKILL)"
FAULTS = {
    "prepare": ("fullstride.run.finetune", "prepare", "raise module.ConfigError('no data here')", "no data here"),
    # when the other has seen that it lives, and waits for it
    "killed before they meet": ("fullstride.run.finetune", "prepare", f"time.sleep(6); {KILL}", "gave no sign of life"),
    "killed in a step": ("fullstride.engine.step", "Engine._update_piece", KILL, "gave no sign of life"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_machine_that_fails(
    fault: str, model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both agents end within 30 seconds of it, and the first failure is named."""
    module, name, code, told = FAULTS[fault]
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib, signal, time\n"
        "if 'RANK' in os.environ:\n"
        "    from fullstride.parallel import presence\n"
        "    presence.SILENCE = 4.0\n"
        "if os.environ.get('RANK') == '1':\n"
        f"    import {module} as module\n"
        "    def fault(*_):\n"
        f"        pathlib.Path({str(tmp_path)!r}, 'when').write_text(str(time.monotonic()))\n"
        f"        {code}\n"
        f"    module.{name} = fault\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    both = agents(words(keys(model_dir, data, tmp_path / "run", **SMALL | {"gpus": 0})), port=free_port())
    ends = [process.communicate(timeout=60) for process in both]
    assert all(process.returncode not in (0, None) for process in both)
    assert time.monotonic() - float((tmp_path / "when").read_text()) < 30  # one clock for all processes
    assert "fullstride: error: rank 1" in ends[0][1] and told in ends[0][1], ends
    if fault == "killed in a step":
        last = read_events(tmp_path / "run" / "log.jsonl")[-1]
        assert (last["event"], last["rank"], last["step"]) == ("failed", 1, 0)
    else:
        assert not (tmp_path / "run").exists()
