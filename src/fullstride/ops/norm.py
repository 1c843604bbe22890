"""Sum of squares of a flat buffer: a global norm's share, summed in a fixed order."""

from __future__ import annotations

import torch

from fullstride.ops.numerics import wide


def sum_of_squares_ref(x_n: torch.Tensor) -> torch.Tensor:
    """Scalar, float64: the sum of x ** 2."""
    return wide(x_n).square().sum(dtype=torch.float64)


def sum_of_squares(x_n: torch.Tensor, out: torch.Tensor) -> None:
    """Overwrites out (one element, float32 or float64) with the sum of squares of x_n (contiguous)."""
    assert x_n.is_contiguous()
    if x_n.is_cuda:
        from fullstride.kernels.norm import sum_of_squares as kernel

        return kernel(x_n, out)
    out.copy_(sum_of_squares_ref(x_n))
