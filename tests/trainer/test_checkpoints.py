"""Checkpoints of a Trainer: they go on as if nothing had been, are refused whole or not at all, and outlive SIGKILL."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fullstride.engine.parts_io as parts_io
from fullstride import ConfigError, ModelConfig, Options, Trainer, WorkerError
from tests.trainer.test_trainer import CONFIG, batch
from tests.trainer.test_trainer import make as make_one
from tests.trainer.test_workers import SRC, launch, workers

ROWS, SEQ_LEN = 4, 6
STEP = "step_00000003"


def make(gpus: int = 1, config: ModelConfig = CONFIG, **options) -> Trainer:
    options = {"device": "cpu", "dtype": "fp32", **options}
    return Trainer(config, Options(**options), gpus=gpus, batch_size=ROWS // gpus, seq_len=SEQ_LEN)


def update(trainer: Trainer, seed: int = 1) -> dict[str, float]:
    trainer.step(*batch(ROWS, SEQ_LEN, [1, 5, 2, 3], seed))
    return trainer.update(lr=1e-2)


def weights(trainer: Trainer) -> torch.Tensor:
    """All parameters in a row, as they are exported."""
    with tempfile.TemporaryDirectory() as directory:
        trainer.export_model(directory, overwrite=True)
        tensors = load_file(Path(directory, "model.safetensors"))
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def moments(trainer: Trainer) -> torch.Tensor:
    """All moments in a row, as they are saved: rank by rank."""
    with tempfile.TemporaryDirectory() as directory:
        trainer.save_checkpoint(directory, 0)
        trainer.finish_saving()
        files = [load_file(file) for file in sorted(Path(directory).rglob("*.safetensors"))]
    return torch.cat([file[name] for file in files for name in sorted(file) if name.endswith((".m", ".v"))])


# ---- what was, goes on


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("zero", [0, 2])
def test_the_same_ranks_go_on_to_the_bit(zero: int, background: bool, tmp_path: Path) -> None:
    options = {"zero": zero, "dtype": "bf16", "async_save": background}
    with make(2, **options) as trainer:
        trainer.init_weights(seed=5)
        update(trainer, 1)
        trainer.save_checkpoint(tmp_path, 1, {"position": 7})
        told = [update(trainer, 2), update(trainer, 3)]
        expected = weights(trainer).clone(), moments(trainer).clone()
    with make(2, **options) as trainer:
        assert trainer.load_checkpoint(tmp_path) == {"position": 7}
        assert [update(trainer, 2), update(trainer, 3)] == told
        assert torch.equal(weights(trainer), expected[0]) and torch.equal(moments(trainer), expected[1])


def test_a_lora_checkpoint_does_not_stand_for_the_base(tmp_path: Path) -> None:
    make_one(method="lora").save_checkpoint(tmp_path, 1)
    trainer = make(method="lora")
    trainer.load_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="no weights yet"):
        trainer.step(*batch(ROWS, SEQ_LEN, [4, 4, 4, 4]))


def test_latest_loads_when_a_replacement_was_cut_short(tmp_path: Path) -> None:
    """Killed between the two renames that replace a folder: the old one stands under its other name."""
    make_one().save_checkpoint(tmp_path, 3, {"mark": "old"})
    (tmp_path / STEP).rename(tmp_path / f".{STEP}.replaced")
    assert make_one().load_checkpoint(tmp_path) == {"mark": "old"}
    make_one().save_checkpoint(tmp_path, 3, {"mark": "new"})
    assert make_one().load_checkpoint(tmp_path) == {"mark": "new"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", STEP]


# ---- what is refused


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def scrawl(file: Path) -> None:
    """As long as before, but no header."""
    file.write_bytes(b"\xff" * file.stat().st_size)


def lose(file: Path) -> None:
    file.unlink()


def move(file: Path) -> None:
    """As long as before, but for another place in the buffer."""
    content = file.read_bytes()
    assert content.count(rb": [512]") >= 3
    file.write_bytes(content.replace(rb": [512]", rb": [256]"))


def shrink(file: Path) -> None:
    """One number instead of a buffer, which a copy would spread over all of it."""
    save_file(load_file(file) | {"head.m": torch.ones(1)}, file)


@pytest.fixture(scope="class", params=[1, 3], ids=["zero1", "zero3"])
def pair(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    """Two ranks that several tests use."""
    with make(2, zero=request.param) as trainer:
        trainer.init_weights(seed=5)
        yield trainer
    assert not workers()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks have written."""
    directory = tmp_path_factory.mktemp("saved")
    with make(2) as trainer:
        trainer.init_weights(seed=6)
        update(trainer)
        trainer.save_checkpoint(directory, 3)
    return directory


