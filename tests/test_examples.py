"""The examples run as a user runs them: as a script, from stdin, and in a real notebook kernel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.test_callers import free_port, variables
from tests.trainer.test_workers import WITHIN, files, workers

ROOT = Path(__file__).resolve().parents[1]
LOOP, NOTEBOOK = ROOT / "examples" / "custom_loop.py", ROOT / "examples" / "notebook.ipynb"
TWO_WORKERS = ("--device", "cpu", "--gpus", "2")
ANSWER = 60.0  # seconds for a cell, which takes a few


# ---- the loop by hand


def environment(**changed: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **changed}


def run(out: Path, steps: int, *words: str, before: str | None = None) -> list[dict[str, float]]:
    """What the loop notes of each update; with `before`, it is read from stdin, after those lines."""
    small = ("--seq-len", "32", "--every", "4", "--out", str(out), "--steps", str(steps), *words)
    done = subprocess.run(
        [sys.executable, *(["-"] if before is not None else [str(LOOP)]), *small],
        input=None if before is None else before + LOOP.read_text(),
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        cwd=out.parent,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert f"{steps}: loss " in done.stdout and "tokens/s" in done.stdout and "rank 0: " in done.stdout
    return [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]


def weights(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


def test_the_loop_as_a_script_and_resumed_from_stdin(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 12, *TWO_WORKERS)
    assert [row["step"] for row in whole] == list(range(1, 13))
    assert [row["step"] for row in whole if "eval_loss" in row] == [4, 8, 12]
    assert whole[-1]["loss"] < whole[0]["loss"] - 0.5  # from ln 512 = 6.2
    assert whole[-1]["eval_loss"] < whole[3]["eval_loss"]

    run(tmp_path / "halves", 8, *TWO_WORKERS, before="")
    halves = run(tmp_path / "halves", 12, *TWO_WORKERS, before="")
    assert halves == whole  # CPUs are deterministic, and a checkpoint is whole
    assert weights(tmp_path / "halves") == weights(tmp_path / "whole")

    # another run begins with that model, on one worker
    (later,) = run(tmp_path / "later", 1, "--device", "cpu", "--model", str(tmp_path / "whole" / "model"))
    assert later["loss"] < whole[0]["loss"] - 0.5


def test_the_loop_under_a_launcher(tmp_path: Path) -> None:
    """One process prints and writes for both."""
    words = ["--device", "cpu", "--seq-len", "32", "--every", "2", "--steps", "4", "--out", str(tmp_path / "run")]
    port = free_port()
    both = [
        subprocess.Popen(
            [sys.executable, str(LOOP), *words], env=variables(rank, port), stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    first, second = (process.communicate(timeout=120)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0] and second == ""
    assert first.count("loss ") == 2 and first.count("model: ") == 1
    rows = (tmp_path / "run" / "losses.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4]


@pytest.mark.gpu
def test_the_loop_after_the_gpu_was_used(tmp_path: Path) -> None:
    """On all GPUs, from a process that holds memory on one."""
    used = "import torch\nheld = torch.ones(1024, device='cuda').sum().item()\n"
    told = run(tmp_path / "run", 12, before=used)
    assert told[-1]["loss"] < told[0]["loss"] - 0.5


# ---- the notebook


class Kernel:
    """What runs a notebook's cells: ipykernel, in a process of its own."""

    def __init__(self, directory: Path) -> None:
        from jupyter_client.manager import KernelManager

        self._manager = KernelManager(connection_file=str(directory / "kernel.json"))
        places = {"IPYTHONDIR": str(directory / "ipython"), "JUPYTER_RUNTIME_DIR": str(directory)}
        # without its history, whose files it opens and closes when it likes
        words = ["--HistoryManager.enabled=False"]
        self._manager.start_kernel(extra_arguments=words, env=environment(**places), cwd=str(directory))
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=ANSWER)

    @property
    def pid(self) -> int:
        return self._manager.provisioner.pid  # type: ignore[union-attr]

    def run(self, cell: str, interrupt_at: str = "") -> tuple[str, str]:
        """(the error's name and message or "", everything printed). Ctrl-C half a second after it has printed that."""
        printed: list[str] = []

        def note(message: dict[str, Any]) -> None:
            content = message["content"]
            printed.append(content.get("text", "") or content.get("data", {}).get("text/plain", ""))
            if interrupt_at and interrupt_at in printed[-1]:
                time.sleep(0.5)
                self._manager.interrupt_kernel()

        reply = self._client.execute_interactive(cell, allow_stdin=False, timeout=ANSWER, output_hook=note)["content"]
        return ("" if reply["status"] == "ok" else f"{reply['ename']}: {reply['evalue']}"), "".join(printed)

    def restart(self) -> None:
        """At once, whatever it is doing: what the notebook's button does when a kernel hangs."""
        self._manager.restart_kernel(now=True)
        self._client.wait_for_ready(timeout=ANSWER)

    def shutdown(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel()


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    before, started = files(), Kernel(tmp_path)
    try:
        yield started
    finally:
        pid = started.pid
        started.shutdown()
    assert gone(pid) and files() <= before


def gone(caller: int) -> bool:
    """Whether `caller`'s workers end within seconds."""
    until = time.monotonic() + WITHIN
    while workers(caller) and time.monotonic() < until:
        time.sleep(0.01)
    return not workers(caller)


def test_the_notebook(kernel: Kernel) -> None:
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)  # they would hold a machine's paths
    printed = ""
    for cell in cells:
        error, text = kernel.run(cell.source)
        assert not error, f"{cell.source}\n{error}"
        printed += text
    losses = [float(loss) for loss in re.findall(r"^ *\d+ +([\d.]+) #+$", printed, re.MULTILINE)]
    assert len(losses) == 6 and losses[-1] < losses[0] - 1
    assert "2 ranks on cpu" in printed and "1 {'name': None" in printed and "'gradients': {'device'" in printed
    assert not workers(kernel.pid)


