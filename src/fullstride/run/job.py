"""A run that may start: everything it needs but its weights. Nothing is written here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from fullstride.config import resolve_device
from fullstride.config.training import TrainingConfig
from fullstride.data.loader import Loader
from fullstride.data.report import Report
from fullstride.engine.checkpoint import read_record
from fullstride.engine.lr import warmup_updates
from fullstride.errors import ConfigError
from fullstride.model.spec import ModelConfig
from fullstride.run.directory import RunDirectory
from fullstride.run.inputs import weights_digest
from fullstride.run.sinks import check_sinks
from fullstride.trainer.ranks import find_ranks, leads

Config = TypeVar("Config", bound=TrainingConfig)


@dataclass(frozen=True)
class Job:
    """`config` is resolved; `resume_step` and the loader's `position` are 0 for a new run.

    `weights` is the directory that the model's weights come from; None: they are random. `tokenizer` is the directory
    whose tokenizer what is exported gets, None without any.
    """

    config: TrainingConfig
    directory: RunDirectory
    resume_step: int
    position: int
    weights: Path | None
    model: ModelConfig
    tokenizer: Path | None
    report: Report
    loader: Loader
    eval_loader: Loader | None
    data_notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError for a length that the run cannot have, for keep-best without evaluation, and for sinks
        that are not installed."""
        config, num_steps = self.config, self.num_steps
        check_sinks(config)
        if config.keep_best and self.eval_loader is None:
            raise ConfigError("keep-best needs rows to evaluate on; give eval-data, or leave keep-best out")
        if self.resume_step > num_steps:
            raise ConfigError(
                f"steps: the run in {self.directory.path} has {self.resume_step} updates behind it, and now it is to "
                f"have {num_steps} in all; give at least {self.resume_step}, or choose another --out or --name"
            )
        if warmup_updates(config.warmup, num_steps) >= max(num_steps, 1):
            raise ConfigError(
                f"warmup must be shorter than the run: warmup = {config.warmup:g} does not end within the {num_steps} "
                "updates; lower it, or set more steps or epochs"
            )

    @property
    def updates_per_epoch(self) -> int:
        return self.loader.updates_per_epoch(self.config.grad_accum)

    @property
    def num_steps(self) -> int:
        """Updates of the whole run."""
        c = self.config
        if c.steps is not None:
            return c.steps
        return self.resume_step + self.loader.updates_until(c.epochs or 0, self.position, c.grad_accum)

    @property
    def notes(self) -> list[str]:
        """What may be meant, but is seldom good."""
        longest, seq_len = self.model.max_position_embeddings, self.config.seq_len
        rows, ranks = self.loader.rows_per_epoch, self.config.dp
        batch = self.config.batch_size * ranks
        notes = [*self.data_notes]
        if seq_len > longest:
            notes.append(
                f"seq-len {seq_len:,} exceeds the {longest:,} positions of the model (max_position_embeddings)"
            )
        if rows < batch:
            fewer = -(-rows // ranks)
            faster = f"; --batch-size {fewer} is faster" if fewer < self.config.batch_size else ""
            notes.append(f"{batch - rows} of the {batch} rows of a micro-step are empty{faster}")
        return notes

    @cached_property
    def inputs(self) -> dict[str, str]:
        """What the run reads, by name: a checkpoint keeps it, and a resumed run must find the same."""
        c = self.config
        return {
            f"model {c.model}": weights_digest(self.weights) if self.weights else f"random, of seed {c.seed}",
            f"data {c.data}": self.loader.rows.digest(),
            f"evaluation data of {c.eval_data or c.data}": self.eval_loader.rows.digest()
            if self.eval_loader
            else "none",
        }

    def squared_lengths(self, row_ids: list[int]) -> int:
        """Sum of n^2 over the documents of these rows: what causal attention costs."""
        return sum(length**2 for row in row_ids for length in self.loader.rows.lengths(row))

    def where(self, row_ids: list[int]) -> str:
        """The places in the data of these rows, for a message."""
        places = [place for row in row_ids for place in self.loader.rows.where(row)]
        return ", ".join(places[:8]) + (f" and {len(places) - 8} more" if len(places) > 8 else "")

    def describe(self) -> list[str]:
        """The data and the number of updates in a few lines."""
        c, loader = self.config, self.loader
        passes = f"{self.num_steps / self.updates_per_epoch:.3g} epochs of {self.updates_per_epoch:,}"
        lines = [
            *(f"data: {line}" for line in self.report.summary()),
            f"data: {loader.rows.describe()} in {loader.rows_per_epoch:,} rows of {c.seq_len:,}, "
            f"{100 * loader.padding_share:.1f} % padding",
        ]
        if self.eval_loader is not None:
            rows = self.eval_loader.rows
            lines.append(f"evaluation: {rows.num_tokens:,} tokens in {len(rows):,} rows")
        per_update = c.batch_size * c.dp * c.grad_accum
        short = loader.rows_per_epoch % per_update
        last = f", {short} in the last of an epoch" if short else ""
        lines += [f"note: {note}" for note in self.notes]
        return [*lines, f"updates: {self.num_steps:,} ({passes}), {per_update} rows each{last}"]


def with_ranks(config: Config) -> Config:
    """`config` resolved for the ranks that there are. Raises ConfigError where there are too few."""
    ranks, _ = find_ranks(config.gpus, resolve_device(config.device))
    return dataclasses.replace(config, gpus=ranks).resolved()


def open_directory(config: TrainingConfig) -> tuple[RunDirectory, int, int]:
    """The run directory of `config`, the step from which the run goes on, and the loader's position there (0, 0: it is
    new). Raises ConfigError for a directory that it cannot have."""
    directory = RunDirectory(Path(config.out))
    if config.dry_run:
        return directory, 0, 0
    if leads():
        directory.check_free()
    step = directory.start_step(config)
    return directory, step, read_record(directory.checkpoints, step)[1].get("position", 0) if step else 0