def check_refused(trainer: Trainer, directory: Path, message: str) -> None:
    """Assert that loading is refused, changes nothing, and leaves the workers as they are."""
    arrays, alive = batch(ROWS, SEQ_LEN, [1, 5, 2, 3]), workers()
    before, state = trainer.validate(*arrays), moments(trainer).clone()
    with pytest.raises(ConfigError, match=message):
        trainer.load_checkpoint(directory)
    assert trainer.validate(*arrays) == before and torch.equal(moments(trainer), state)
    assert workers() == alive


class TestRefused:
    @pytest.mark.parametrize("damage", [cut, scrawl, lose, move, shrink])
    def test_damaged_files(self, damage: Callable, pair: Trainer, saved: Path, tmp_path: Path) -> None:
        """The last file of the last rank is named or, where each file by itself is good, buffer and folder."""
        for file in (saved / STEP).iterdir():
            (tmp_path / STEP).mkdir(exist_ok=True)
            (tmp_path / STEP / file.name).write_bytes(file.read_bytes())
        (tmp_path / "latest").write_text(STEP)
        file = max((tmp_path / STEP).glob("shard-00002-*"))
        damage(file)
        told = {
            cut: rf"{file.name}: \d+ bytes, but \d+ were written; restore it, or resume from another step",
            scrawl: rf"{file.name}: damaged \(.*header.*; restore it, or resume from another step",
            lose: rf"{file.name}: missing; restore it, or resume from another step",
            move: rf"{STEP}: head.param is not there as a whole, or of another size; restore it",
            shrink: rf"{file.name}: \d+ bytes, but \d+ were written",
        }[damage]
        check_refused(pair, tmp_path, told)

    def test_a_file_that_belongs_elsewhere(self, pair: Trainer, tmp_path: Path) -> None:
        pair.save_checkpoint(tmp_path, 3)
        save_file({"head.m": torch.zeros(256)}, tmp_path / STEP / "another.safetensors")
        check_refused(pair, tmp_path, "another.safetensors: not a file of this checkpoint; remove it")

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", '{"step": "x"}', '{"step": 3, "extra": {}}', '{"step": 3, "extra": {}, "files": {"../x": 1}}'],
    )
    def test_a_torn_record_is_named(self, text: str, pair: Trainer, tmp_path: Path) -> None:
        pair.save_checkpoint(tmp_path, 3)
        (tmp_path / STEP / "state.json").write_text(text)
        check_refused(pair, tmp_path, r"state.json: damaged .*; resume from another step")

    @pytest.mark.parametrize("damage", [b"\xff\xfe", b"../elsewhere\n", b""])
    def test_a_damaged_latest_is_named(self, damage: bytes, pair: Trainer, tmp_path: Path) -> None:
        pair.save_checkpoint(tmp_path, 3)
        (tmp_path / "latest").write_bytes(damage)
        check_refused(pair, tmp_path, "latest")

    def test_checkpoints_of_something_else(self, pair: Trainer, tmp_path: Path) -> None:
        others = {
            "model": make_one(config=ModelConfig(**{**vars(CONFIG), "intermediate_size": 48})),
            "lora": make_one(method="lora", lora_rank=2),
            "precision": make_one(m_dtype="bf16"),
        }
        for what, other in others.items():
            other.save_checkpoint(tmp_path / what, 3)
            check_refused(pair, tmp_path / what, f"a checkpoint of another {what}")
        with pytest.raises(ConfigError, match=f"no checkpoint of step 4; there are: {STEP}"):
            pair.load_checkpoint(tmp_path / "model", 4)


