"""Several ranks behind one Trainer: that they train as one, and that nothing is left when one of them, or all, end.

Workers are real processes and really die. A fault is put into one by a `sitecustomize` module, which Python imports
when it starts: workers search for modules where their caller does.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fullstride import ConfigError, ModelConfig, Options, OutOfMemory, Trainer, UsageError, WorkerError
from fullstride.engine.plan import predict
from fullstride.trainer.ranks import find_ranks
from fullstride.trainer.setting import Setting
from fullstride.trainer.telemetry import FIELDS
from tests.trainer.test_trainer import CONFIG, batch

SRC = Path(__file__).resolve().parents[2] / "src"
ROWS, SEQ_LEN = 4, 6
WITHIN = 10.0  # seconds in which a failure is told
# float32, sums in another order: 1e-7 a product, some 1e-6 after a few updates
TOLERANCE = 1e-5


def make(gpus: int, accumulation: int = 1, rows: int = ROWS, **options) -> Trainer:
    options = {"device": "cpu", "dtype": "fp32", **options}
    return Trainer(
        CONFIG, Options(**options), gpus=gpus, batch_size=rows // gpus, seq_len=SEQ_LEN, grad_accum=accumulation
    )


def workers(caller: int | None = None) -> list[int]:
    """Process ids of the workers of `caller` (this process)."""
    found, caller = [], caller or os.getpid()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().decode().split("\0")
            if "fullstride.trainer.worker" in words and words[-2] == str(caller):
                found.append(int(process.name))
    return sorted(found)


def listening() -> set[str]:
    """The sockets of this process on which TCP connections are awaited."""
    ours = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            ours.add(str(fd.readlink()))
    table = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {row[9] for row in table if row[3] == "0A" and f"socket:[{row[9]}]" in ours}


def files() -> set[Path]:
    """What is in the places for files that belong to processes, but for those named after others' processes."""
    found = {*Path("/dev/shm").iterdir(), *Path("/tmp").glob("*fullstride*")}
    numbers = {file: [int(n) for n in re.findall(r"\d+", file.name)] for file in found}
    return {f for f in found if not any(n != os.getpid() and Path(f"/proc/{n}").exists() for n in numbers[f])}


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Afterwards no worker, port, thread, or file is left, and no memory for tokens."""
    gc.collect()
    ports, before, threads = listening(), files(), threading.active_count()
    fds = len(list(Path("/proc/self/fd").iterdir()))
    yield
    gc.collect()
    assert not workers()
    assert listening() == ports and files() <= before
    until = time.monotonic() + 2  # threads end when they see that
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == threads
    assert len(list(Path("/proc/self/fd").iterdir())) <= fds


# ---- they train as one


def windows() -> list[list[tuple]]:
    """Updates of micro-steps of four rows: uneven ends, a rank without labels, documents, a short window."""
    documents = np.array([[0, 0, 0, 1, 1, 1]] * 2 + [[0] * 6, [0, 1, 2, 3, 4, 5]], dtype=np.int32)
    return [
        [(*batch(ROWS, SEQ_LEN, [1, 5, 2, 3], 1), None), (*batch(ROWS, SEQ_LEN, [4, 6, 0, 0], 2), documents)],
        [(*batch(ROWS, SEQ_LEN, [0, 0, 6, 6], 3), None), (*batch(ROWS, SEQ_LEN, [0, 0, 1, 0], 4), None)],
        [(*batch(ROWS, SEQ_LEN, [3, 3, 3, 3], 5), documents)],
    ]


def train(trainer: Trainer) -> list[dict[str, float]]:
    trainer.init_weights(seed=5)
    told = []
    for window in windows():
        for inputs, targets, documents in window:
            trainer.step(inputs, targets, documents, z_loss=1e-3)
            told.append(trainer.validate(*batch(ROWS, SEQ_LEN, [0, 0, 0, 4], 9)))  # by the last rank's weights
        # eps: without one the first AdamW update is the gradient's sign, which rounding can turn
        told.append(trainer.update(lr=1e-2, eps=1e-4, weight_decay=0.1, grad_clip=1.0))
    return told


def exported(trainer: Trainer, directory: Path) -> torch.Tensor:
    """All trained weights in a row, as the first rank writes them."""
    if trainer.options.method == "lora":
        trainer.export_adapter(directory)
        tensors = load_file(directory / "adapter_model.safetensors")
    else:
        trainer.export_model(directory)
        tensors = load_file(directory / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


LORA = {"method": "lora", "lora_rank": 2}


@pytest.mark.parametrize(
    ("method", "sharing"),
    [
        ({}, {"zero": 1}),
        ({}, {"zero": 3, "grad_reduce": "all-to-all"}),
        ({}, {"zero": 1, "gather_by": "copy"}),
        ({}, {"zero": 3, "grad_reduce": "all-to-all", "gather_by": "copy", "send_by": "copy"}),
        (LORA, {"zero": 0}),
        (LORA, {"zero": 3}),
    ],
    ids=["full-zero1", "full-zero3-all-to-all", "full-zero1-copy", "full-zero3-copy", "lora-zero0", "lora-zero3"],
)
def test_two_ranks_equal_one(method: dict, sharing: dict, tmp_path: Path, nothing_left: None) -> None:
    """And a checkpoint of the two goes on as one, and of the one as two that share something else."""
    found = []
    for gpus in (1, 2):
        with make(gpus, accumulation=2, **method, **(sharing if gpus == 2 else {})) as trainer:
            told = train(trainer)
            assert (trainer.world_size, trainer.batch_size, trainer.options.dp) == (gpus, ROWS // gpus, gpus)
            trainer.save_checkpoint(tmp_path / f"{gpus}", 3, {"from": gpus})
            weights = exported(trainer, tmp_path / f"model {gpus}")
            if gpus == 2:  # this trainer is another from here on
                assert trainer.load_checkpoint(tmp_path / "1") == {"from": 1}
            told += go_on(trainer)
            found.append((told, weights, exported(trainer, tmp_path / f"later {gpus}")))
        del trainer
    with make(1, accumulation=2, **method) as trainer:
        trainer.init_weights(seed=5)  # under LoRA the checkpoint has the adapters only
        assert trainer.load_checkpoint(tmp_path / "2") == {"from": 2}
        crossed = go_on(trainer)
    del trainer
    (told, weights, later), (other, other_weights, other_later) = found
    assert len(told) == 8 + 2
    for a, b in zip(told, other, strict=True):
        assert a == pytest.approx(b, rel=TOLERANCE)
    for a, b in zip(crossed, told[-2:], strict=True):
        assert a == pytest.approx(b, rel=TOLERANCE)
    assert (weights - other_weights).norm() / weights.norm() < TOLERANCE
    assert (later - other_later).norm() / later.norm() < TOLERANCE
    assert (later - weights).norm() / weights.norm() > 1e-3


def go_on(trainer: Trainer) -> list[dict[str, float]]:
    """One update after the three of `train`, and its effect."""
    inputs, targets = batch(ROWS, SEQ_LEN, [2, 4, 1, 6], 6)
    trainer.step(inputs, targets)
    told = trainer.update(lr=1e-2, eps=1e-4, weight_decay=0.1, grad_clip=1.0)
    return [told, trainer.validate(inputs, targets)]


@pytest.fixture(scope="class", params=[1, 3], ids=["zero1", "zero3"])
def pair(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    """Two ranks that several tests use."""
    with make(2, zero=request.param) as trainer:
        trainer.init_weights(seed=5)
        yield trainer
    assert not workers()


class TestAPair:
    def test_queries(self, pair: Trainer) -> None:
        assert pair.gpu_info() == [dict.fromkeys(FIELDS)] * 2
        assert pair.allocations(1) == pair.allocations(0)
        assert pair.parameters_finite() and pair.peak_memory() > 2**20
        pair.step(*batch(ROWS, SEQ_LEN, [3, 4, 0, 0]))
        assert pair.stack_info(0)["logits"] == 3 * 31 * 4 and "logits" not in pair.stack_info(1)  # it had no label
        own, other = pair.gradients(0), pair.gradients(1)
        with make(1) as alone:
            alone.init_weights(seed=5)
            alone.step(*batch(ROWS, SEQ_LEN, [3, 4, 0, 0]))
            whole = alone.gradients(0)
        assert own.keys() == other.keys() == whole.keys()
        # grad_accum is 1: they are reduced, so each rank has its part of the sum; sums in another order
        for name, gradient in whole.items():
            assert (own[name] + other[name] - gradient).norm() <= TOLERANCE * gradient.norm(), name
        assert own["model.norm.weight"].any() != other["model.norm.weight"].any()
        pair.discard()
        with pytest.raises(ConfigError, match="gradients exist between step and update"):
            pair.gradients(1)

    def test_what_is_refused_leaves_the_workers_usable(self, pair: Trainer, tmp_path: Path) -> None:
        inputs, targets = batch(ROWS, SEQ_LEN, [1, 5, 2, 3])
        before, alive = pair.validate(inputs, targets), workers()
        other = {**vars(CONFIG), "intermediate_size": 48}
        with Trainer(ModelConfig(**other), Options(device="cpu", dtype="fp32"), batch_size=1, seq_len=4) as trainer:
            trainer.init_weights()
            trainer.save_checkpoint(tmp_path / "other", 3)
            trainer.export_model(tmp_path / "model")
        wrong = targets.copy()
        wrong[3, 5] = 31
        calls: dict[str, Callable[[], object]] = {
            r"int32 \[4, 6\] \(dp \* batch_size, seq_len\), got int32 \[2, 6\]": lambda: pair.step(
                inputs[:2], targets[:2]
            ),
            r"got int64": lambda: pair.step(inputs.astype(np.int64), targets),
            r"targets\[3, 5\] is 31": lambda: pair.validate(inputs, wrong),
            "z_loss must": lambda: pair.step(inputs, targets, z_loss=-1.0),
            "update needs at least one step": lambda: pair.update(lr=1.0),
            "rank must be below world_size 2, got 2": lambda: pair.allocations(2),
            "checkpoint of another model": lambda: pair.load_checkpoint(tmp_path / "other"),
            "no checkpoint of step 4": lambda: pair.load_checkpoint(tmp_path / "other", 4),
            "another model than": lambda: pair.import_weights(tmp_path / "model"),
            "nowhere": lambda: pair.import_weights("nowhere"),
            "no adapter to export": lambda: pair.export_adapter(tmp_path / "adapter"),
        }
        for message, call in calls.items():
            with pytest.raises(ConfigError, match=message):
                call()
        pair.step(inputs, targets)
        with pytest.raises(ConfigError, match="call update before the next step"):
            pair.step(inputs, targets)
        assert pair.update(lr=0.0)["loss"] == pytest.approx(before["loss"], rel=1e-6)
        assert workers() == alive

    def test_checkpoints_and_models_in_and_out(
        self, pair: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("in the way")
        inputs, targets = batch(ROWS, SEQ_LEN, [1, 5, 2, 3])
        monkeypatch.chdir(tmp_path)  # the workers are elsewhere
        with pytest.raises(OSError, match="file"):  # only the rank that writes meets it
            pair.save_checkpoint("file", 1)
        with pytest.raises(ConfigError, match="extra must be a dict of what JSON can hold"):
            pair.save_checkpoint("run", 1, {"path": tmp_path})
        pair.save_checkpoint("run", 7, {"mark": 1})
        pair.export_model("model")
        before = pair.validate(inputs, targets)
        pair.step(inputs, targets)
        pair.update(lr=1e-2)
        assert pair.validate(inputs, targets) != before
        pair.import_weights("model")
        assert pair.validate(inputs, targets) == before
        pair.step(inputs, targets)
        pair.update(lr=1e-2)
        assert pair.load_checkpoint("run") == {"mark": 1}
        assert pair.validate(inputs, targets) == before

    def test_two_trainers_side_by_side(self, pair: Trainer) -> None:
        with make(2) as other:
            other.init_weights(seed=5)
            assert len(workers()) == 4
            other.validate(*batch(ROWS, SEQ_LEN, [1, 5, 2, 3]))
        with pytest.raises(ConfigError, match="the trainer is stopped; make a new one"):
            other.gpu_info()


def test_a_trainer_that_is_dropped(nothing_left: None) -> None:
    trainer = make(2)
    assert len(workers()) == 2
    del trainer


def test_what_is_not_refused_can_be_built() -> None:
    """Every combination of what concerns sharing, on one and two ranks: refused by name, or an engine of it exists."""
    built = refused = 0
    values = {
        "dp": (1, 2),
        "zero": range(4),
        "grad_reduce": ("reduce-scatter", "all-to-all"),
        "gather_by": ("nccl", "copy"),
        "send_by": ("nccl", "copy"),
        "dtype": ("bf16", "fp32"),
        "grad_dtype": ("bf16", "fp32"),
        "method": ("full", "lora"),
        "offload": ((), ("grads",)),
    }
    for combination in itertools.product(*values.values()):
        keys: dict[str, Any] = dict(zip(values, combination, strict=True))
        try:
            options = Options(device="cpu", **keys).resolved()
        except UsageError as error:
            assert re.search("(set|leave) .*(zero = [12]|dtype = bf16)", str(error))
            refused += 1
            continue
        predict(CONFIG, *Setting(options, 2, SEQ_LEN, 1).engine(CONFIG), "cpu", ranks=options.dp)
        built += 1
    assert built > 80 and refused > 80


def test_numbers_of_ranks() -> None:
    for gpus in (-1, 1.5, "2", True):
        with pytest.raises(ConfigError, match="gpus must be a number of GPUs, or 0 for all"):
            Trainer(CONFIG, Options(device="cpu"), gpus=gpus, batch_size=1, seq_len=4)  # type: ignore[arg-type]


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ConfigError, match="gpus = 4, but this machine has 3; set gpus to at most 3"):
        find_ranks(4, "cuda")
    assert find_ranks(0, "cuda") == (3, torch.device("cuda", 0))


# ---- a rank fails

FAULT = """
import os, pathlib, signal, sys, time
if "fullstride.trainer.worker" in sys.orig_argv and sys.orig_argv[-4] == "{rank}":
    import torch
    import {module} as module
    def fault(*args, **kwargs):
        when = pathlib.Path({directory!r}, "when")
        when.exists() or when.write_text(str(time.monotonic()))
        {fault}
    module.{name} = fault
