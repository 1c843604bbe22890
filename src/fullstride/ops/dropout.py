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


def dropout_ref(x_ND: torch.Tensor, p: float, rng: torch.Tensor, stream: int) -> torch.Tensor:
    """x * keep / (1 - p), with element e = (first row + row) * D + column of x keyed as ops/rounding says.

    rng: int64 [4], that key, and the number of x's first row among all rows of the micro-step, all ranks'.
    """
    threshold, first = keep_threshold(p), int(rng[3]) * x_ND.shape[1]
    keep = noise_ref(rng[:3], stream, x_ND.numel(), first).view(x_ND.shape) >= threshold
    return torch.where(keep, wide(x_ND) * keep_scale(threshold), 0)


def dropout(
    x_ND: torch.Tensor,
    p: float,
    rng: torch.Tensor,
    stream: int,
    out_ND: torch.Tensor,
    accumulate: bool = False,
) -> None:
    """Overwrites out_ND, or with `accumulate` adds into it. Forward and backward are the same function of x or dx.

    Rows may be strided; 0 <= p < 1. rng as in dropout_ref; on a GPU the elements before x's are a multiple of 8.
    """
    check_rows(x_ND, out_ND)
    if x_ND.is_cuda:
        from fullstride.kernels.dropout import dropout as kernel

        threshold = keep_threshold(p)
        return kernel(x_ND, threshold, keep_scale(threshold), rng, stream, out_ND, accumulate)
    dropped = dropout_ref(x_ND, p, rng, stream)
    out_ND.copy_(wide(out_ND) + dropped if accumulate else dropped)