# ---- in the background


WAITS = """
import pathlib, sys, threading, time
import fullstride.engine.parts_io as parts_io
write = parts_io.write_parts
def wait_and_write(*args):
    while pathlib.Path({gate!r}).exists():
        time.sleep(0.01)
    return write(*args)
parts_io.write_parts = wait_and_write
"""
FIRST_RANK = """
import sys
if "fullstride.trainer.worker" in sys.orig_argv and sys.orig_argv[-4] == "0":
    exec({code!r})
"""


class Held:
    """Keeps the first rank of trainers that are made from now on from writing, between `hold` and `go`."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        place = directory.with_name(f"{directory.name}-gate")
        place.mkdir()
        self._gate = place / "gate"
        code = WAITS.format(gate=str(self._gate))
        (place / "sitecustomize.py").write_text(FIRST_RANK.format(code=code))
        monkeypatch.syspath_prepend(place)
        monkeypatch.setattr(parts_io, "write_parts", parts_io.write_parts)  # which is undone at the end
        exec(code, {})

    def hold(self) -> None:
        self._gate.touch()

    def go(self) -> None:
        self._gate.unlink()


@pytest.mark.parametrize("gpus", [1, 2])
def test_training_goes_on_while_a_checkpoint_is_written(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is the state at the call; `latest` names the one before until all of it is there."""
    held = Held(tmp_path, monkeypatch)
    with make(gpus, async_save=True) as trainer:
        trainer.init_weights(seed=5)
        trainer.save_checkpoint(tmp_path, 1)
        trainer.finish_saving()
        update(trainer)
        expected = weights(trainer), moments(trainer)
        held.hold()
        trainer.save_checkpoint(tmp_path, 2, {"mark": 2})
        for seed in (2, 3):
            update(trainer, seed)
        assert (tmp_path / "latest").read_text() == "step_00000001\n"
        new, old = sorted(path.name for path in tmp_path.glob("*step*"))
        assert re.fullmatch(r"\.step_00000002\..+\.partial", new) and old == "step_00000001"
        held.go()
        trainer.finish_saving()
        assert (tmp_path / "latest").read_text() == "step_00000002\n"
        assert not torch.equal(weights(trainer), expected[0])
        trainer.finish_saving()  # nothing is left to do
        assert trainer.load_checkpoint(tmp_path) == {"mark": 2}
        assert torch.equal(weights(trainer), expected[0]) and torch.equal(moments(trainer), expected[1])


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("way", ["save", "load", "stop", "drop"])
def test_what_waits_for_a_checkpoint_that_is_being_written(
    way: str, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path, monkeypatch)
    trainer = make(gpus, async_save=True)
    trainer.init_weights(seed=5)
    held.hold()
    trainer.save_checkpoint(tmp_path, 1, {"mark": 1})
    threading.Timer(0.2, held.go).start()
    if way == "save":
        trainer.save_checkpoint(tmp_path, 2)
        assert (tmp_path / "step_00000001" / "state.json").is_file()
    elif way == "load":
        assert trainer.load_checkpoint(tmp_path) == {"mark": 1}
    elif way == "stop":
        trainer.stop()
    del trainer  # which waits for what is being written, too
    assert (tmp_path / "latest").read_text() == ("step_00000002\n" if way == "save" else "step_00000001\n")
    assert not list(tmp_path.glob(".*")) and not workers()


