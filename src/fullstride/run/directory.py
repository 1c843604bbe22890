"""A run directory: whose it is, where its files lie, which checkpoints it keeps."""

from __future__ import annotations

import dataclasses
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from fullstride.config import FinetuneConfig
from fullstride.config.keys import build, dashed, dump_toml, read_toml
from fullstride.engine.checkpoint import LATEST, checkpoint_name, find_checkpoint, steps
from fullstride.errors import ConfigError
from fullstride.files import replace_text


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run. Nothing is written before `create`."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "run.toml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def start_step(self, config: FinetuneConfig) -> int:
        """The step to resume from, 0 to start anew. Raises ConfigError when the directory belongs to something else."""
        if not self.path.exists():
            found = False
        elif not self.path.is_dir():
            raise ConfigError(f"out: {self.path} is a file; choose another --out or --name")
        else:
            found = any(self.path.iterdir())
        if found and not self.config_file.is_file():
            raise ConfigError(f"out: {self.path} is not empty and holds no run; choose another --out or --name")
        if found and config.resume == "never":
            raise ConfigError(f"out: {self.path} holds a run and resume = never; choose another --out or --name")
        if found:
            self._check_same_run(config)
        check_writable("out", self.path)
        if isinstance(config.resume, int):
            find_checkpoint(self.checkpoints, config.resume)
            return config.resume
        return self.latest()

    def _check_same_run(self, config: FinetuneConfig) -> None:
        try:
            old = build(FinetuneConfig, read_toml(self.config_file))
        except ConfigError as error:
            raise ConfigError(f"out: {self.config_file} is not a run of this version ({error})") from None
        changed = [
            f"{dashed(f.name)} was {getattr(old, f.name)!r}, now {getattr(config, f.name)!r}"
            for f in dataclasses.fields(FinetuneConfig)
            if not f.metadata["may_change"] and getattr(old, f.name) != getattr(config, f.name)
        ]
        if changed:
            raise ConfigError(
                f"out: {self.path} holds another run ({'; '.join(changed)}); choose another --out or --name, "
                "or give the values it was started with"
            )

    def create(self, config: FinetuneConfig) -> None:
        """Make the directory and write run.toml; running that goes on with the run, whatever `resume` was this time."""
        self.path.mkdir(parents=True, exist_ok=True)
        replace_text(self.config_file, dump_toml(dataclasses.replace(config, resume="auto")))

    def latest(self) -> int:
        """The step of the newest checkpoint, 0 without any. Raises ConfigError when `latest` names a missing one."""
        if not (self.checkpoints / LATEST).is_file():
            return 0
        folder = find_checkpoint(self.checkpoints).name
        return int("".join(filter(str.isdigit, folder)))

    def drop_after(self, step: int) -> None:
        """Forget checkpoints after `step`: the run goes on from there, maybe another way."""
        later = [s for s in steps(self.checkpoints) if s > step]
        if later and step:
            replace_text(self.checkpoints / LATEST, checkpoint_name(step) + "\n")
        for s in later:
            shutil.rmtree(self.checkpoints / checkpoint_name(s))

    def prune(self, keep: int) -> None:
        """Delete all but the newest `keep` checkpoints."""
        for step in steps(self.checkpoints)[:-keep]:
            shutil.rmtree(self.checkpoints / checkpoint_name(step))


def check_writable(key: str, directory: Path) -> None:
    """Raise ConfigError, before any work is done, when nothing can be written in `directory` (which may be new)."""
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{key}: {nearest} is a file, so it cannot hold {directory.name}; choose another place")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: no permission to write in {nearest}; choose another place")
