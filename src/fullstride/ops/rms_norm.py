"""RMS normalisation with the residual addition before it (Zhang and Sennrich 2019, arXiv 1910.07467).

residual = x + branch                        (rounded to the storage dtype; what follows reads the rounded value)
rstd     = 1 / sqrt(mean(residual ** 2) + eps)
normed   = residual * rstd * weight
"""

from __future__ import annotations

import torch

from fullstride.ops.numerics import check_rows, wide


def rms_norm_fwd_ref(x_ND: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed_ND, rstd_N) of x_ND, without the addition."""
    x_ND = wide(x_ND)
    rstd_N = torch.rsqrt(x_ND.square().mean(-1) + eps)
    return x_ND * rstd_N[:, None] * wide(weight_D), rstd_N


def rms_norm_bwd_ref(
    dnormed_ND: torch.Tensor, x_ND: torch.Tensor, weight_D: torch.Tensor, rstd_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx_ND, dweight_D); x_ND is the sum that was normalised.

    With xhat = x * rstd and g = dnormed * weight:
    dx = rstd * (g - xhat * mean(g * xhat)), dweight = sum(dnormed * xhat).
    """
    dnormed_ND, xhat_ND = wide(dnormed_ND), wide(x_ND) * rstd_N[:, None]
    g_ND = dnormed_ND * wide(weight_D)
    dx_ND = rstd_N[:, None] * (g_ND - xhat_ND * (g_ND * xhat_ND).mean(-1, keepdim=True))
    return dx_ND, (dnormed_ND * xhat_ND).sum(0)


def rms_norm_fwd(
    x_ND: torch.Tensor,
    branch_ND: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    residual_ND: torch.Tensor,
    normed_ND: torch.Tensor,
    rstd_N: torch.Tensor,
) -> None:
    """Overwrites residual_ND, normed_ND (both of x's dtype) and rstd_N (float32, or float64 beside float64).

    Without a branch the residual is x itself, and residual_ND must be x_ND.
    """
    assert branch_ND is not None or residual_ND is x_ND
    check_rows(x_ND, branch_ND, weight_D, residual_ND, normed_ND, rstd_N)
    if x_ND.is_cuda:
        from fullstride.kernels.rms_norm import rms_norm_fwd as kernel

        return kernel(x_ND, branch_ND, weight_D, eps, residual_ND, normed_ND, rstd_N)
    if branch_ND is not None:
        residual_ND.copy_(wide(x_ND) + wide(branch_ND))
    normed, rstd = rms_norm_fwd_ref(residual_ND, weight_D, eps)
    normed_ND.copy_(normed)
    rstd_N.copy_(rstd)


def rms_norm_bwd(
    dnormed_ND: torch.Tensor,
    x_ND: torch.Tensor,
    weight_D: torch.Tensor,
    rstd_N: torch.Tensor,
    dresidual_ND: torch.Tensor | None,
    dx_ND: torch.Tensor,
    dweight_D: torch.Tensor | None,
) -> None:
    """Overwrites dx_ND with dresidual_ND (the gradient that skips the norm, if any) plus the norm's own gradient.

    Adds into dweight_D (None: frozen). dx_ND may be dnormed_ND or x_ND.
    """
    check_rows(dnormed_ND, x_ND, weight_D, rstd_N, dresidual_ND, dx_ND, dweight_D)
    if x_ND.is_cuda:
        from fullstride.kernels.rms_norm import rms_norm_bwd as kernel

        return kernel(dnormed_ND, x_ND, weight_D, rstd_N, dresidual_ND, dx_ND, dweight_D)
    dx, dweight = rms_norm_bwd_ref(dnormed_ND, x_ND, weight_D, rstd_N)
    dx_ND.copy_(dx if dresidual_ND is None else dx + wide(dresidual_ND))
    if dweight_D is not None:
        dweight_D.add_(dweight)
