"""Weights in and out of an engine: Hugging Face directories, PEFT adapters, and a start from scratch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fullstride.engine.step import Engine
from fullstride.errors import ConfigError
from fullstride.files import save_tensors, whole_directory, write_json
from fullstride.model.hf import (
    TOKENIZER_FILES,
    Checkpoint,
    check_tensors,
    check_written,
    compare_tensors,
    copy_files,
    extremes,
    write_model,
)
from fullstride.model.lora import LoraSettings, peft_config, read_peft_config
from fullstride.model.spec import ModelConfig, Part, Unit
from fullstride.parallel.comm import Communicator
from fullstride.parallel.weights import Views

ADAPTER_WEIGHTS = "adapter_model.safetensors"


def import_weights(engine: Engine, path: str | Path) -> None:
    """Copy a Hugging Face directory's weights in, one tensor at a time.

    Raises ConfigError, before any weight is read, when configuration or tensors do not fit the engine's.
    """
    state = engine.state
    with engine.comm.agreed():
        found = ModelConfig.from_pretrained(path)
        differences = _differences(found, engine.config)
        if differences:
            raise ConfigError(f"{path}: another model than the trainer's: {differences}")
        checkpoint = Checkpoint(path)
        check_tensors(checkpoint, state.base_table, engine.config.tie_word_embeddings)
    with engine.comm.committed():
        for unit in state.base:
            with state.open_share(unit) as views:
                for name, share in state.splits[unit.name].shares(engine.mesh.tp.rank):
                    views[name][share.own].copy_(checkpoint.get(share.hf_name, share.part))
        engine.params_written(state.base)


def _differences(a: ModelConfig, b: ModelConfig) -> str:
    harmless = ("extra", "initializer_range", "max_position_embeddings")  # they say nothing about the tensors
    names = [n for n in vars(a) if n not in harmless and getattr(a, n) != getattr(b, n)]
    return ", ".join(f"{n} {getattr(a, n)} instead of {getattr(b, n)}" for n in names)


def export_model(
    engine: Engine, directory: str | Path, dtype: torch.dtype, source: Path | None, overwrite: bool
) -> None:
    """Write a Hugging Face directory as `dtype`, from the masters where there are any; tokenizer and generation
    settings come from `source`, if given. A collective: the first rank writes, the others hand over their parts."""
    state, units = engine.state, {unit.name: unit for unit in engine.state.base_table}
    with _in_turn(engine.comm, list(units), lambda name: _values(engine, units[name])) as values:
        if engine.comm.rank:
            return

        def rows(unit: str, name: str, part: Part) -> torch.Tensor:
            return values(unit)[name][part.start : part.stop]

        tensors = (
            (
                part.hf_name,
                (part.stop - part.start, *spec.shape[1:]),
                state.values_dtype(unit),
                partial(rows, unit.name, spec.name, part),
            )
            for unit in state.base_table
            for spec in unit.tensors
            for part in spec.parts
        )
        write_model(directory, engine.config, tensors, dtype=dtype, tokenizer_from=source, overwrite=overwrite)


@contextmanager
def _in_turn(
    comm: Communicator, units: Sequence[str], bring: Callable[[str], Views]
) -> Iterator[Callable[[str], Views]]:
    """For the first rank, which writes files: calls of `bring`, a collective, for `units` in their order.

    The other ranks ask for nothing, and take part at the end. The first one's rest is brought there too, also when
    files cannot be written, so that nobody waits in vain.
    """
    left, brought = list(units), {}

    def get(unit: str) -> Views:
        comm.check()  # a model is many seconds of writing
        if unit not in brought:
            assert unit == left.pop(0), "files are written in the order of units"
            brought.clear()
            brought[unit] = bring(unit)
        return brought[unit]

    try:
        yield get
    except (ConfigError, OSError):
        for unit in list(left):
            get(unit)
        raise
    for unit in list(left):
        get(unit)


def init_weights(engine: Engine, seed: int) -> None:
    """Matrices from N(0, initializer_range), norms 1, biases 0. Every tensor has a generator of its own, keyed by
    (seed, its place in the table), so the values do not depend on what else is drawn."""
    state = engine.state
    for i, unit in enumerate(state.base_table):
        if unit not in state.base:
            continue
        with state.open(unit) as views:
            for j, spec in enumerate(unit.tensors):
                if spec.decay:
                    generator = _generator(engine.device, seed, i, j)
                    _normal(views[spec.name], engine.config.initializer_range, generator)
                else:
                    views[spec.name].fill_(0.0 if spec.name.endswith("bias") else 1.0)
    engine.params_written(state.base)


def _normal(out: torch.Tensor, deviation: float, generator: torch.Generator) -> None:
    """Overwrites `out` with the same numbers for any strides."""
    if out.is_contiguous():
        out.normal_(0.0, deviation, generator=generator)
        return
    packed = torch.empty_like(out, memory_format=torch.contiguous_format)
    out.copy_(packed.normal_(0.0, deviation, generator=generator))


def init_adapters(engine: Engine, seed: int) -> None:
    """A uniform in +-1/sqrt(inputs) (PEFT's kaiming_uniform with a = sqrt(5)), B zero: the model starts unchanged."""
    state = engine.state
    for i, unit in enumerate(state.adapter_table):
        if unit not in state.adapters:
            continue
        with state.open(unit) as views:
            for j, spec in enumerate(unit.tensors):
                if spec.name.endswith(".a"):
                    bound = 1 / math.sqrt(spec.shape[1])
                    generator = _generator(engine.device, seed, len(state.base_table) + i, j)
                    views[spec.name].uniform_(-bound, bound, generator=generator)
                else:
                    views[spec.name].zero_()
    engine.params_written(state.adapters)


def _generator(device: torch.device, seed: int, unit: int, tensor: int) -> torch.Generator:
    key = np.random.SeedSequence((seed, unit, tensor)).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(key) >> 1)


