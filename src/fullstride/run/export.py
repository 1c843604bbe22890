"""A checkpoint -> a Hugging Face directory or a PEFT adapter: on the CPU, whatever split wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fullstride.config.commands import ExportConfig
from fullstride.config.keys import build, read_toml
from fullstride.engine.checkpoint import find_checkpoint, read_record
from fullstride.engine.parts_io import SavedParts
from fullstride.engine.saved_unit import SavedUnit
from fullstride.engine.weights_io import named_rows, write_adapter
from fullstride.errors import ConfigError
from fullstride.model.hf import Source, write_model
from fullstride.model.lora import LoraSettings, adapter_unit
from fullstride.model.spec import Llama3Rope, ModelConfig, Part, TensorSpec, parameter_table
from fullstride.run.source import find_model
from fullstride.trainer.setting import DTYPES


def export(**keys: Any) -> Path:
    """Export as `fullstride export --key value ...` does; keys as keyword arguments, with underscores. Returns `out`.

    Raises ConfigError (with its kind UsageError) for what cannot be exported.
    """
    return run_export(build(ExportConfig, keys))


def run_export(config: ExportConfig) -> Path:
    """See `export`. One block is in memory at a time; the directory appears whole."""
    run, out = Path(config.run), Path(config.out)
    checkpoints = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    folder = find_checkpoint(checkpoints, config.step)
    record = read_record(checkpoints, config.step)[0]
    source, model = _base(config, run, record)
    saved = SavedParts(folder, record["files"])
    if record["lora"] is None:
        units, trained = {u.name: SavedUnit(saved, u) for u in parameter_table(model)}, record["precision"]["param"]
        dtype = DTYPES[config.export_dtype] if config.export_dtype else getattr(torch, trained.removeprefix("torch."))
        write_model(out, model, _sources(units), dtype=dtype, tokenizer_from=source)
        return out
    if config.export_dtype:
        raise ConfigError(
            f"export-dtype concerns full models, {folder} holds an adapter; leave it out, or merge it after"
        )
    lora = LoraSettings(**record["lora"] | {"targets": tuple(record["lora"]["targets"])})
    table = tuple(adapter_unit(model, lora, layer) for layer in range(model.num_hidden_layers))
    tensors = {
        name: rows.contiguous() for unit in table for name, rows in named_rows(unit, SavedUnit(saved, unit).views())
    }
    write_adapter(out, lora, table, tensors, source, overwrite=False, updates=record["step"])
    return out


def _base(config: ExportConfig, run: Path, record: dict[str, Any]) -> tuple[Path | None, ModelConfig]:
    """Where tokenizer and configuration come from (None: nowhere), and the sizes of the model in the checkpoint."""
    raw = dict(record["model"])
    if raw.get("rope_scaling"):
        raw["rope_scaling"] = Llama3Rope(**raw["rope_scaling"])
    sizes = ModelConfig(**raw)
    name = config.model or _model_of(run)
    if not name:
        return None, sizes
    source = find_model(name)
    if not (source / "config.json").is_file():  # a tokenizer's directory
        return source, sizes
    found = ModelConfig.from_pretrained(source)
    differ = [k for k in raw if getattr(found, k) != getattr(sizes, k)]
    if differ:
        told = ", ".join(f"{k} {getattr(sizes, k)} instead of {getattr(found, k)}" for k in differ)
        raise ConfigError(f"the checkpoint is of another model than {source}: {told}; give the right --model")
    return source, found


def _model_of(run: Path) -> str:
    """The directory or id whose tokenizer the run's model has, as its run.toml tells; "" where nothing does."""
    file = next((f for f in (run / "run.toml", run.parent / "run.toml") if f.is_file()), None)
    if file is None:
        return ""
    keys = read_toml(file)
    exported = [file.parent / name for name in ("model", "adapter") if (file.parent / name / "config.json").is_file()]
    names = [keys.get("tokenizer") or "", *map(str, exported), keys.get("model") or ""]
    return next((name for name in names if name and (Path(name).is_dir() or "/" in name)), "")


def _sources(units: dict[str, SavedUnit]) -> Iterator[Source]:
    held: dict[str, dict[str, torch.Tensor]] = {}  # the unit that was read last

    def rows(saved: SavedUnit, spec: TensorSpec, part: Part) -> torch.Tensor:
        if saved.unit.name not in held:
            held.clear()
            held[saved.unit.name] = saved.views()
        return held[saved.unit.name][spec.name][part.start : part.stop]

    for saved in units.values():
        dtype = saved.dtype
        for spec in saved.unit.tensors:
            for part in spec.parts:
                shape = (part.stop - part.start, *spec.shape[1:])
                yield part.hf_name, shape, dtype, partial(rows, saved, spec, part)