MAKE = """
import asyncio, os, sys, threading
import numpy as np
import fullstride as fs

def held():
    return len(os.listdir("/proc/self/fd")), threading.active_count()

before = held()
def make(width, seq_len):
    config = fs.ModelConfig("llama", 64, width, 4 * width, 4, 4, 4)
    trainer = fs.Trainer(config, fs.Options(device="cpu"), gpus=2, batch_size=2, seq_len=seq_len)
    trainer.init_weights()
    return trainer, np.ones((4, seq_len), np.int32)
"""
TRAIN = """
trainer, tokens = make(16, 8)
trainer.step(tokens, tokens)
print(trainer.update(lr=1e-3)["tokens"], len(trainer.gpu_info()))
"""


def test_cells_that_are_interrupted_and_a_kernel_that_is_restarted(kernel: Kernel) -> None:
    assert kernel.run(MAKE) == ("", "")
    # where this is: in a running event loop, and in no file
    where = "print(asyncio.get_running_loop().is_running(), hasattr(sys.modules['__main__'], '__file__'))"
    assert kernel.run(where) == ("", "True False\n")

    # seconds of work: 4 layers of 3 million products, 4,096 tokens a rank
    error, _ = kernel.run("trainer, tokens = make(512, 2048); print('go'); trainer.step(tokens, tokens)", "go")
    assert error.startswith("KeyboardInterrupt")
    assert not workers(kernel.pid)
    error, _ = kernel.run("trainer.update(lr=1e-3)")
    assert error == "ConfigError: the trainer is stopped; make a new one"
    assert kernel.run("print([now - then for now, then in zip(held(), before)])") == ("", "[0, 0]\n")

    assert kernel.run(TRAIN) == ("", "32 2\n")  # the same kernel trains on
    error, _ = kernel.run("import time; print('go'); time.sleep(60)", "go")  # no call is interrupted
    assert error.startswith("KeyboardInterrupt") and len(workers(kernel.pid)) == 2
    assert kernel.run("print(trainer.world_size, trainer.parameters_finite())") == ("", "2 True\n")

    old = kernel.pid
    kernel.restart()
    assert gone(old) and kernel.pid != old
    assert kernel.run(MAKE + TRAIN) == ("", "32 2\n")
    assert len(workers(kernel.pid)) == 2  # the fixture sees that they end with the kernel
