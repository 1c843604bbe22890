"""Checkpoints of the training state: trained weights, masters, moments, and what the run wants to remember.

    DIRECTORY/step_00000010/<unit>.safetensors   param, master, m, v: the unit's flat buffers
    DIRECTORY/step_00000010/state.json           step, the model, the trainer's settings, the run's own record
    DIRECTORY/latest                             a text file with the newest folder's name

A folder is written beside, then renamed; `latest` is replaced last. So whatever happens, `latest` names a whole one.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fullstride.engine.step import Engine
from fullstride.errors import ConfigError
from fullstride.files import replace_text, replaced, save_tensors, whole_directory, write_json
from fullstride.model.hf import Checkpoint

LATEST, STATE = "latest", "state.json"


def _identity(engine: Engine) -> dict[str, Any]:
    """What must be equal for a checkpoint to fit an engine, in JSON's types."""
    config = {k: v for k, v in asdict(engine.config).items() if k != "extra"}
    lora = None if engine.lora is None else asdict(engine.lora)
    precision = {name: str(dtype) for name, dtype in asdict(engine.settings.precision).items()}
    return json.loads(json.dumps({"model": config, "lora": lora, "precision": precision}))


def checkpoint_name(step: int) -> str:
    """Name of the folder of `step`."""
    return f"step_{step:08d}"


def steps(directory: str | Path) -> list[int]:
    """The steps below `directory` that have a checkpoint, ascending."""
    names = (path.parent.name for path in Path(directory).glob(f"step_*/{STATE}"))
    return sorted(int(name[5:]) for name in names if name[5:].isdecimal() and name == checkpoint_name(int(name[5:])))


def save_checkpoint(engine: Engine, directory: str | Path, step: int, extra: dict[str, Any]) -> Path:
    """Write the state after update `step` below `directory`, replacing an old one of that step; returns the folder.

    A collective: the first rank writes, the others hand over their parts. So a file says nothing of how many they are.
    """
    if step < 0:
        raise ConfigError(f"step counts updates and cannot be negative, got {step}")
    directory = Path(directory)
    folder = directory / checkpoint_name(step)
    units = list(engine.state.trained)
    with engine.state.in_turn(units, engine.state.whole_buffers) as whole:
        if engine.comm.rank:
            return folder
        with whole_directory(folder, overwrite=True) as new:
            for name in units:
                save_tensors(whole(name), new / f"{name}.safetensors")
            record = {"step": step, **_identity(engine), "extra": extra}
            write_json(new / STATE, record)
        replace_text(directory / LATEST, folder.name + "\n")
    return folder


def find_checkpoint(directory: str | Path, step: int | str = LATEST) -> Path:
    """The folder of `step` (a number or "latest"). Raises ConfigError, naming those that exist, when there is none."""
    directory = Path(directory)
    name = checkpoint_name(step) if isinstance(step, int) else None
    if name is None and (directory / LATEST).is_file():
        name = (directory / LATEST).read_bytes().decode("utf-8", "replace").strip()
        if Path(name).name != name:
            raise ConfigError(f"{directory / LATEST}: damaged, it names {name!r}; name a step to resume from")
    # a folder that was being replaced when the process was killed stands under its other name
    for folder in () if name is None else (directory / name, replaced(directory / name)):
        if (folder / STATE).is_file():
            return folder
    found = ", ".join(map(checkpoint_name, steps(directory)))
    raise ConfigError(f"{directory}: no checkpoint of step {step}; there are: {found or 'none'}")


def read_record(directory: str | Path, step: int | str = LATEST) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a checkpoint says of itself, and what save_checkpoint was given as `extra`. Raises ConfigError."""
    file = find_checkpoint(directory, step) / STATE
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        int(record["step"])
        return record, record["extra"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: damaged ({error!r}); resume from another step") from None


def load_checkpoint(engine: Engine, directory: str | Path, step: int | str = LATEST) -> dict[str, Any]:
    """Read a state back; returns what save_checkpoint was given as `extra`.

    Raises ConfigError, before anything is read in, for a missing or damaged checkpoint and for one of another model,
    adapter or precision.
    """
    state = engine.state
    with engine.comm.agreed():
        folder = find_checkpoint(directory, step)
        record, extra = read_record(directory, step)
        for key, value in _identity(engine).items():
            if record.get(key) != value:
                raise ConfigError(f"{folder}: a checkpoint of another {key}: {record.get(key)}, this is {value}")
        files = {name: Checkpoint(folder, f"{name}.safetensors") for name in state.trained}
        for name, unit in state.trained.items():
            for key in state.buffers(name):
                if key not in files[name].names or files[name].shape(key) != (unit.layout.size,):
                    raise ConfigError(
                        f"{folder / name}.safetensors: {key} is missing or has another size; resume from another step"
                    )
    with engine.comm.committed():
        state.weights.start_writing()
        for name in state.trained:
            for key in state.buffers(name):
                state.load_buffer(name, key, files[name].get(key))
        engine.parts_written()
    engine.start_from(int(record["step"]))
    return extra
