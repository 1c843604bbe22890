"""From finetune's configuration to a job: model, tokenizer, rows. Nothing is written here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.config.training import FinetuneConfig
from fullstride.data.chat import Example, check_ids, encode_rows, show
from fullstride.data.loader import Loader
from fullstride.data.packing import PackedRows
from fullstride.data.report import Report
from fullstride.data.rows import Row
from fullstride.data.sources import load_eval, load_train, source_paths
from fullstride.errors import ConfigError, DataError
from fullstride.model.spec import ModelConfig
from fullstride.run.job import Job, open_directory, with_ranks
from fullstride.run.source import find_model, load_tokenizer, padding_id


def prepare(config: FinetuneConfig) -> Job:
    """Resolve `config` and read model configuration, tokenizer and data.

    Raises ConfigError, UsageError or DataError for whatever can be refused without the weights.
    """
    config = with_ranks(config)
    model_path = find_model(config.model)
    model = ModelConfig.from_pretrained(model_path)
    config = _with_paths(config, model_path)
    directory, resume_step, position = open_directory(config)
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
        rows = PackedRows(examples, config.seq_len, config.packing)
        return Loader(rows, config.batch_size * config.dp, config.seed, padding_id(tokenizer))

    examples = encoded(load_train(config.data, report), f"data={config.data}")
    eval_rows = load_eval(config.data, config.eval_data or None, report)
    evaluated = f"eval-data={config.eval_data}" if config.eval_data else f"evaluation rows of data={config.data}"
    eval_examples = None if eval_rows is None else encoded(eval_rows, evaluated)
    return Job(
        config=config,
        directory=directory,
        resume_step=resume_step,
        position=position,
        weights=model_path,
        model=model,
        tokenizer=model_path,
        report=report,
        loader=loader(examples),
        eval_loader=None if eval_examples is None else loader(eval_examples),
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
    rows = job.loader.rows
    assert isinstance(rows, PackedRows)
    assert job.tokenizer is not None
    first, tokenizer = rows.of(0), load_tokenizer(job.tokenizer)
    tokens = int(np.sum(rows.lengths(0)))
    return [
        f"first row: {len(first)} documents, {tokens} tokens; «supervised»",
        *(show(example, tokenizer) for example in first),
    ]
