"""From a configuration to everything a run needs but its weights. Nothing is written here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.config import FinetuneConfig, resolve_device
from fullstride.data.chat import Example, check_ids, encode_rows, show
from fullstride.data.loader import Loader
from fullstride.data.report import Report
from fullstride.data.rows import Row
from fullstride.data.sources import load_eval, load_train, source_paths
from fullstride.engine.checkpoint import read_record
from fullstride.engine.lr import warmup_updates
from fullstride.errors import ConfigError, DataError
from fullstride.model.spec import ModelConfig
from fullstride.run.directory import RunDirectory
from fullstride.run.inputs import data_digest, weights_digest
from fullstride.run.source import find_model, load_tokenizer, padding_id
from fullstride.trainer.ranks import find_ranks, leads


@dataclass(frozen=True)
class Job:
    """A run that may start: `config` is resolved, `resume_step` and the loader's `position` are 0 for a new run."""

    config: FinetuneConfig
    directory: RunDirectory
    resume_step: int
    position: int
    model_path: Path
    model: ModelConfig
    tokenizer: Any
    report: Report
    examples: list[Example]
    loader: Loader
    eval_examples: list[Example] | None
    eval_loader: Loader | None

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
        notes = []
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
        c, evaluated = self.config, "none"
        if self.eval_examples is not None and self.eval_loader is not None:
            evaluated = data_digest(self.eval_examples, self.eval_loader)
        return {
            f"model {c.model}": weights_digest(self.model_path),
            f"data {c.data}": data_digest(self.examples, self.loader),
            f"evaluation data of {c.eval_data or c.data}": evaluated,
        }

    def squared_lengths(self, row_ids: list[int]) -> int:
        """Sum of n^2 over the documents of these rows: what causal attention costs."""
        return sum(len(self.examples[i].ids) ** 2 for row in row_ids for i in self.loader.rows[row])

    def where(self, row_ids: list[int]) -> str:
        """The data lines in these rows, for a message."""
        lines = [f"{self.examples[i].file} line {self.examples[i].line}" for r in row_ids for i in self.loader.rows[r]]
        return ", ".join(lines[:8]) + (f" and {len(lines) - 8} more" if len(lines) > 8 else "")

    def describe(self) -> list[str]:
        """The data and the number of updates in a few lines."""
        c, loader = self.config, self.loader
        passes = f"{self.num_steps / self.updates_per_epoch:.3g} epochs of {self.updates_per_epoch:,}"
        supervised = sum(int(e.supervised.sum()) for e in self.examples)
        lines = [
            *(f"data: {line}" for line in self.report.summary()),
            f"data: {len(self.examples):,} documents, {loader.num_tokens:,} tokens ({supervised:,} supervised) in "
            f"{loader.rows_per_epoch:,} rows of {c.seq_len:,}, {100 * loader.padding_share:.1f} % padding",
        ]
        if self.eval_loader is not None:
            held_out = self.eval_loader
            lines.append(f"evaluation: {held_out.num_tokens:,} tokens in {held_out.rows_per_epoch:,} rows")
        per_update = c.batch_size * c.dp * c.grad_accum
        short = loader.rows_per_epoch % per_update
        last = f", {short} in the last of an epoch" if short else ""
        lines += [f"note: {note}" for note in self.notes]
        return [*lines, f"updates: {self.num_steps:,} ({passes}), {per_update} rows each{last}"]


