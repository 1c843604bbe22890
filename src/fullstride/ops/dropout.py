"""Dropout whose mask is regenerated from counter-based noise in the backward, never stored (see ops/rounding)."""

from __future__ import annotations

import torch

from fullstride.ops.numerics import wide
from fullstride.ops.rounding import philox_ref


def keep_threshold(p: float) -> int:
    """An element is kept when its uint32 noise is at least this."""
    return min(round(p * 2**32), 2**32 - 1)


def dropout_ref(x_ND: torch.Tensor, p: float, rng: torch.Tensor, stream: int) -> torch.Tensor:
    """x * keep / (1 - p), with element e = row * D + column of x keyed as ops/rounding says."""
    keep = philox_ref(rng, stream, x_ND.numel()).view(x_ND.shape) >= keep_threshold(p)
    return torch.where(keep, wide(x_ND) / (1 - p), 0)


def dropout(
    x_ND: torch.Tensor, p: float, rng: torch.Tensor, stream: int, out_ND: torch.Tensor, accumulate: bool = False
) -> None:
    """Overwrites out_ND, or with `accumulate` adds into it. Forward and backward are the same function of x or dx.

    x_ND and out_ND are contiguous; 0 <= p < 1.
    """
    if x_ND.is_cuda:
        from fullstride.kernels.dropout import dropout as kernel

        return kernel(x_ND, p, keep_threshold(p), rng, stream, out_ND, accumulate)
    dropped = dropout_ref(x_ND, p, rng, stream)
    out_ND.copy_(wide(out_ND) + dropped if accumulate else dropped)
