"""Where else a run's numbers go, beside metrics.csv and log.jsonl: the key `log`.

A sink gets the numbers of each row of metrics.csv under their names, with the update as step. One that fails while the
run goes on is told once and gets nothing more: training does not end for it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from fullstride.config.training import SINKS, TrainingConfig
from fullstride.errors import ConfigError
from fullstride.files import replace_text

LEFT_OUT = ("strategy", "epoch", "step")


class Sink(Protocol):
    """One place."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of update `step`."""
        ...

    def close(self) -> None:
        """The run ends, for now."""
        ...


class TensorBoard:
    """Event files in RUN/tensorboard (torch.utils.tensorboard)."""

    def __init__(self, config: TrainingConfig, done: int) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        directory = str(Path(config.out) / "tensorboard")
        # what a stopped call wrote after `done` is not shown
        self._writer = module.SummaryWriter(directory, purge_step=done + 1 if done else None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in RUN/wandb. A resumed run goes on with the same one."""

    def __init__(self, config: TrainingConfig, done: int) -> None:
        wandb = importlib.import_module("wandb")
        file = Path(config.out) / "wandb.json"
        known = json.loads(file.read_text(encoding="utf-8"))["id"] if done and file.is_file() else None
        self._run = wandb.init(
            project="fullstride",
            name=config.name,
            id=known,
            resume="allow",
            dir=config.out,
            config=asdict(config),
        )
        replace_text(file, json.dumps({"id": self._run.id}) + "\n")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of Trackio, which keeps it on this machine."""

    def __init__(self, config: TrainingConfig, done: int) -> None:
        trackio = importlib.import_module("trackio")
        self._trackio = trackio
        trackio.init(project="fullstride", name=config.name, config=asdict(config), resume="allow" if done else "never")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


MAKERS: dict[str, Callable[[TrainingConfig, int], Sink]] = dict(zip(SINKS, (TensorBoard, Wandb, Trackio), strict=True))


def check_sinks(config: TrainingConfig) -> None:
    """Raise ConfigError for a sink whose package is missing."""
    for name in config.log:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"log: {name} is not installed ({error}): pip install 'fullstride[log]', or leave it out"
            ) from None


class Sinks:
    """Those that `config.log` names; in a process that does not write for all, none."""

    def __init__(self, config: TrainingConfig, writes: bool, tell: Callable[[str], None]) -> None:
        """tell: shows a line."""
        self._config, self._writes, self._tell = config, writes, tell
        self._open: dict[str, Sink] = {}

    def begin(self, done: int) -> None:
        """Open them, to go on after update `done`. Raises ConfigError for one that cannot be."""
        for name in self._config.log if self._writes else ():
            try:
                self._open[name] = MAKERS[name](self._config, done)
            except Exception as error:  # whatever its package raises: no login, no network, a full disk
                told = " ".join(f"{type(error).__name__}: {error}".split())
                raise ConfigError(f"log: {name} does not start ({told}); mend that, or leave it out") from error

    def write(self, row: Mapping[str, Any]) -> None:
        """Hand on a row of metrics.csv."""
        values = {k: float(v) for k, v in row.items() if k not in LEFT_OUT and v is not None}
        self._each(lambda sink: sink.write(row["step"], values))

    def close(self) -> None:
        """Close them."""
        self._each(lambda sink: sink.close())
        self._open.clear()

    def _each(self, work: Callable[[Sink], None]) -> None:
        for name, sink in list(self._open.items()):
            try:
                work(sink)
            except Exception as error:  # the run is worth more than its telemetry
                del self._open[name]
                self._tell(f"log: {name} gets nothing more ({' '.join(f'{type(error).__name__}: {error}'.split())})")
