"""Matrix products, which are cuBLAS's (on a CPU: MKL's)."""

from __future__ import annotations

import torch


def matmul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False, alpha: float = 1.0
) -> None:
    """out = alpha * (a @ b), or with `accumulate` out += alpha * (a @ b); rounded once, after the addition.

    out may be any view whose last dimension is contiguous; without `accumulate` its old contents do not matter.
    """
    out.addmm_(a, b, beta=1 if accumulate else 0, alpha=alpha)


def matmul_bias(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """out = a @ b + bias, the bias added to every row before the one rounding."""
    torch.addmm(bias, a, b, out=out)
