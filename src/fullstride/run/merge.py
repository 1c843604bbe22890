"""A base model and its adapter -> one model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fullstride.config.commands import MergeConfig
from fullstride.config.keys import build
from fullstride.engine.weights_io import ADAPTER_WEIGHTS
from fullstride.errors import ConfigError
from fullstride.model.hf import STORED_AS, Checkpoint, Source, check_tensors, compare_tensors, write_model
from fullstride.model.lora import LoraSettings, adapter_unit, read_peft_config
from fullstride.model.spec import ModelConfig, Unit, parameter_table
from fullstride.run.source import find_model
from fullstride.trainer.setting import DTYPES

STORED = {name: dtype for dtype, name in STORED_AS.items()}


def merge(**keys: Any) -> Path:
    """Merge as `fullstride merge --key value ...` does; keys as keyword arguments, with underscores. Returns `out`.

    Raises ConfigError (with its kind UsageError) for what does not belong together.
    """
    return run_merge(build(MergeConfig, keys))


def run_merge(config: MergeConfig) -> Path:
    """See `merge`. One tensor is in memory at a time; the directory appears whole."""
    path, adapter, out = find_model(config.model), Path(config.adapter), Path(config.out)
    model, lora = ModelConfig.from_pretrained(path), read_peft_config(adapter)
    table = parameter_table(model)
    base, adapters = Checkpoint(path), Checkpoint(adapter, ADAPTER_WEIGHTS)
    check_tensors(base, table, model.tie_word_embeddings)
    expected = tuple(adapter_unit(model, lora, layer) for layer in range(model.num_hidden_layers))
    try:
        compare_tensors({name: adapters.shape(name) for name in adapters.names}, expected, str(adapter))
    except ConfigError as error:
        raise ConfigError(f"{error}; is it an adapter of {config.model}?") from None
    dtype = DTYPES[config.dtype] if config.dtype else _widest(base)
    write_model(out, model, _sources(table, lora, base, adapters), dtype=dtype, tokenizer_from=path)
    return out


def _widest(base: Checkpoint) -> torch.dtype:
    """The precision of the base's weights; of float16, which we do not write, float32."""
    return torch.bfloat16 if all(base.dtype(name) == "BF16" for name in base.names) else torch.float32


def _sources(table: tuple[Unit, ...], lora: LoraSettings, base: Checkpoint, adapters: Checkpoint) -> Iterator[Source]:
    for unit in table:
        for spec in unit.tensors:
            for part in spec.parts:
                name, shape = part.hf_name, (part.stop - part.start, *spec.shape[1:])
                stem = "base_model.model." + name.removesuffix(".weight")
                if f"{stem}.lora_A.weight" in adapters.names:
                    yield name, shape, torch.float32, partial(merged, base, adapters, name, stem, lora.scale)
                else:
                    yield name, shape, STORED[base.dtype(name)], partial(base.get, name)


def merged(base: Checkpoint, adapters: Checkpoint, name: str, stem: str, scale: float) -> torch.Tensor:
    """W + scale * B A in float32: rounded once, when it is written."""
    a, b = (adapters.get(f"{stem}.lora_{which}.weight").float() for which in "AB")
    return torch.addmm(base.get(name).float(), b, a, alpha=scale)
