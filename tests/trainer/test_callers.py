"""What callers do, on purpose or not: wrong arguments, threads, forks, odd places to start from, several at a time."""

from __future__ import annotations

import enum
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fullstride.engine.parts_io as parts_io
import fullstride.trainer.ranks as ranks
import fullstride.trainer.team as team
from fullstride import ConfigError, Options, Trainer, WorkerError
from fullstride.trainer.ranks import find_ranks, open_files
from tests.trainer.test_checkpoints import Held, make, update, weights
from tests.trainer.test_trainer import CONFIG, batch
from tests.trainer.test_trainer import make as make_one
from tests.trainer.test_workers import LOOP, REFUSES, ROWS, SEQ_LEN, SRC, WITHIN, put, start, workers

ARRAYS = batch(ROWS, SEQ_LEN, [1, 5, 2, 3])


@pytest.fixture(scope="module")
def pair() -> Iterator[Trainer]:
    with make(2) as trainer:
        trainer.init_weights(seed=5)
        yield trainer


# ---- arguments


class Number(enum.IntEnum):
    ONE = 1


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"in": value}
    return value


class TestArguments:
    def test_what_is_refused_before_anything_is_sent(self, pair: Any, tmp_path: Path) -> None:
        calls: list[tuple[str, Callable[[], object]]] = []
        for seed in ("abc", -1, 1.5, True, 2**63):
            calls.append(("seed must be an integer of at least 0 below", lambda seed=seed: pair.init_weights(seed)))
        for step in (True, 10**30, "3", 3.0, None, -1):
            calls.append((r"step must be an integer of at least 0", lambda s=step: pair.save_checkpoint(tmp_path, s)))
        for step in ("1", 1.0, None, "lates", True, np.float32(1), -1):
            calls.append(('step must be "latest" or a number', lambda s=step: pair.load_checkpoint(tmp_path, s)))
        for extra in ({"a": "\ud800"}, {"a": {1}}, [1], nested(1000), nested(101)):
            calls.append(("extra (must|is more)", lambda e=extra: pair.save_checkpoint(tmp_path, 4, e)))
        paths: dict[str, Callable[[Any], object]] = {
            "export_model": pair.export_model,
            "export_adapter": pair.export_adapter,
            "import_weights": pair.import_weights,
            "import_adapter": pair.import_adapter,
            "load_checkpoint": pair.load_checkpoint,
            "save_checkpoint": lambda path: pair.save_checkpoint(path, 1),
            "from_pretrained": lambda path: Trainer.from_pretrained(path, batch_size=1, seq_len=4),
        }
        for path in (f"{tmp_path}/a\0b", None, f"{tmp_path}/\ud800", 3):
            calls += [("must be a path", lambda call=call, path=path: call(path)) for call in paths.values()]
        for rank in (True, "0", -1, 2, None):
            calls.append(("rank must be", lambda rank=rank: pair.allocations(rank)))
        pair.step(*ARRAYS)
        for values in ({"weight_decay": 1e308}, {"weight_decay": 2000.0}):
            told = "lr times weight-decay, .*, must be at most 1, got 0.001 times"
            calls.append((told, lambda values=values: pair.update(lr=1e-3, **values)))
        calls.append(("step must be a positive integer below", lambda: pair.update(lr=1e-3, step=2**63 - 1)))
        calls.append(("lr must be a number", lambda: pair.update(lr=np.complex64(1))))  # type: ignore[arg-type]
        alive = workers()
        for message, call in calls:
            with pytest.raises(ConfigError, match=message):
                call()
        assert pair.update(lr=0.0)["tokens"] == 11 and workers() == alive and not list(tmp_path.iterdir())

    def test_numbers_of_numpy_are_numbers(self, pair: Trainer, tmp_path: Path) -> None:
        for step in (1, 2):
            pair.save_checkpoint(tmp_path, np.int64(step), {"n": Number.ONE, "step": step})  # type: ignore[arg-type]
        assert json.loads((tmp_path / "step_00000001" / "state.json").read_text())["extra"] == {"n": 1, "step": 1}
        told = pair.load_checkpoint(tmp_path, np.int64(1))  # type: ignore[arg-type]
        assert told == {"n": 1, "step": 1} and type(told["n"]) is int
        assert pair.allocations(np.int64(1)) == pair.allocations(1)  # type: ignore[arg-type]
        assert find_ranks(np.int64(2), "cpu") == (2, torch.device("cpu"))  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "damage",
        [
            lambda text: text.replace('"step": 3', '"step": 1e999'),
            lambda text: text.replace('"step": 3', '"step": -5'),
            lambda text: text.replace('"step": 3', f'"step": {10**40}'),
            lambda text: text.replace('"step": 3', '"step": 3.5'),
            lambda text: "[" * 100_000,
            lambda text: text.replace('"extra": {}', '"extra": ' + json.dumps(nested(300))),
        ],
    )
    def test_a_record_of_nonsense(self, damage: Callable[[str], str], pair: Trainer, tmp_path: Path) -> None:
        pair.save_checkpoint(tmp_path, 3)
        record = tmp_path / "step_00000003" / "state.json"
        text = record.read_text()
        record.write_text(damage(text))
        assert record.read_text() != text
        with pytest.raises(ConfigError, match=r"state.json: damaged .*; resume from another step"):
            pair.load_checkpoint(tmp_path)
        assert pair.validate(*ARRAYS)["tokens"] == 11

    def test_what_the_system_refuses_to_read(self, pair: Trainer, tmp_path: Path) -> None:
        """Names that are too long are refused to everybody; rights would be given to root."""
        (tmp_path / "latest").write_text("a" * 5000)
        with pytest.raises(ConfigError, match=r"latest: damaged, it names 'a+'; name a step"):
            pair.load_checkpoint(tmp_path)
        long = tmp_path / ("a" * 300)
        for call in (pair.load_checkpoint, pair.import_weights, pair.import_adapter):
            with pytest.raises(ConfigError, match=r"cannot be read: .*File name too long"):
                call(long)
        (tmp_path / "config.json").write_text("[" * 100_000)
        with pytest.raises(ConfigError, match="cannot be read: maximum recursion"):
            pair.import_weights(tmp_path)
        assert pair.validate(*ARRAYS)["tokens"] == 11

    def test_a_file_that_may_not_be_read_is_not_called_damaged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer, opens = make_one(), Path.open
        trainer.save_checkpoint(tmp_path, 3)

        def denied(self: Path, *args: Any, **more: Any) -> Any:
            if self.suffix == ".safetensors":
                raise PermissionError(13, "Permission denied", str(self))
            return opens(self, *args, **more)

        monkeypatch.setattr(Path, "open", denied)
        with pytest.raises(ConfigError, match=r"safetensors: cannot be read \(Permission denied\); restore it"):
            trainer.load_checkpoint(tmp_path)