def prepare(config: FinetuneConfig) -> Job:
    """Resolve `config` and read model configuration, tokenizer and data.

    Raises ConfigError, UsageError or DataError for whatever can be refused without the weights.
    """
    ranks, _ = find_ranks(config.gpus, resolve_device(config.device))
    config = dataclasses.replace(config, gpus=ranks).resolved()
    model_path = find_model(config.model)
    model = ModelConfig.from_pretrained(model_path)
    config = _with_paths(config, model_path)
    directory = RunDirectory(Path(config.out))
    resume_step = 0
    if not config.dry_run:
        if leads():
            directory.check_free()
        resume_step = directory.start_step(config)
    position = read_record(directory.checkpoints, resume_step)[1].get("position", 0) if resume_step else 0
    # a checkpoint holds the adapter already
    if config.adapter and not resume_step and not (Path(config.adapter) / "adapter_config.json").is_file():
        raise ConfigError(f"adapter: no adapter_config.json in {config.adapter}; give a PEFT directory")
    tokenizer = load_tokenizer(model_path, model)

    report = Report()
    how: dict[str, Any] = {"truncate": config.truncate, "supervise": config.train_on}

    def encoded(rows: list[Row], source: str) -> list[Example]:
        try:
            examples = encode_rows(rows, tokenizer, config.seq_len, report, **how)
        except DataError as error:
            raise DataError(f"{source}: {error}") from None
        check_ids(examples, model.vocab_size)
        return examples

    def loader(examples: list[Example]) -> Loader:
        pad_id = padding_id(tokenizer)
        rows = config.batch_size * config.dp
        return Loader(examples, config.seq_len, rows, config.packing, config.seed, pad_id)

    examples = encoded(load_train(config.data, report), f"data={config.data}")
    eval_rows = load_eval(config.data, config.eval_data or None, report)
    evaluated = f"eval-data={config.eval_data}" if config.eval_data else f"evaluation rows of data={config.data}"
    eval_examples = None if eval_rows is None else encoded(eval_rows, evaluated)
    job = Job(
        config=config,
        directory=directory,
        resume_step=resume_step,
        position=position,
        model_path=model_path,
        model=model,
        tokenizer=tokenizer,
        report=report,
        examples=examples,
        loader=loader(examples),
        eval_examples=eval_examples,
        eval_loader=None if eval_examples is None else loader(eval_examples),
    )
    _check_length(job)
    return job


def _check_length(job: Job) -> None:
    config, num_steps = job.config, job.num_steps
    if job.resume_step > num_steps:
        raise ConfigError(
            f"steps: the run in {job.directory.path} has {job.resume_step} updates behind it, and now it is to have "
            f"{num_steps} in all; give at least {job.resume_step}, or choose another --out or --name"
        )
    if warmup_updates(config.warmup, num_steps) >= max(num_steps, 1):
        raise ConfigError(
            f"warmup must be shorter than the run: warmup = {config.warmup:g} does not end within the {num_steps} "
            "updates; lower it, or set more steps or epochs"
        )


def _with_paths(config: FinetuneConfig, model_path: Path) -> FinetuneConfig:
    """`config` with absolute paths, so that its run.toml can be run from anywhere, and with out and name decided."""

    def absolute(key: str, source: str) -> str:
        return ",".join(str(path.resolve()) for path in source_paths(source, key)) or source

    local = Path(config.model).is_dir() or config.model.startswith("~")  # else it is an id of the Hub, and stays that
    first = next(iter(source_paths(config.data)), Path(config.data))
    name = config.name or (Path(config.out).name if config.out else f"{Path(config.model).resolve().name}-{first.stem}")
    return dataclasses.replace(
        config,
        model=str(model_path) if local else config.model,
        data=absolute("data", config.data),
        eval_data=config.eval_data and absolute("eval-data", config.eval_data),
        adapter=config.adapter and str(Path(config.adapter).resolve()),
        name=name,
        out=str(Path(config.out or Path("runs") / name).resolve()),
    )


def preview(job: Job) -> list[str]:
    """One row of the data decoded, its supervised parts marked."""
    row = job.loader.rows[0]
    texts = [show(job.examples[i], job.tokenizer) for i in row]
    tokens = int(np.sum([len(job.examples[i].ids) for i in row]))
    return [f"first row: {len(row)} documents, {tokens} tokens; «supervised»", *texts]
