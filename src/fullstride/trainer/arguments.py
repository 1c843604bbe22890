"""What the Trainer's calls take: numbers that do not spoil weights, and tokens as plain arrays."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullstride.config import LEAST_EPS, MOST_LR
from fullstride.config.rules import check_decay
from fullstride.errors import ConfigError
from fullstride.ops.cross_entropy import IGNORED

Array = np.ndarray | torch.Tensor


@dataclass(frozen=True)
class Batch:
    """The tokens of one micro-step of all ranks, int32 [dp * B, T]."""

    inputs: np.ndarray
    targets: np.ndarray
    documents: np.ndarray | None
    most_documents: int  # the most that a rank has; 0 without `documents`


# z_loss: its gradient is a multiple of the logits, which may be 1e4
MOST = {"lr": MOST_LR, "z_loss": 1e6, "beta1": 1.0, "beta2": 1.0}


def whole(name: str, value: Any, least: int = 0, bits: int = 63) -> int:
    """`value`, a number of Python's or NumPy's, as an int. Raises ConfigError outside [least, 2**bits)."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not least <= value < 2**bits:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ConfigError(f"{name} must be {kind} below 2**{bits}, got {value!r}")
    return int(value)


def place(name: str, path: Any) -> Path:
    """`path` from this process's directory. Raises ConfigError for what cannot be one."""
    try:
        # surrogates that stand for no byte, and NUL, are in no name
        given = Path(path)
        if "\0" in os.fsencode(given).decode("latin-1"):
            raise ValueError("NUL in it")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} must be a path, a str or pathlib.Path, got {path!r} ({error})") from None
    return given.absolute()


def check_values(**values: float) -> dict[str, float]:
    """The values as floats. Raises ConfigError for one that would spoil the weights: eps 0 (in float32), for one,
    divides 0 by 0."""
    for name, value in values.items():
        if not isinstance(value, Real):
            raise ConfigError(f"{name} must be a number, got {value!r}")
        least, most = LEAST_EPS if name == "eps" else 0.0, MOST.get(name, sys.float_info.max)
        if not (least <= value <= most) or (name.startswith("beta") and value == 1):
            rule = f"be at least {least} and finite" if name == "eps" else f"lie in [0, {MOST.get(name, math.inf)}"
            end = "" if name == "eps" else "]" if name in ("lr", "z_loss") else ")"
            raise ConfigError(f"{name} must {rule}{end}, got {value}")
    check_decay(values.get("lr", 0.0), values.get("weight_decay", 0.0))
    return {name: float(value) for name, value in values.items()}


def plain(name: str, array: Array, rows: int, seq_len: int, rows_are: str) -> np.ndarray:
    """`array` as int32 [rows, seq_len]. Raises ConfigError for anything else; rows_are: how `rows` is told."""
    if isinstance(array, torch.Tensor):
        if array.device.type != "cpu" or array.layout != torch.strided:
            got = f"{str(array.layout).removeprefix('torch.')} tensor on {array.device}"
            raise ConfigError(f"{name} must be a NumPy array or a CPU tensor, got a {got}")
        array = array.numpy() if array.dtype == torch.int32 else array  # the message below names other dtypes
    # np.memmap and other kinds of arrays hold plain numbers; a masked one does not say what its holes are
    values = np.asarray(array) if isinstance(array, np.ndarray) and not np.ma.isMaskedArray(array) else None
    if values is None or values.shape != (rows, seq_len) or values.dtype != np.int32:
        dtype, shape = getattr(array, "dtype", ""), list(getattr(array, "shape", ()))
        got = type(array).__name__ if values is None and not isinstance(array, torch.Tensor) else ""
        told = " ".join(filter(None, (got, str(dtype).removeprefix("torch."), str(shape) if shape else "")))
        raise ConfigError(f"{name} must be int32 {[rows, seq_len]} ({rows_are}, seq_len), got {told}")
    return values


def check_ids(name: str, values: np.ndarray, vocabulary: int) -> None:
    """Raise ConfigError for the first of `values` that is no token id; -100 is one among targets."""
    numbers = values.view(np.uint32)  # negative numbers are large ones there
    if numbers.max() < vocabulary:
        return
    wrong = numbers >= vocabulary
    if name == "targets":
        wrong &= values != IGNORED
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ConfigError(
            f"{name}[{row}, {column}] is {values[row, column]}: token ids must be below the embedding's "
            f"{vocabulary} rows; is this the model's tokenizer?"
        )
