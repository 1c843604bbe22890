"""The checkpoints of a run: which one is whole, which one is the best, and whether the disk can hold them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from fullstride.config.training import TrainingConfig
from fullstride.errors import ConfigError
from fullstride.run.directory import RunDirectory
from fullstride.run.metrics import GIGABYTE, EventLog
from fullstride.trainer.ranks import leads
from fullstride.trainer.setting import DTYPES
from fullstride.trainer.trainer import Trainer

SPARE = 2**20  # bytes of everything small


class Checkpoints:
    """Saves, and deletes what is not kept. `saved` is the step of the newest that is known to be whole, 0 without."""

    def __init__(self, directory: RunDirectory, trainer: Trainer, config: TrainingConfig, log: EventLog) -> None:
        self._directory, self._trainer, self._config, self._log = directory, trainer, config, log
        self.saved, self._saving = 0, 0  # _saving: the step of one that is not known to be whole yet
        self._best: float | None = None  # the least evaluation so far
        self._best_step = 0

    def begin(self, step: int, best: tuple[int, float] | None) -> None:
        """Go on after the checkpoint of `step`; best: step and evaluation of the best so far."""
        self.saved = step
        if best is not None:
            self._best_step, self._best = best

    def has(self, step: int) -> bool:
        """Whether it is saved, or under way."""
        return step in (self.saved, self._saving)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save update `step`, which is the last one done."""
        self.finish()
        self._trainer.save_checkpoint(self._directory.checkpoints, step, state)
        self._saving = step
        if not self._config.async_save:
            self.finish()

    def finish(self) -> None:
        """What is being written, if anything, is whole when this returns, and what is not kept is deleted."""
        if not self._saving:
            return
        step, self._saving = self._saving, 0
        self._trainer.finish_saving()
        self.saved = step
        self._log.write("checkpoint", step=step)
        if leads():
            if step == self._best_step:
                self._directory.mark_best(step)
            self._directory.prune(self._config.keep)

    def is_best(self, step: int, eval_loss: float | None) -> bool:
        """Whether update `step` has the least evaluation so far and its checkpoint is to be kept for that. It is marked
        so once it is whole."""
        if not self._config.keep_best or eval_loss is None or (self._best is not None and eval_loss >= self._best):
            return False
        self._best, self._best_step = eval_loss, step
        self._log.write("best", step=step, eval_loss=eval_loss)
        if self.saved == step and leads():
            self._directory.mark_best(step)
        return True

    def good(self) -> str:
        """Which checkpoint to go back to, for messages."""
        return f"checkpoint of step {self.saved} is good" if self.saved else "there is no checkpoint yet"


def check_disk(config: TrainingConfig, path: Path, trainable: int, total: int, saves: int, epochs: int) -> None:
    """Raise ConfigError when the disk under the run directory `path` cannot hold what the run will write.

    trainable, total: numbers of parameters; saves, epochs: how many checkpoints and ends of epochs are to come. What is
    in the directory already is room that is used again.
    """
    checkpoint = checkpoint_bytes(config, trainable)
    kept = min(max(saves, 1), config.keep + 1) + (config.keep_best and saves > 1)
    if config.method == "lora":
        exported, copies = trainable * DTYPES[config.master_dtype].itemsize, epochs + 1
    else:
        exported, copies = total * DTYPES[config.export_dtype or config.dtype].itemsize, 1
    needed = kept * checkpoint + copies * exported + SPARE
    nearest = next(place for place in (path, *path.parents) if place.exists())
    there = sum(file.stat().st_size for file in path.rglob("*.safetensors") if file.is_file()) if path.is_dir() else 0
    free = shutil.disk_usage(nearest).free
    if needed > free + there:
        raise ConfigError(
            f"out: the run will write up to {needed / GIGABYTE:.3g} GB ({kept} checkpoints of "
            f"{checkpoint / GIGABYTE:.3g} GB at a time, and exports of {copies * exported / GIGABYTE:.3g} GB), but the "
            f"disk of {nearest} has {(free + there) / GIGABYTE:.3g} GB for it; lower keep, save less often "
            "(save-every), free some space, or choose another --out"
        )


def checkpoint_bytes(config: TrainingConfig, trainable: int) -> int:
    """Of one checkpoint: parameters, masters where they are kept apart, and both moments."""
    apart = [config.master_dtype] if config.master_dtype != config.dtype else []
    return trainable * sum(DTYPES[name].itemsize for name in (config.dtype, *apart, config.m_dtype, config.v_dtype))