def limit(process: int, size: int) -> None:
    """Let `process` write files of at most so many bytes, as a disk that is full would; -1: of any size."""
    resource.prlimit(process, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.skipif(sys.platform != "linux", reason="sets another process's limits")
@pytest.mark.parametrize(
    ("way", "rank", "room"),
    [(way, rank, 400) for way in ("at once", "finish", "save", "load", "stop") for rank in (0, 1)]
    + [(way, 1, 0) for way in ("at once", "finish", "stop")],
)
def test_a_rank_that_cannot_write(way: str, rank: int, room: int, tmp_path: Path) -> None:
    """The caller is told, at once or by the next call; nothing is left, and all goes on, with the checkpoint before.

    room: bytes of a file; a word to the first rank is less than 400."""
    background = way != "at once"
    told = rf"rank {rank} could not write: \[Errno 27\] File too large"
    with make(2, async_save=background) as trainer:
        trainer.init_weights(seed=5)
        trainer.save_checkpoint(tmp_path, 1, {"mark": 1})
        trainer.finish_saving()
        process = workers()[rank]
        limit(process, room)
        try:
            if not background:
                with pytest.raises(OSError, match=told):
                    trainer.save_checkpoint(tmp_path, 2)
            else:
                trainer.save_checkpoint(tmp_path, 2)
                update(trainer)
                call = {
                    "finish": trainer.finish_saving,
                    "save": lambda: trainer.save_checkpoint(tmp_path, 3),
                    "load": lambda: trainer.load_checkpoint(tmp_path),
                    "stop": trainer.stop,
                }[way]
                with pytest.raises(OSError, match=told):
                    call()
        finally:
            if way != "stop":
                limit(process, resource.RLIM_INFINITY)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001"]
        if way == "stop":
            assert not workers()
            return
        assert trainer.load_checkpoint(tmp_path) == {"mark": 1}
        trainer.save_checkpoint(tmp_path, 2)
        trainer.finish_saving()
        assert (tmp_path / "latest").read_text() == "step_00000002\n"


def test_a_worker_is_killed_while_threads_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it for ever, and what is not whole is taken away."""
    held = Held(tmp_path, monkeypatch)
    trainer = make(2, async_save=True)
    trainer.init_weights(seed=5)
    held.hold()
    trainer.save_checkpoint(tmp_path, 1)
    (note,) = tmp_path.glob(".step_00000001.*.partial")
    until = time.monotonic() + 10
    while not (note / "rank-00001.json").is_file() and time.monotonic() < until:
        time.sleep(0.01)
    (note / "rank-00001.json").unlink()  # as if it had not come so far
    os.kill(workers()[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
        trainer.finish_saving()
    until = time.monotonic() + 5
    while list(tmp_path.iterdir()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not list(tmp_path.iterdir())
    trainer.stop()


def test_under_a_launcher(tmp_path: Path) -> None:
    done = launch(
        tmp_path,
        f"""
        trainer.stop()
        options = Options(device="cpu", dtype="fp32", zero=3, async_save=True)
        trainer = Trainer(config, options, gpus=2, batch_size=2, seq_len=6)
        trainer.init_weights(5)
        trainer.save_checkpoint(r"{tmp_path}", 1)
        trainer.save_checkpoint(r"{tmp_path}", 2)
        trainer.stop()
        """,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "script.py", "step_00000001", "step_00000002"]
    with make() as trainer, make() as other:
        assert trainer.load_checkpoint(tmp_path) == {}
        other.init_weights(5)
        assert torch.equal(weights(trainer), weights(other))


# ---- memory


def test_a_unit_at_a_time_passes_through_memory(tmp_path: Path) -> None:
    """Saving and loading need room for one unit, not for the state."""
    config = ModelConfig(**{**vars(CONFIG), "hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 10})
    with make(config=config) as trainer:
        trainer.init_weights()
        unit = 3 * 4 * trainer.engine.state.trained["blocks.0"].layout.size  # param, m and v in float32
        trainer.save_checkpoint(tmp_path, 1)  # what is imported and touched for the first time
        for call in (lambda: trainer.save_checkpoint(tmp_path, 2), lambda: trainer.load_checkpoint(tmp_path)):
            trainer.peak_memory()
            before = trainer.peak_memory()
            call()
            # tensors and the bytes that they become, or mapped pages; 10 units are in the state
            assert trainer.peak_memory() - before < 3 * unit


# ---- SIGKILL

SAVE_FOR_EVER = """
import itertools, sys
import torch
from fullstride import ModelConfig, Options, Trainer
from tests.trainer.test_checkpoints import weights
directory, background = sys.argv[1], sys.argv[2] == "background"
config = ModelConfig(**{config!r})
options = Options(device="cpu", dtype="fp32", async_save=background)
trainer = Trainer(config, options, gpus=2, batch_size=1, seq_len=4)
n = trainer.load_checkpoint(directory)["n"] if sys.argv[3] == "again" else 0
if n:
    loaded = weights(trainer)
    trainer.init_weights(seed=n)
    assert torch.equal(weights(trainer), loaded), "the weights are another checkpoint's"
print("loaded", n, flush=True)
for n in itertools.count(n + 1):
    trainer.init_weights(seed=n)
    print("saving", n, flush=True)
    trainer.save_checkpoint(directory, n % 3, {{"n": n}})  # folders are replaced, too
    trainer.finish_saving()
    print("saved", n, flush=True)
"""


def kill_again_and_again(times: int, directory: Path) -> None:
    """Kill the caller or its worker at random moments of saves: what `latest` names always loads, is whole, and is at
    least as new as the last save that returned."""
    choose = random.Random(times)
    code, saved, begun = SAVE_FOR_EVER.format(config=vars(CONFIG)), 0, 0
    for i in range(times + 1):
        words = [str(directory), choose.choice(["background", "at once"]), "again" if saved else "anew"]
        caller = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), str(SRC.parent)])},
        )
        assert caller.stdout is not None
        told = [caller.stdout.readline().split()]
        if not told[0]:
            raise AssertionError(caller.communicate()[1])
        assert saved <= int(told[0][1]) <= begun, "a save that had returned is lost"
        more = choose.randrange(2, 6) if i < times else 0  # saves before the one that is cut short
        while more:
            told.append(caller.stdout.readline().split())
            more -= told[-1][0] == "saving"
        time.sleep(choose.uniform(0, 0.04))
        os.kill(choose.choice([caller.pid, *workers(caller.pid)]), signal.SIGKILL)
        told += [line.split() for line in caller.communicate(timeout=20)[0].splitlines()]
        assert caller.returncode
        saved = max([saved, *(int(n) for what, n in told if what == "saved")])
        begun = max([begun, *(int(n) for what, n in told if what == "saving")])


def test_three_kills(tmp_path: Path) -> None:
    kill_again_and_again(3, tmp_path)


@pytest.mark.slow
def test_fifty_kills(tmp_path: Path) -> None:
    kill_again_and_again(50, tmp_path)


# ---- on GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("gpus", "zero"), [(1, 1), (2, 1), (2, 3)])
def test_on_gpus(gpus: int, zero: int, background: bool, tmp_path: Path) -> None:
    """The state comes back to the bit, after training that replays graphs; another device and number reads it too."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    config = ModelConfig(**{**vars(CONFIG), "hidden_size": 128, "head_dim": 64})
    arrays = batch(ROWS, SEQ_LEN, [1, 5, 2, 3])
    with make(gpus, config, device="cuda", zero=zero, async_save=background) as trainer:
        trainer.init_weights(seed=5)
        update(trainer)
        trainer.save_checkpoint(tmp_path, 1, {"mark": 1})
        before, state = trainer.validate(*arrays), moments(trainer).clone()
        update(trainer, 2)
        assert trainer.validate(*arrays) != before
        assert trainer.load_checkpoint(tmp_path) == {"mark": 1}
        assert trainer.validate(*arrays) == before and torch.equal(moments(trainer), state)
    with make(1, config) as alone:
        alone.load_checkpoint(tmp_path)
        # float32, sums in another order
        assert alone.validate(*arrays)["loss"] == pytest.approx(before["loss"], rel=1e-5)
        whole = moments(alone)
    assert np.isfinite(whole.numpy()).all() and whole.any()
