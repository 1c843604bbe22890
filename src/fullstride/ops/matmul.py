"""Matrix products, which are cuBLAS's (on a CPU: MKL's), and the bias gradient beside them."""

from __future__ import annotations

import torch

from fullstride.ops.numerics import wide


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


def bias_bwd_ref(dy_NO: torch.Tensor) -> torch.Tensor:
    """dbias_O: the sum over rows."""
    return wide(dy_NO).sum(0)


def bias_bwd(dy_NO: torch.Tensor, dbias_O: torch.Tensor) -> None:
    """Adds the sum of dy_NO over rows into dbias_O."""
    if dy_NO.is_cuda:
        from fullstride.kernels.bias import bias_bwd as kernel

        return kernel(dy_NO, dbias_O)
    dbias_O.copy_(wide(dbias_O) + bias_bwd_ref(dy_NO))
