"""A run directory: whose it is, where its files lie, which checkpoints it keeps."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

from fullstride.config import FinetuneConfig
from fullstride.config.keys import build, dashed, dump_toml, read_toml
from fullstride.errors import ConfigError

STEP = "step_"


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
        steps = self.steps()
        if isinstance(config.resume, int):
            if config.resume not in steps:
                there = ", ".join(map(str, steps)) or "none"
                raise ConfigError(
                    f"resume: no checkpoint of step {config.resume} in {self.checkpoints} (there: {there})"
                )
            return config.resume
        return self.latest() if found else 0

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

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(
            int(p.name.removeprefix(STEP))
            for p in self.checkpoints.glob(f"{STEP}*")
            if p.name.removeprefix(STEP).isdecimal()
        )

    def latest(self) -> int:
        """The step that `checkpoints/latest` names, 0 without one. Raises ConfigError when it names a missing one."""
        file = self.checkpoints / "latest"
        if not file.is_file():
            return 0
        name = file.read_text(encoding="utf-8").strip()
        step = name.removeprefix(STEP)
        if not step.isdecimal() or int(step) not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise ConfigError(f"{file} names {name!r}, which is not there; set resume to a step (there: {there})")
        return int(step)

    def drop_after(self, step: int) -> None:
        """Forget checkpoints after `step`: the run goes on from there, maybe another way."""
        later = [s for s in self.steps() if s > step]
        if later and step:
            replace_text(self.checkpoints / "latest", f"{STEP}{step:08d}\n")
        for s in later:
            shutil.rmtree(self.checkpoints / f"{STEP}{s:08d}")

    def prune(self, keep: int) -> None:
        """Delete all but the newest `keep` checkpoints."""
        for step in self.steps()[:-keep]:
            shutil.rmtree(self.checkpoints / f"{STEP}{step:08d}")


def replace_text(file: Path, text: str) -> None:
    """Write `file` so that it is the old one or the new one at any moment."""
    beside = file.with_name(file.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)
