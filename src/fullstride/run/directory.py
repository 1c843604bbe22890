"""A run directory: whose it is, where its files lie, which checkpoints it keeps."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fullstride.config.keys import build, dashed, dump_toml, read_toml
from fullstride.config.training import TrainingConfig
from fullstride.engine.checkpoint import BEST, LATEST, checkpoint_name, find_checkpoint, step_of, steps
from fullstride.errors import ConfigError
from fullstride.files import locked, replace_text

LOCK = ".lock"
REMOVED = ".removed"  # what a checkpoint that is being deleted ends with
LEFT_BEHIND = (".partial", REMOVED)  # endings of what a killed process leaves, of no use to anybody


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run. Nothing is written before `lock`."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "run.toml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def start_step(self, config: TrainingConfig) -> int:
        """The step to resume from, 0 to start anew. Raises ConfigError when the directory belongs to something else."""
        if not self.path.exists():
            found = False
        elif not self.path.is_dir():
            raise ConfigError(f"out: {self.path} is a file; choose another --out or --name")
        else:
            found = any(path.name != LOCK for path in self.path.iterdir())
        if found and not self.config_file.is_file():
            raise ConfigError(f"out: {self.path} is not empty and holds no run; choose another --out or --name")
        if found and config.resume == "never":
            raise ConfigError(f"out: {self.path} holds a run and resume = never; choose another --out or --name")
        if found and self._has_trained():
            self._check_same_run(config)
        check_writable("out", self.path)
        if isinstance(config.resume, int):
            find_checkpoint(self.checkpoints, config.resume)
            return config.resume
        return self.latest()

    def _has_trained(self) -> bool:
        """Whether there is anything that a start with other settings would spoil: an update, or a checkpoint."""
        metrics = self.path / "metrics.csv"
        rows = metrics.read_text(encoding="utf-8").splitlines()[1:] if metrics.is_file() else []
        return bool(rows) or self.checkpoints.exists()

    def _check_same_run(self, config: TrainingConfig) -> None:
        try:
            old = build(type(config), read_toml(self.config_file))
        except ConfigError as error:
            raise ConfigError(
                f"out: {self.config_file} is not a run of {config.command} of this version ({error})"
            ) from None
        changed = [
            f"{dashed(f.name)} was {getattr(old, f.name)!r}, now {getattr(config, f.name)!r}"
            for f in dataclasses.fields(config)
            if not f.metadata["may_change"] and getattr(old, f.name) != getattr(config, f.name)
        ]
        if changed:
            raise ConfigError(
                f"out: {self.path} holds another run ({'; '.join(changed)}); choose another --out or --name, "
                "or give the values it was started with"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Make the directory and hold it for this process; the kernel lets go of it however the process ends.

        Raises ConfigError when another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        busy = f"out: another process is at work in {self.path}; wait for its end, or choose another --out or --name"
        with locked(self.path / LOCK, busy, self.path):
            yield

    def check_free(self) -> None:
        """Raise ConfigError when another process holds the directory."""
        if (self.path / LOCK).is_file():
            with self.lock():
                pass

    def create(self, config: TrainingConfig) -> None:
        """Write run.toml; running that goes on with the run, whatever `resume` was this time."""
        replace_text(self.config_file, dump_toml(dataclasses.replace(config, resume="auto")))

    def latest(self) -> int:
        """The step of the newest whole checkpoint: the one that `latest` names or else the last; 0 without any.

        Raises ConfigError when there is something in checkpoints/, but no whole one: a new start would delete it.
        """
        try:
            return step_of(find_checkpoint(self.checkpoints))
        except ConfigError:  # `latest` is missing or damaged, or what it names is
            found = steps(self.checkpoints)
        left = [] if not self.checkpoints.is_dir() else sorted(path.name for path in self.checkpoints.iterdir())
        if not found and any(not name.endswith(LEFT_BEHIND) for name in left):
            raise ConfigError(
                f"out: {self.checkpoints} holds no whole checkpoint (it holds {', '.join(left[:4])}); restore one, "
                "remove that directory to start anew, or choose another --out or --name"
            )
        return max(found, default=0)

    def drop_after(self, step: int) -> list[str]:
        """Delete checkpoints after `step`, from where the run goes on, maybe another way; returns their names."""
        later = [s for s in steps(self.checkpoints) if s > step]
        if later:
            replace_text(self.checkpoints / LATEST, checkpoint_name(step) + "\n")
        return [self._delete(s) for s in reversed(later)]

    def mark_best(self, step: int) -> None:
        """`best` names the checkpoint of `step`; 0: there is none."""
        if step:
            replace_text(self.checkpoints / BEST, checkpoint_name(step) + "\n")
        else:
            (self.checkpoints / BEST).unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """Of the checkpoints that are there."""
        return steps(self.checkpoints)

    def best(self) -> int:
        """The step of the whole checkpoint that `best` names; 0 without any."""
        try:
            return step_of(find_checkpoint(self.checkpoints, BEST))
        except ConfigError:
            return 0

    def prune(self, keep: int) -> None:
        """Delete all but the newest `keep` checkpoints, and those that `latest` and `best` name."""
        named = (self.latest(), self.best())
        for step in steps(self.checkpoints)[:-keep]:
            if step not in named:
                self._delete(step)

    def _delete(self, step: int) -> str:
        # renamed first: a process that is killed meanwhile leaves nothing that looks like a checkpoint
        folder = self.checkpoints / checkpoint_name(step)
        shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}{REMOVED}")))
        return folder.name

    def clean(self) -> None:
        """Remove what a process that was killed left in checkpoints/."""
        for path in self.checkpoints.glob(".step_*") if self.checkpoints.is_dir() else ():
            if path.name.endswith(LEFT_BEHIND):
                shutil.rmtree(path)


def check_writable(key: str, directory: Path) -> None:
    """Raise ConfigError, before any work is done, when nothing can be written in `directory` (which may be new)."""
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{key}: {nearest} is a file, so it cannot hold {directory.name}; choose another place")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: no permission to write in {nearest}; choose another place")
