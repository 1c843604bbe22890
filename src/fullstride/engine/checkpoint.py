"""Checkpoints of the training state: trained weights, masters, moments, and what the run wants to remember.

    DIRECTORY/step_00000010/shard-*.safetensors  param, master, m, v of the units' flat buffers: engine/parts_io
    DIRECTORY/step_00000010/state.json           step, model, the trainer's settings, the files, the run's own record
    DIRECTORY/latest                             a text file with the newest folder's name

Every rank writes an equal part of the state and reads what it holds, so the numbers of ranks may differ. A folder is
written beside, then renamed; `latest` is replaced last. Several trainers may save in one directory, even the same step:
each folder is one trainer's, the last one's. So whatever happens, `latest` names a whole one, after a loss
of power too: what a name stands for is on the disk before the name is.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fullstride.engine.step import Engine
from fullstride.errors import ConfigError
from fullstride.files import replace_text, replaced, sync, whole_directory, write_json
from fullstride.parallel.shards import Part

LATEST, BEST, STATE = "latest", "best", "state.json"
LOOK_EVERY = 0.05  # seconds, for other ranks' files
STEP_BITS = 62  # a step is below 2**62, where the one after it and its noise have room in int64
DEEPEST = 100  # levels of lists and dicts in `extra`, far from what Python's stack holds

Files = dict[str, int]  # bytes by name


def _identity(engine: Engine) -> dict[str, Any]:
    """What must be equal for a checkpoint to fit an engine, in JSON's types."""
    config = {k: v for k, v in asdict(engine.config).items() if k != "extra"}
    lora = None if engine.lora is None else asdict(engine.lora)
    precision = {name: str(dtype) for name, dtype in asdict(engine.settings.precision).items()}
    return json.loads(json.dumps({"model": config, "lora": lora, "precision": precision}))


def plain_extra(extra: dict[str, Any]) -> dict[str, Any]:
    """`extra` as it comes back: in JSON's own types. Raises ConfigError for what a checkpoint cannot keep."""
    rule = "extra must be a dict of what JSON can hold: dict, list, str, numbers, bool, None"
    if not isinstance(extra, dict):
        raise ConfigError(f"{rule}; got {type(extra).__name__}")
    try:
        text = json.dumps(extra, ensure_ascii=False)
        text.encode()  # a surrogate by itself cannot be written
        plain = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{rule} ({error})") from None
    values, levels = [plain], 0
    while values := [v for value in values for v in (value.values() if isinstance(value, dict) else value)]:
        values, levels = [value for value in values if isinstance(value, dict | list)], levels + 1
        if levels > DEEPEST:
            raise ConfigError(f"extra is more than {DEEPEST} levels deep; keep less nested values in it")
    return plain


def checkpoint_name(step: int) -> str:
    """Name of the folder of `step`."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """The step of what find_checkpoint has found, which may stand under another name."""
    return int(folder.name.lstrip(".").split(".")[0].removeprefix("step_"))


def steps(directory: str | Path) -> list[int]:
    """The steps below `directory` that have a checkpoint, ascending."""
    names = (path.parent.name for path in Path(directory).glob(f"step_*/{STATE}"))
    return sorted(int(name[5:]) for name in names if name[5:].isdecimal() and name == checkpoint_name(int(name[5:])))


def save_checkpoint(
    engine: Engine, directory: str | Path, step: int, extra: dict[str, Any], background: bool = False
) -> Saving | None:
    """Write the state after update `step` below `directory`, replacing an old one of that step.

    A collective. What the disk or the directory refuses is raised on the first rank only, which speaks for all, as
    OSError or ConfigError. background: return when the state is copied to the host; a thread writes, until `finish`.
    """
    record = {"step": step, **_identity(engine), "extra": extra}
    saving = Saving(engine, Path(directory), record)
    if not saving.begin():
        return None
    if not background:
        return saving.write(engine.comm.gather)
    saving.start()
    return saving


class Saving:
    """A checkpoint that is being written: each rank's own parts, and then on the first rank what makes it whole."""

    def __init__(self, engine: Engine, directory: Path, record: dict[str, Any]) -> None:
        state, self._comm, self._directory, self._record = engine.state, engine.comm, directory, record
        self._folder = directory / checkpoint_name(record["step"])
        self._new = self._folder  # until it is written: another, that `begin` makes
        # of a tied embedding that is in two stages the first one's
        self._parts = {u: engine.state.share(u) for u in state.trained if engine.holder(u) == engine.mesh.pp.rank}
        self._units = [unit.name for unit in state.adapter_table or state.base_table]
        self._end = ExitStack()  # on the first rank: the new folder is renamed, or on an error removed
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._untold: list[str | None] = [None] * self._comm.size  # why a rank could write nothing, its note neither

    def begin(self) -> bool:
        """Make the new folder; False where the first rank could not, which raises why. A collective."""
        error = name = None
        with ExitStack() as stack:
            try:
                if not self._comm.rank:
                    name = stack.enter_context(whole_directory(self._folder, overwrite=True)).name
            except (ConfigError, OSError) as refused:
                error = refused
            name = self._comm.gather(name)[0]
            self._end = stack.pop_all()
        if error is not None:
            raise error
        if name is not None:
            self._new = self._folder.with_name(name)
        return name is not None

    def write(self, gather: Callable[[Files | OSError], list[Files | OSError]]) -> None:
        """Write this rank's parts and, on the first rank, complete the checkpoint. gather: every rank's files, by rank,
        for the first."""
        with self._end:
            found = gather(self._write_parts())
            if not self._comm.rank:
                self._complete(found)
        if not self._comm.rank:
            sync(self._directory)
            replace_text(self._directory / LATEST, self._folder.name + "\n")

    def _write_parts(self) -> Files | OSError:
        from fullstride.engine.parts_io import file_names, write_parts

        rank, size = self._comm.rank, self._comm.size
        try:
            if not self._new.is_dir():
                raise FileNotFoundError("not there; the directory must be on a file system that all ranks share")
            return write_parts(self._new, self._parts, self._units, rank, size, self._comm.check)
        except OSError as error:
            for file in self._new.glob(file_names(rank)):  # room for a word to the first rank, if the disk is full
                file.unlink(missing_ok=True)
            return OSError(f"{self._new}: rank {rank} could not write: {error}")

    def _complete(self, found: list[Files | OSError]) -> None:
        files: Files = {}
        for rank, written in enumerate(found):
            if isinstance(written, OSError):
                raise written
            for name, size in written.items():
                if not (self._new / name).is_file() or (self._new / name).stat().st_size != size:
                    raise OSError(f"{self._new / name}: rank {rank} wrote it, but rank 0 does not see it")
            files |= written
        write_json(self._new / STATE, self._record | {"files": files})
        sync(self._new / STATE)
        sync(self._new)

    # ---- in a thread

    def start(self) -> None:
        """Copy this rank's parts to the host and begin to write them."""
        from fullstride.engine import parts_io  # noqa: F401 (not imported by two threads at once)

        self._parts = {
            unit: {name: Part(part.values.to("cpu", copy=True), part.first, part.size) for name, part in parts.items()}
            for unit, parts in self._parts.items()
        }
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self.write(self._gather_by_files)
        except BaseException as error:  # raised by `finish`
            self._error = error
        self._parts = {}

    def _gather_by_files(self, own: Files | OSError) -> list[Files | OSError]:
        """As Communicator.gather, for the first rank, by files in the new folder: collectives are training's, and this
        is another thread."""
        if self._comm.rank:
            told = {"error": str(own)} if isinstance(own, OSError) else {"files": own}
            replace_text(self._note(self._comm.rank), json.dumps(told))
            return []
        found = [own]
        for rank in range(1, self._comm.size):
            while not self._note(rank).is_file():
                if why := self._untold[rank]:
                    raise OSError(f"{self._new}: rank {rank} could not write: {why}")
                self._comm.check()
                time.sleep(LOOK_EVERY)
            told = json.loads(self._note(rank).read_text(encoding="utf-8"))
            found.append(OSError(told["error"]) if "error" in told else told["files"])
            self._note(rank).unlink()
        return found

    def _note(self, rank: int) -> Path:
        return self._new / f"rank-{rank:05d}.json"

    def finish(self) -> None:
        """Return when the threads are done. A collective: what the disk refuses any rank is raised on the first."""
        assert self._thread is not None
        if self._comm.rank:
            self._thread.join()
        # where the disk took no note of a rank's either, the first one's thread still waits for it
        refused = self._comm.rank and isinstance(self._error, OSError)
        self._untold = self._comm.gather(str(self._error) if refused else None)
        self._thread.join()
        if self._error is not None and not refused:
            raise self._error


