"""Dropout whose mask is regenerated from counter-based noise in the backward, never stored (see ops/rounding)."""

from __future__ import annotations

import torch

from fullstride.ops.numerics import check_rows, wide
from fullstride.ops.rounding import noise_ref


def keep_threshold(p: float) -> int:
    """An element is kept when its noise, one of 2**16 values, is at least this: p is rounded to multiples of 2**-16."""
    return min(round(p * 2**16), 2**16 - 1)


def keep_scale(threshold: int) -> float:
    """One over the probability to be kept: the mean of what is kept stays right, whatever p was rounded to."""
    return 2**16 / (2**16 - threshold)


def dropout_ref(
    x_ND: torch.Tensor, p: float, rng: torch.Tensor, stream: int, first_column: int = 0, num_columns: int = 0
) -> torch.Tensor:
    """x * keep / (1 - p), with element e = (first row + row) * num_columns + first_column + column of x keyed as
    ops/rounding says; num_columns 0: D.

    rng: int64 [4], that key, and the number of x's first row among all rows of the micro-step, all ranks'.
    """
    (rows, columns), threshold = x_ND.shape, keep_threshold(p)
    whole = num_columns or columns
    noise = noise_ref(rng[:3], stream, rows * whole, int(rng[3]) * whole).view(rows, whole)
    keep = noise[:, first_column : first_column + columns] >= threshold
    return torch.where(keep, wide(x_ND) * keep_scale(threshold), 0)


def dropout(
    x_ND: torch.Tensor,
    p: float,
    rng: torch.Tensor,
    stream: int,
    out_ND: torch.Tensor,
    accumulate: bool = False,
    first_column: int = 0,
    num_columns: int = 0,
) -> None:
    """Overwrites out_ND, or with `accumulate` adds into it. Forward and backward are the same function of x or dx.

    Rows may be strided; 0 <= p < 1; rng as in dropout_ref. `first_column` numbers x's first column among the
    num_columns of which it is a part (0: it is the whole). On a GPU the elements before the first row are a multiple of
    8; of a part, so are its columns, those before it and the whole's.
    """
    check_rows(x_ND, out_ND)
    if x_ND.is_cuda:
        from fullstride.kernels.dropout import dropout as kernel

        threshold = keep_threshold(p)
        place = first_column, num_columns
        return kernel(x_ND, threshold, keep_scale(threshold), rng, stream, out_ND, accumulate, *place)
    dropped = dropout_ref(x_ND, p, rng, stream, first_column, num_columns)
    out_ND.copy_(wide(out_ND) + dropped if accumulate else dropped)