"""
FAULTS = {
    "raise": ("raise RuntimeError('the fault')", WorkerError, r"rank 1 failed:\n(?s:.*)in fault(?s:.*)the fault"),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", WorkerError, "rank 1 was killed by SIGKILL"),
    "abort": ("os.abort()", WorkerError, "rank 1 was killed by SIGABRT"),
    "exit": ("os._exit(3)", WorkerError, "rank 1 exited with status 3"),
    "little memory": ("return 10_000", OutOfMemory, "rank 1: out of memory on cpu: segment 'weights' asks for .* kB"),
    "memory": (
        "raise torch.OutOfMemoryError('Tried to allocate 2 GiB')",
        OutOfMemory,
        "rank 1: out of memory on cpu: segment .* asks for 2.15 GB",
    ),
}
REFUSES = "from fullstride.errors import ConfigError; raise ConfigError('no such file')"
STEP = "fullstride.engine.step"
PLACES = {
    "start": (STEP, "Engine.__init__"),
    "small": ("fullstride.memory.arena", "_physical_memory"),
    "meeting": ("fullstride.parallel.rendezvous", "_group"),
    "step": ("fullstride.engine.stage", "Stage._backward_piece"),
    "gather": ("fullstride.parallel.weights", "GatheredWeights.get"),
    "exchange": ("fullstride.parallel.transport", "Copies.exchange"),
    "validate": (STEP, "Engine.validate"),
    "update": (STEP, "Engine._update_piece"),
    "optimizer": ("fullstride.engine.optimizer", "adamw"),
}


COPIES = {"zero": 3, "grad_reduce": "all-to-all", "gather_by": "copy", "send_by": "copy"}


def faulty(directory: Path, place: str, fault: str, monkeypatch: pytest.MonkeyPatch, rank: int = 1) -> None:
    """In trainers made from now on, rank `rank` fails at `place`."""
    put(directory, *PLACES[place], FAULTS[fault][0], monkeypatch, rank)


def put(directory: Path, module: str, name: str, code: str, monkeypatch: pytest.MonkeyPatch, rank: int = 1) -> None:
    """In trainers made from now on, rank `rank` runs `code` in the place of a function."""
    text = FAULT.format(rank=rank, directory=str(directory), module=module, name=name, fault=code)
    (directory / "sitecustomize.py").write_text(text)
    monkeypatch.syspath_prepend(directory)


def use(trainer: Trainer) -> None:
    """All that can wait for others, and what tells of what was only begun."""
    trainer.init_weights(seed=5)
    trainer.step(*batch(6, SEQ_LEN, [1, 5, 2, 3, 1, 2]))
    trainer.validate(*batch(6, SEQ_LEN, [1, 5, 2, 3, 1, 2]))
    trainer.update(lr=1e-3)
    trainer.gpu_info()


@pytest.mark.parametrize(
    ("place", "fault", "gpus", "options"),
    [
        ("start", "raise", 2, {}),
        ("small", "little memory", 2, {}),
        ("small", "little memory", 2, {"gather_by": "copy"}),
        ("meeting", "kill", 3, {}),
        ("step", "kill", 2, {"zero": 3}),
        ("step", "raise", 3, COPIES),
        ("gather", "kill", 3, {"zero": 3}),
        ("gather", "kill", 3, COPIES),
        ("exchange", "kill", 2, COPIES),
        ("validate", "exit", 2, {"zero": 3}),
        ("update", "raise", 3, {"zero": 2}),
        ("update", "kill", 2, {"zero": 0}),
        ("optimizer", "memory", 2, {"zero": 3}),
        ("optimizer", "abort", 2, {}),
        ("optimizer", "kill", 3, {"gather_by": "copy"}),
    ],
)
def test_a_worker_fails(
    place: str,
    fault: str,
    gpus: int,
    options: dict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nothing_left: None,
) -> None:
    """Rank 1 fails, while the others wait for it."""
    faulty(tmp_path, place, fault, monkeypatch)
    _, kind, message = FAULTS[fault]
    with pytest.raises(kind, match=message) as error:
        use(make(gpus, rows=6, **options))
    assert time.monotonic() - float((tmp_path / "when").read_text()) < WITHIN  # one clock for all processes
    assert not workers()
    assert not isinstance(error.value, WorkerError) or error.value.rank == 1
    error.value.__traceback__ = error.value.__cause__ = error.value.__context__ = None  # they hold the trainer


MARKS = {"save_checkpoint": "latest", "export_model": "model.safetensors", "export_adapter": "adapter_config.json"}
# what the first rank does when it writes, and the others when they hand over
WRITES = {
    "save_checkpoint": (("fullstride.engine.parts_io", "write_parts"), ("fullstride.engine.parts_io", "write_parts")),
    "export_model": (("fullstride.engine.weights_io", "write_model"), ("fullstride.engine.weights_io", "_in_turn")),
    "export_adapter": (
        ("fullstride.engine.weights_io", "save_tensors"),
        ("fullstride.engine.weights_io", "_values"),
    ),
}


@pytest.mark.parametrize("rank", [0, 1], ids=["who-writes", "who-hands-over"])
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("call", WRITES)
def test_a_worker_is_killed_while_files_are_written(
    call: str, zero: int, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    put(tmp_path, *WRITES[call][rank], FAULTS["kill"][0], monkeypatch, rank)
    trainer = make(2, method="lora", lora_rank=2, zero=zero)
    trainer.init_weights(seed=5)
    with pytest.raises(WorkerError, match=f"rank {rank} was killed by SIGKILL"):
        getattr(trainer, call)(tmp_path / "out", *([1] if call == "save_checkpoint" else []))
    with pytest.raises(ConfigError, match=f"the trainer is stopped since rank {rank} failed; make a new one"):
        trainer.gpu_info()
    # what the others had handed over is enough for the first rank to go on
    found = {path.name for path in (tmp_path / "out").rglob("*")}
    assert not found or (rank == 1 and MARKS[call] in found), "whole or not there"
    assert not list(tmp_path.rglob("*.partial"))


def test_a_rank_that_cannot_read_a_file_does_not_let_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    """Weights are gathered while they are read (ZeRO 3): the others would wait for this rank's parts."""
    with make(1) as trainer:
        trainer.init_weights()
        trainer.export_model(tmp_path / "model")
    put(tmp_path, "fullstride.engine.weights_io", "check_tensors", REFUSES, monkeypatch)
    with pytest.raises(WorkerError, match="only some ranks could go on; rank 1: no such file"):
        make(2, zero=3).import_weights(tmp_path / "model")


