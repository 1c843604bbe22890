"""Matrix products, which are cuBLAS's (on a CPU: MKL's)."""

from __future__ import annotations

from typing import Protocol

import torch

WORKSPACE_BYTES = 2**25  # what torch gives cuBLAS on a Hopper GPU


class Matmul(Protocol):
    """out = alpha * (a @ b), plus `bias` to every row; with `accumulate`, added to what `out` holds. Rounded once.

    a [M, K], b [K, N], out [M, N] of one dtype; each is contiguous in one of its dimensions, `out` in its last. Without
    `accumulate` the old contents of `out` do not matter. bias [N] comes with neither alpha nor `accumulate`.
    """

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        *,
        accumulate: bool = False,
        alpha: float = 1.0,
        bias: torch.Tensor | None = None,
    ) -> None: ...


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    accumulate: bool = False,
    alpha: float = 1.0,
    bias: torch.Tensor | None = None,
) -> None:
    """See Matmul. The library chooses its algorithm, the same one every time."""
    assert 1 in a.stride() and 1 in b.stride() and out.stride(1) == 1
    if bias is None:
        out.addmm_(a, b, beta=1 if accumulate else 0, alpha=alpha)
    else:
        assert not accumulate and alpha == 1
        torch.addmm(bias, a, b, out=out)


def fastest_matmul(workspace: torch.Tensor) -> Matmul:
    """Products on a GPU in 16-bit types by the algorithm that is fastest there: see kernels/matmul.

    workspace: uint8 [WORKSPACE_BYTES], for products on one stream.
    """
    from fullstride.kernels.matmul import FastestMatmul

    return FastestMatmul(workspace)