def _values(engine: Engine, unit: Unit) -> Views:
    """Copies on the host of a unit's tensors, from the masters where there are any: they know more digits; on the first
    rank, wherever they live, on others perhaps nothing. A collective."""
    mesh, holder = engine.mesh, engine.holder(unit.name)
    views = engine.state.values(unit) if mesh.pp.rank == holder else {}
    if holder and not (mesh.dp.rank or mesh.tp.rank):
        dtype = engine.state.values_dtype(unit)
        for spec in unit.tensors:
            views.setdefault(spec.name, torch.empty(spec.shape, dtype=dtype))
            mesh.pp.hand_out(views[spec.name], holder)
    return views


def named_rows(unit: Unit, views: Views) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in files, rows of our tensor)."""
    for spec in unit.tensors:
        for part in spec.parts:
            yield part.hf_name, views[spec.name][part.start : part.stop]


def export_adapter(engine: Engine, directory: str | Path, source: Path | None, overwrite: bool) -> None:
    """Write the adapters as a PEFT directory (adapter_config.json, adapter_model.safetensors), whole or not at all.

    `source` is the base model's directory, if it came from one: it is named, and its tokenizer is copied. A collective:
    the first rank writes, and reads back what it wrote. Raises ConfigError, which names the tensor, for an adapter that
    is infinite or NaN, or still empty after it was trained.
    """
    if engine.lora is None:
        raise ConfigError("there is no adapter to export: the trainer has method = full; use export_model")
    tensors: dict[str, torch.Tensor] = {}
    for unit in engine.state.adapter_table:
        if views := _values(engine, unit):
            tensors |= {name: rows.contiguous() for name, rows in named_rows(unit, views)}
    if engine.comm.rank:
        return
    trained_for = engine.updates if engine.trained else 0
    write_adapter(directory, engine.lora, engine.state.adapter_table, tensors, source, overwrite, trained_for)


def write_adapter(
    directory: str | Path,
    lora: LoraSettings,
    table: tuple[Unit, ...],
    tensors: dict[str, torch.Tensor],
    source: Path | None,
    overwrite: bool,
    updates: int,
) -> None:
    """Write the tensors of an adapter `table`, by their names in files, as export_adapter says. updates: those that
    have trained them."""
    with whole_directory(Path(directory), overwrite) as new:
        save_tensors(tensors, new / ADAPTER_WEIGHTS, {"format": "pt"})
        written = {name: extremes(values) for name, values in tensors.items()}
        check_written(Checkpoint(new, ADAPTER_WEIGHTS), table, written)
        if empty := [name for name, (least, most) in written.items() if updates and least == most == 0]:
            raise ConfigError(
                f"every adapter must have been trained; {len(empty)} are zero after {updates} updates, "
                f"the first is {empty[0]}; leave its projection out of lora-targets if it gets no gradient"
            )
        write_json(new / "adapter_config.json", peft_config(lora, None if source is None else str(source)))
        copy_files(source, new, TOKENIZER_FILES)


def import_adapter(engine: Engine, directory: str | Path) -> None:
    """Copy a PEFT directory's adapters in. Raises ConfigError when its settings or tensors are not the trainer's."""
    with engine.comm.agreed():
        found = read_peft_config(directory)
        if engine.lora is None:
            raise ConfigError(f"{directory} is an adapter, but the trainer has method = full; set method = lora")
        # dropout belongs to training, not to the adapter: it may differ
        names = [n for n in ("rank", "alpha", "targets", "rslora") if getattr(found, n) != getattr(engine.lora, n)]
        if names:
            told = ", ".join(f"{n} {getattr(found, n)} instead of {getattr(engine.lora, n)}" for n in names)
            raise ConfigError(f"{directory}: another adapter than the trainer's: {told}")
        checkpoint = Checkpoint(directory, ADAPTER_WEIGHTS)
        shapes = {name: checkpoint.shape(name) for name in checkpoint.names}
        compare_tensors(shapes, engine.state.adapter_table, str(directory))
    with engine.comm.committed():
        for unit in engine.state.adapters:
            with engine.state.open_values(unit) as views:
                for name, rows in named_rows(unit, views):
                    rows.copy_(checkpoint.get(name))
        engine.values_written()