# ---- several at a time


def test_two_trainers_save_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One begins and ends while the other is at it: both succeed, and what stays is whole."""
    outer, inner, write = make_one(), make_one(), parts_io.write_parts
    outer.init_weights(1)
    inner.init_weights(2)

    def both(*args: Any) -> dict[str, int]:
        monkeypatch.setattr(parts_io, "write_parts", write)
        done = write(*args)
        inner.save_checkpoint(tmp_path, 1, {"mark": "inner"})
        return done

    monkeypatch.setattr(parts_io, "write_parts", both)
    outer.save_checkpoint(tmp_path, 1, {"mark": "outer"})
    other = make_one()
    assert other.load_checkpoint(tmp_path) == {"mark": "outer"}
    assert torch.equal(weights(other), weights(outer)) and not torch.equal(weights(other), weights(inner))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001"]


def test_a_folder_that_is_a_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("kept")
    for target in ("elsewhere", "nowhere"):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "step_00000001").symlink_to(tmp_path / target)
        trainer = make_one()
        trainer.save_checkpoint(tmp_path / "run", 1)
        assert not (tmp_path / "run" / "step_00000001").is_symlink() and trainer.load_checkpoint(tmp_path / "run") == {}
        assert len(list((tmp_path / "run").iterdir())) == 2
        for file in (tmp_path / "run" / "step_00000001").iterdir():
            file.unlink()
        (tmp_path / "run" / "step_00000001").rmdir()
    assert (tmp_path / "elsewhere" / "mine").read_text() == "kept"


def test_calls_from_two_threads(pair: Trainer) -> None:
    """Each gets the answers to its own."""
    done, wrong = threading.Event(), []

    def watch() -> None:
        while not done.is_set():
            told = pair.gpu_info(), pair.allocations(1)
            if not (isinstance(told[0][0], dict) and "power_watts" in told[0][0] and "batch" in told[1]):
                wrong.append(told)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for _ in range(30):
            assert update(pair).keys() >= {"loss", "tokens"}
    finally:
        done.set()
        thread.join()
    assert not wrong


WAIT = "time.sleep(60)"


def test_a_stop_in_another_thread_ends_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = workers()  # the pair's
    put(tmp_path, "fullstride.engine.weights_io", "init_weights", WAIT, monkeypatch)
    trainer = make(2)
    threading.Timer(0.5, trainer.stop).start()
    begin = time.monotonic()
    with pytest.raises(ConfigError, match="stopped in another thread during this call; make a new one"):
        trainer.init_weights(seed=5)
    assert time.monotonic() - begin < WITHIN and workers() == alive


def test_a_rank_refuses_what_another_waits_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = workers()  # the pair's
    monkeypatch.setattr(team, "DIVIDED_AFTER", 0.5)
    put(tmp_path, "fullstride.engine.stage", "Stage._backward_piece", REFUSES, monkeypatch)
    trainer = make(2, zero=3)
    trainer.init_weights(seed=5)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 could not do step as others could: no such file"):
        update(trainer)
    assert time.monotonic() - begin < WITHIN and workers() == alive


@pytest.mark.parametrize("background", [False, True])
def test_ctrl_c_while_files_are_written(background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = workers()  # the pair's
    held = Held(tmp_path, monkeypatch)
    trainer = make(2, async_save=background)
    trainer.init_weights(seed=5)
    held.hold()
    if background:
        trainer.save_checkpoint(tmp_path, 1)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        trainer.finish_saving() if background else trainer.save_checkpoint(tmp_path, 1)
    assert not list(tmp_path.iterdir()) and workers() == alive


# ---- where a caller comes from

FORKS = """
def child(way):
    if os.fork():
        return os.wait()[1]
    if way == "raise":
        os.close(2)
        raise RuntimeError("in the child")
    if way == "stop":
        trainer.stop()
    if way == "drop":
        del globals()["trainer"]
    if way == "call":
        try:
            trainer.step(tokens, tokens)
        except ValueError as error:
            os._exit(5 if "belongs to process" in str(error) else 6)
    sys.exit(3)