def test_a_worker_is_killed_while_nothing_is_done(nothing_left: None) -> None:
    trainer = make(3, rows=6)
    os.kill(workers()[2], signal.SIGKILL)
    until = time.monotonic() + WITHIN
    while workers() and time.monotonic() < until:  # the others go at once, not with the next call
        time.sleep(0.01)
    assert not workers()
    with pytest.raises(WorkerError, match="rank 2 was killed by SIGKILL"):
        trainer.gpu_info()


def test_the_first_rank_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None) -> None:
    faulty(tmp_path, "update", "raise", monkeypatch, rank=0)
    with pytest.raises(WorkerError, match=r"rank 0 failed:\n(?s:.*)the fault"):
        use(make(2, rows=6))


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_disagree_are_a_failure(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    """Only one rank could read a file: the ranks are not equal any more."""
    put(tmp_path, "fullstride.engine.weights_io", "init_weights", REFUSES, monkeypatch, rank)
    with pytest.raises(WorkerError, match=f"rank {rank} could not do init_weights as others could: no such file"):
        make(2).init_weights(seed=5)


# ---- the caller ends

LOOP = f"""
import sys, os, signal, subprocess, time
import numpy as np
from fullstride import ModelConfig, Options, Trainer
config = ModelConfig(**{vars(CONFIG)!r})
trainer = Trainer(config, Options(device="cpu", dtype="fp32"), gpus=2, batch_size=2, seq_len=6)
trainer.init_weights()
tokens = np.ones((4, 6), np.int32)
"""
FOREVER = """
print("go", flush=True)
while True:
    trainer.step(tokens, tokens)
    trainer.update(lr=1e-3)
"""


def start(code: str, words: tuple[str, ...] = ("-",)) -> subprocess.Popen:
    """A caller that reads its unguarded program from stdin, in a process group of its own."""
    caller = subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    assert caller.stdin is not None
    caller.stdin.write(LOOP + textwrap.dedent(code))
    caller.stdin.close()
    caller.stdin = None
    return caller


@pytest.mark.parametrize(
    ("way", "program"),
    [
        (signal.SIGINT, FOREVER),
        # a child that was forked holds the caller's end of the sockets, and lives on
        (signal.SIGKILL, "if os.fork() == 0:\n    os.setpgid(0, 0)\n    time.sleep(6)\n    os._exit(0)\n" + FOREVER),
        (signal.SIGKILL, 'print("go", flush=True)\ntime.sleep(60)'),
    ],
    ids=["ctrl-c", "kill-with-fork", "kill-idle"],
)
def test_the_caller_is_ended(way: signal.Signals, program: str, request: pytest.FixtureRequest) -> None:
    caller = start(program)
    request.addfinalizer(caller.kill)  # one that is not ended would train for ever
    assert caller.stdout is not None and caller.stdout.readline() == "go\n"
    time.sleep(0.2)
    assert len(workers(caller.pid)) == 2
    os.killpg(caller.pid, way)
    code = caller.wait(WITHIN)
    assert code == -way
    until = time.monotonic() + 3
    while workers(caller.pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not workers(caller.pid)
    if way == signal.SIGINT:
        assert caller.stderr is not None and "KeyboardInterrupt" in caller.stderr.read()
    caller.stdout.close()
    assert caller.stderr is not None
    caller.stderr.close()


def test_a_program_that_forgets_to_stop_ends() -> None:
    caller = start("trainer.step(tokens, tokens); print(trainer.update(lr=0.0)['tokens'])")
    out, err = caller.communicate(timeout=20)
    assert (caller.returncode, out, err) == (0, "24\n", "")
    assert not workers(caller.pid)


# ---- under a launcher


def launch(tmp_path: Path, code: str) -> subprocess.CompletedProcess:
    script = tmp_path / "script.py"
    script.write_text(LOOP.replace("gpus=2", "gpus=0") + textwrap.dedent(code))
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, env=env, check=False)


def test_torchrun(tmp_path: Path) -> None:
    done = launch(
        tmp_path,
        """
        rank = int(os.environ["RANK"])
        trainer.init_weights(5)
        tokens[2:] = 2
        trainer.save_checkpoint("run", 1)
        trainer.load_checkpoint("run")
        trainer.step(tokens, tokens)
        def print(value):  # one write each: two processes share the pipe
            os.write(1, f"{value}\\n".encode())
        print([trainer.validate(tokens, tokens)["loss"], trainer.gradients(1)["model.norm.weight"].sum().item()])
        print([trainer.update(lr=0.0)["loss"], len(trainer.gpu_info()), trainer.world_size])
        try:
            trainer.import_weights("nowhere")
        except ValueError as error:
            print([str(error)])
        trainer.stop()
        time.sleep(1.5 * rank)  # in which the others beat on
        trainer = Trainer(config, Options(device="cpu", dtype="fp32"), gpus=0, batch_size=2, seq_len=6)
        if rank == 0:
            time.sleep(1.5)  # an orderly end waits for the others
        trainer.init_weights(5)
        print([trainer.validate(tokens, tokens)["tokens"]])
        if rank == 0:
            trainer.stop()
            time.sleep(1.5)  # and so may a process
        """.replace('"run"', f'r"{tmp_path}"'),
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 8 and lines[::2] == lines[1::2]
    with make(1) as trainer:
        trainer.init_weights(5)
        tokens = np.repeat(np.array([1, 1, 2, 2], np.int32)[:, None], SEQ_LEN, 1)
        assert f"[{trainer.validate(tokens, tokens)['loss']:.4f}"[:6] in done.stdout


def test_torchrun_names_the_first_failure(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = launch(
        tmp_path,
        """
        trainer.step(tokens, tokens)
        if os.environ["RANK"] == "1":
            def fails(*_):
                raise ArithmeticError("the fault")
            trainer.engine._update_piece = fails
        try:
            trainer.update(lr=1e-3)
        except BaseException as error:
            print(f"{os.environ['RANK']}: {type(error).__name__}: {str(error)[:14]}", flush=True)
            raise
        """,
    )
    assert done.returncode != 0 and time.monotonic() - begin < 30
    # rank 0 may say so too, unless the launcher ends it first
    assert "1: WorkerError: rank 1 failed:" in done.stdout
    assert "ArithmeticError: the fault" in done.stderr
