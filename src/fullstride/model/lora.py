"""LoRA settings, the adapters' parameter table, and PEFT's directory format.

Hu et al. 2021 (arXiv 2106.09685): y += scale * dropout(x) A^T B^T with scale = alpha / R, or alpha / sqrt(R) with
rslora (Kalajdzievski 2023, arXiv 2312.03732). A starts as PEFT's does, uniform in +-1/sqrt(inputs); B starts at zero.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullstride.errors import ConfigError
from fullstride.model.linear import Adapter, AdapterB
from fullstride.model.spec import ModelConfig, Part, TensorSpec, Unit, block_unit
from fullstride.model.tensor_parallel import ALONE, TensorParallel
from fullstride.ops.rounding import DROPOUT, stream

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# our (merged) linear -> the projections in it
LINEARS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


@dataclass(frozen=True)
class LoraSettings:
    """Rank R, alpha, dropout probability of x, the adapted projections, and rank-stabilised scaling."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    rslora: bool

    @property
    def scale(self) -> float:
        """What dropout(x) A^T B^T is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def adapted(self, linear: str) -> tuple[str, ...]:
        """The adapted projections of one of our linears."""
        return tuple(p for p in LINEARS[linear] if p in self.targets)

    @property
    def lowest(self) -> str:
        """The linear nearest to the block's input that has an adapter: the lowest block's backward ends there."""
        return next(name for name in LINEARS if self.adapted(name))


def adapter_columns(lora: LoraSettings) -> dict[str, int]:
    """Columns of u = scale * dropout(x) A^T of each of our linears that has an adapter: a rank a projection."""
    return {name: len(lora.adapted(name)) * lora.rank for name in LINEARS if lora.adapted(name)}


def adapter_unit(c: ModelConfig, lora: LoraSettings, layer: int) -> Unit:
    """The adapter tensors of one block: `qkv.a` [n*R, D] of the n adapted projections, `qkv.b.q_proj` [rows, R] ..."""
    base = {tensor.name: tensor for tensor in block_unit(c, layer).tensors}
    tensors = []
    for linear in LINEARS:
        adapted = lora.adapted(linear)
        if not adapted:
            continue
        parts = {part.hf_name.split(".")[-2]: part for part in base[linear].parts}
        names = {p: "base_model.model." + parts[p].hf_name.removesuffix(".weight") for p in adapted}
        rows = [Part(f"{names[p]}.lora_A.weight", i * lora.rank, (i + 1) * lora.rank) for i, p in enumerate(adapted)]
        by_columns, by_rows = (base[linear].split == dim for dim in (1, 0))  # each of A and B has one of W's dimensions
        shape = len(rows) * lora.rank, base[linear].shape[1]
        tensors.append(TensorSpec(f"{linear}.a", shape, tuple(rows), True, 1 if by_columns else None))
        for p in adapted:
            size = parts[p].stop - parts[p].start
            part = Part(f"{names[p]}.lora_B.weight", 0, size)
            tensors.append(TensorSpec(f"{linear}.b.{p}", (size, lora.rank), (part,), True, 0 if by_rows else None))
    return Unit(f"blocks.{layer}.adapter", tuple(tensors))


def adapters_of(
    views: dict[str, torch.Tensor], c: ModelConfig, lora: LoraSettings, layer: int, tp: TensorParallel = ALONE
) -> dict[str, Adapter]:
    """The adapter of each of our linears in one block, from the tensors of its adapter unit (or their gradients).

    c: the sizes of this rank's share of the block.
    """
    unit = block_unit(c, layer)
    rows = {part.hf_name.split(".")[-2]: part for t in unit.tensors for part in t.parts}
    split = {t.name: t.split for t in unit.tensors}
    adapters = {}
    for i, linear in enumerate(LINEARS):
        adapted = lora.adapted(linear)
        if adapted and views:
            b = tuple(AdapterB(rows[p].start, rows[p].stop, views[f"{linear}.b.{p}"]) for p in adapted)
            noise = stream(DROPOUT, layer * len(LINEARS) + i)
            a, part, parts = views[f"{linear}.a"], *((tp.rank, tp.size) if split[linear] == 1 else (0, 1))
            columns = part * a.shape[1], parts * a.shape[1]
            adapters[linear] = Adapter(a, b, lora.scale, lora.dropout, noise, *columns)
    return adapters


def peft_config(lora: LoraSettings, base_model: str | None) -> dict[str, Any]:
    """adapter_config.json as PEFT reads it."""
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(lora.targets),
        "use_rslora": lora.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": False,
    }


def read_peft_config(directory: str | Path) -> LoraSettings:
    """The settings in `directory`/adapter_config.json.

    Raises ConfigError, naming it, for anything there that our adapters do not have.
    """
    file = Path(directory) / "adapter_config.json"
    if not file.is_file():
        raise ConfigError(f"{directory}: no adapter_config.json there; an adapter is a directory in PEFT's format")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: an adapter's configuration is a JSON object, this is a {type(raw).__name__}")
    if raw.get("peft_type") != "LORA":
        raise ConfigError(f"{file}: peft_type {raw.get('peft_type')!r} is not supported, only 'LORA'")
    plain = {"bias": ("none",), "use_dora": (False,), "fan_in_fan_out": (False,), "lora_bias": (False,)}
    empty = ("modules_to_save", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern")
    more = ("exclude_modules", "target_parameters", "trainable_token_indices", "alora_invocation_tokens")
    for key, allowed in (plain | dict.fromkeys((*empty, *more), ())).items():
        if raw.get(key) and raw[key] not in allowed:
            raise ConfigError(f"{file}: {key} {raw[key]!r} is not supported")
    targets = raw.get("target_modules")
    if not isinstance(targets, list) or not targets or set(map(str, targets)) - set(PROJECTIONS):
        raise ConfigError(f"{file}: target_modules {targets!r}: supported are lists of {', '.join(PROJECTIONS)}")
    try:
        return LoraSettings(
            rank=int(raw["r"]),
            alpha=float(raw["lora_alpha"]),
            dropout=float(raw.get("lora_dropout", 0.0)),
            targets=tuple(p for p in PROJECTIONS if p in targets),
            rslora=bool(raw.get("use_rslora", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file}: r, lora_alpha or lora_dropout is missing or not a number ({error})") from None