trainer.step(tokens, tokens)
told = [os.waitstatus_to_exitcode(child(way)) for way in ("exit", "raise", "stop", "drop", "call")]
"""
TELL = "os.write(1, f\"{told} {trainer.update(lr=0.0)['tokens']:.0f}\\n\".encode())\n"


def test_a_process_that_is_forked_ends_nothing() -> None:
    caller = start(FORKS + TELL)
    assert caller.communicate(timeout=60) == ("[3, 1, 3, 3, 5] 24\n", "")


def test_a_daemon(tmp_path: Path) -> None:
    """Without standard streams; and with what is no str where modules are searched for."""
    code = LOOP.replace("import sys,", "import pathlib, sys; sys.path.append(pathlib.Path('x'))\nimport")
    code += "trainer.step(tokens, tokens); told = trainer.update(lr=0.0)['tokens']; trainer.stop()\n"
    code += f"open(r'{tmp_path / 'told'}', 'w').write(str(told))"

    def close() -> None:
        for fd in (0, 1, 2):
            os.close(fd)

    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, preexec_fn=close, env=environment, timeout=60, check=False)
    assert done.returncode == 0 and (tmp_path / "told").read_text() == "24"


def test_too_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.resource, "getrlimit", lambda _: (24, 24))
    with pytest.raises(ConfigError, match=r"2 ranks need 40 open files in a process, but it may have 24; .*ulimit -n"):
        Trainer(CONFIG, Options(device="cpu"), gpus=2, batch_size=1, seq_len=4)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="as many open files as it may"), open_files(2):
        raise OSError(24, "Too many open files")


# ---- under a launcher


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "abc"), ("RANK", "-1"), ("RANK", "2"), ("LOCAL_RANK", "")])
def test_variables_of_no_launcher(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, good in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, good)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"got .*{name}={value}.*; unset them, or use torchrun"):
        Trainer(CONFIG, Options(device="cpu"), batch_size=1, seq_len=4)


def variables(rank: int, port: int) -> dict[str, str]:
    """As torchrun sets them for one of two processes on this machine."""
    launcher = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    own = {name: str(value) for name, value in launcher.items()}
    return {**os.environ, **own, "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def test_a_launcher_that_is_killed_takes_its_process_along(tmp_path: Path) -> None:
    """And the others; also where its processes have forked others, which end nothing."""
    code = LOOP.replace("gpus=2", "gpus=0") + FORKS + TELL
    code += "while True:\n    trainer.step(tokens, tokens)\n    trainer.update(lr=1e-3)\n"
    (tmp_path / "script.py").write_text(code)
    words, port = [sys.executable, str(tmp_path / "script.py")], free_port()
    launcher = [sys.executable, "-c", f"import subprocess; subprocess.run({words!r})"]
    first, second = (
        subprocess.Popen(w, env=variables(rank, port), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank, w in enumerate((words, launcher))
    )
    assert first.stdout is not None and second.stdout is not None
    told = [out.readline() for out in (first.stdout, second.stdout)]
    second.kill()
    assert told == ["[3, 1, 3, 3, 5] 24\n"] * 2
    begin = time.monotonic()
    _, error = first.communicate(timeout=30)
    assert "WorkerError: rank 1 lost its launcher" in error and time.monotonic() - begin < WITHIN
    second.communicate(timeout=10)  # the orphan has ended, too: it held these pipes
