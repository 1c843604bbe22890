"""Pre-training and continued training: token files -> rows -> a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fullstride.config.keys import build
from fullstride.config.training import TrainConfig
from fullstride.data.loader import Loader
from fullstride.data.report import Report
from fullstride.data.token_rows import TokenRows
from fullstride.data.tokens import Origin, TokenFile, vocabulary_hash
from fullstride.errors import ConfigError, DataError
from fullstride.model.presets import PRESETS, preset
from fullstride.model.spec import ModelConfig
from fullstride.run.job import Job, open_directory, with_ranks
from fullstride.run.source import find_model, has_tokenizer, load_tokenizer
from fullstride.run.tokenize import input_files
from fullstride.run.training import RunResult, run_prepared


def train(**keys: Any) -> RunResult:
    """Train as `fullstride train --key value ...` does; keys as keyword arguments, with underscores.

    Raises ConfigError (with its kinds UsageError and DataError) for what cannot be run, KeyboardInterrupt when stopped
    by a signal (the state is saved).
    """
    return run_train(build(TrainConfig, keys))


def run_train(config: TrainConfig) -> RunResult:
    """See `train`."""
    return run_prepared(lambda: prepare(config))


def prepare(config: TrainConfig) -> Job:
    """Resolve `config` and open model configuration and token files.

    Raises ConfigError, UsageError or DataError for whatever can be refused without the weights.
    """
    config = with_ranks(config)
    path, model = _model(config)
    files = [TokenFile(file) for file in input_files(config.data)]
    eval_files = [TokenFile(file) for file in input_files(config.eval_data, "eval-data")] if config.eval_data else []
    config = _with_paths(config, path, files, eval_files)
    directory, resume_step, position = open_directory(config)
    tokenizer = _tokenizer(config, path, files[0].origin)
    _check_vocabulary([*files, *eval_files], model, tokenizer)

    rows, held_out = TokenRows(files, config.seq_len, config.packing), None
    if len(rows) < 1 + (config.eval_fraction > 0):
        raise DataError(f"data={config.data}: no row to train on; give longer files, or lower seq-len")
    if config.eval_fraction:
        rows, held_out = rows.split(config.eval_fraction, config.seed)
        if not len(rows):
            raise DataError(f"eval-fraction = {config.eval_fraction} leaves no row to train on; lower it, or seq-len")
    if eval_files:
        held_out = TokenRows(eval_files, config.seq_len, config.packing)
        if not len(held_out):
            raise DataError(f"eval-data={config.eval_data} has no row to evaluate on; give longer files")

    def loader(rows: TokenRows) -> Loader:
        return Loader(rows, config.batch_size * config.dp, config.seed, pad_id=0)

    return Job(
        config=config,
        directory=directory,
        resume_step=resume_step,
        position=position,
        weights=path if config.init == "pretrained" else None,
        model=model,
        tokenizer=tokenizer,
        report=Report(),
        loader=loader(rows),
        eval_loader=None if held_out is None else loader(held_out),
    )


def _model(config: TrainConfig) -> tuple[Path | None, ModelConfig]:
    """Where the model's files are (None: it is a built-in name or a config.json), and its sizes."""
    if config.init == "scratch":
        if config.model in PRESETS and not Path(config.model).exists():
            return None, preset(config.model)
        if Path(config.model).is_file():
            return None, ModelConfig.from_pretrained(config.model)
    elif config.model in PRESETS and not Path(config.model).exists():
        raise ConfigError(
            f"model: {config.model} is a built-in name, which stands for sizes and no weights; set init = scratch, or "
            "give the directory or Hub id of a model"
        )
    path = find_model(config.model)
    return path, ModelConfig.from_pretrained(path)


def _tokenizer(config: TrainConfig, path: Path | None, origin: Origin) -> Path | None:
    """The directory whose tokenizer the trained model gets, None without any."""
    if config.tokenizer:
        return find_model(config.tokenizer)
    made_with = Path(origin.tokenizer)
    return next((place for place in (path, made_with) if place is not None and has_tokenizer(place)), None)


def _check_vocabulary(files: list[TokenFile], model: ModelConfig, tokenizer: Path | None) -> None:
    """Raise ConfigError where ids of `files` do not mean what they mean to the model."""
    first = files[0]
    for file in files:
        if file.origin.tokenizer_hash != first.origin.tokenizer_hash:
            raise ConfigError(
                f"{file.path} was made with the tokenizer of {file.origin.tokenizer}, and {first.path} with another, "
                f"that of {first.origin.tokenizer}; make both with the model's (fullstride tokenize)"
            )
    if first.origin.vocab_size > model.vocab_size:
        raise ConfigError(
            f"{first.path} was made with a vocabulary of {first.origin.vocab_size}, but the model has "
            f"{model.vocab_size} embedding rows; make it again with the model's tokenizer (fullstride tokenize)"
        )
    if tokenizer is not None:
        found = vocabulary_hash(load_tokenizer(tokenizer).get_vocab())
        if found != first.origin.tokenizer_hash:
            raise ConfigError(
                f"{first.path} was made with the tokenizer of {first.origin.tokenizer}, whose vocabulary is not that "
                f"of {tokenizer}; make it again with this one (fullstride tokenize --model {tokenizer})"
            )


def _with_paths(
    config: TrainConfig, path: Path | None, files: list[TokenFile], eval_files: list[TokenFile]
) -> TrainConfig:
    """`config` with absolute paths, so that its run.toml can be run from anywhere, and with out and name decided."""

    def absolute(name: str) -> str:
        return str(Path(name).expanduser().resolve()) if name and Path(name).expanduser().exists() else name

    stem = Path(config.model).stem if path is None else path.name
    name = config.name or (Path(config.out).name if config.out else f"{stem}-{files[0].path.stem}")
    return dataclasses.replace(
        config,
        model=absolute(config.model),
        data=",".join(str(file.path) for file in files),
        eval_data=",".join(str(file.path) for file in eval_files),
        tokenizer=absolute(config.tokenizer),
        adapter=absolute(config.adapter),
        name=name,
        out=str(Path(config.out or Path("runs") / name).resolve()),
    )
