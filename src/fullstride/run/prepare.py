"""From finetune's configuration to a job: model, tokenizer, rows. Nothing is written here but the cache of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from fullstride.config.training import FinetuneConfig
from fullstride.data.cache import open_cache
from fullstride.data.chat import Encoder, Truncate
from fullstride.data.encode import SourceEncoder, report_repeated, scan_all
from fullstride.data.examples import Examples, check_ids
from fullstride.data.loader import Loader
from fullstride.data.packing import PackedRows
from fullstride.data.render import Supervise, Thinking
from fullstride.data.report import Report
from fullstride.data.sources import Part, absolute, eval_parts, stem, train_parts
from fullstride.errors import ConfigError, DataError
from fullstride.model.spec import ModelConfig
from fullstride.run.job import Job, open_directory, with_ranks
from fullstride.run.progress import Meter
from fullstride.run.source import find_model, load_tokenizer, padding_id

THINKING_NOTES = {
    "auto": "answers without thoughts are prompted as with enable_thinking=false (thinking = auto): use the model so",
    "on": "answers are prompted as with enable_thinking=true (thinking = on): use the model so",
    "off": "answers are prompted as with enable_thinking=false (thinking = off): use the model so",
}


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
    report, notes = Report(), list[str]()
    encoder = Encoder(
        tokenizer,
        config.seq_len,
        report,
        cast(Truncate, config.truncate),
        cast(Supervise, config.train_on),
        cast(Thinking, config.thinking),
    )
    if "enable_thinking" in str(tokenizer.chat_template):
        notes.append(THINKING_NOTES[config.thinking])
    train, evaluation = _examples(config, encoder, notes)

    def loader(examples: Examples) -> Loader:
        check_ids(examples, model.vocab_size)
        rows = PackedRows(examples, config.seq_len, config.packing)
        return Loader(rows, config.batch_size * config.dp, config.seed, padding_id(tokenizer))

    return Job(
        config=config,
        directory=directory,
        resume_step=resume_step,
        position=position,
        weights=model_path,
        model=model,
        tokenizer=model_path,
        report=report,
        loader=loader(train),
        eval_loader=None if evaluation is None else loader(evaluation),
        data_notes=tuple(notes),
    )


def _examples(config: FinetuneConfig, encoder: Encoder, notes: list[str]) -> tuple[Examples, Examples | None]:
    """The documents to train and to evaluate on; what is worth a note is added to `notes`."""
    train, evaluation = train_parts(config.data), eval_parts(config.data, config.eval_data or None)
    scans = scan_all([*train, *(evaluation or [])])
    cache = open_cache(config.cache_dir, notes)
    with Meter("tokenise", sum(scan.count for scan in scans.values()), unit="rows") as meter:
        sources = SourceEncoder(encoder, cache, meter.advance)

        def encoded(parts: Sequence[Part], source: str) -> Examples:
            try:
                examples, weighed = sources.examples(parts, scans, config.seed)
            except DataError as error:
                raise DataError(f"{source}: {error}") from None
            notes.extend(weighed)
            return examples

        examples = encoded(train, f"data={config.data}")
        report_repeated(examples.whole, encoder.report)
        if evaluation is None:
            return examples, None
        named = f"eval-data={config.eval_data}" if config.eval_data else f"evaluation rows of data={config.data}"
        eval_examples = encoded(evaluation, named)
        report_repeated(eval_examples, encoder.report, known=examples)
        return examples, eval_examples


def _with_paths(config: FinetuneConfig, model_path: Path) -> FinetuneConfig:
    """`config` with absolute paths, so that its run.toml can be run from anywhere, and with out and name decided."""
    local = Path(config.model).is_dir() or config.model.startswith("~")  # else it is an id of the Hub, and stays that
    named = Path(config.out).name if config.out else f"{Path(config.model).resolve().name}-{stem(config.data)}"
    name = config.name or named
    return dataclasses.replace(
        config,
        model=str(model_path) if local else config.model,
        data=absolute(config.data, "data"),
        eval_data=config.eval_data and absolute(config.eval_data, "eval-data"),
        adapter=config.adapter and str(Path(config.adapter).resolve()),
        name=name,
        out=str(Path(config.out or Path("runs") / name).resolve()),
    )