def find_checkpoint(directory: str | Path, step: int | str = LATEST) -> Path:
    """The folder of `step` (a number, or what the file "latest" or "best" names). Raises ConfigError, naming those that
    exist, when there is none."""
    directory = Path(directory)
    assert not isinstance(step, str) or step in (LATEST, BEST), step
    name = None if isinstance(step, str) else checkpoint_name(step)
    if isinstance(step, str) and (directory / step).is_file():
        name = (directory / step).read_bytes().decode("utf-8", "replace").strip()
        if not re.fullmatch("step_[0-9]{8,19}", name):
            raise ConfigError(f"{directory / step}: damaged, it names {name[:40]!r}; name a step instead")
    # a folder that was being replaced when the process was killed stands under its other name
    for folder in () if name is None else (directory / name, *replaced(directory / name)):
        if (folder / STATE).is_file():
            return folder
    found = ", ".join(map(checkpoint_name, steps(directory)))
    raise ConfigError(f"{directory}: no checkpoint of step {step}; there are: {found or 'none'}")


def read_record(directory: str | Path, step: int | str = LATEST) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a checkpoint says of itself, and what save_checkpoint was given as `extra`. Raises ConfigError."""
    file = find_checkpoint(directory, step) / STATE
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if (
            not isinstance(record["step"], int)
            or not 0 <= record["step"] < 2**STEP_BITS
            or isinstance(record["step"], bool)
        ):
            raise ValueError("step")
        if not all(Path(name).name == name and isinstance(size, int) for name, size in record["files"].items()):
            raise ValueError("files")
        return record, plain_extra(record["extra"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file}: damaged ({error!r}); resume from another step") from None


def load_checkpoint(engine: Engine, directory: str | Path, step: int | str = LATEST) -> dict[str, Any]:
    """Read a state back; returns what save_checkpoint was given as `extra`. A collective.

    Raises ConfigError, before anything is changed and on all ranks, for a missing or damaged checkpoint and for one of
    another model, adapter or precision.
    """
    from fullstride.engine.parts_io import SavedParts

    state = engine.state
    with engine.comm.agreed():
        folder = find_checkpoint(directory, step)
        record, extra = read_record(directory, step)
        for key, value in _identity(engine).items():
            if record.get(key) != value:
                raise ConfigError(f"{folder}: a checkpoint of another {key}: {record.get(key)}, this is {value}")
        saved = SavedParts(folder, record["files"])
        saved.check({unit: state.held(unit, "meta") for unit in state.trained})
    with engine.comm.committed():
        state.weights.start_writing()
        for unit in state.trained:
            parts = state.held(unit)
            saved.read({unit: parts})
            state.restore(unit, parts)
        engine.parts_written()
    engine.start_from(record["step"])
    return extra
