"""Moving whole rows by an index: the embedding look-up, and the supervised rows in and out of the head."""

from __future__ import annotations

import torch

from fullstride.ops.numerics import check_rows


def gather_rows_ref(x_ND: torch.Tensor, index_M: torch.Tensor) -> torch.Tensor:
    """out_MD: row index[m] of x, or zeros where index[m] is -1."""
    return torch.where(index_M[:, None] >= 0, x_ND[index_M.clamp(min=0).long()], 0)


def scatter_rows_ref(x_MD: torch.Tensor, index_M: torch.Tensor, out_ND: torch.Tensor) -> torch.Tensor:
    """A copy of out_ND whose row index[m] is x's row m, for every index[m] that is not -1."""
    keep = index_M >= 0
    return out_ND.index_copy(0, index_M[keep].long(), x_MD[keep].to(out_ND.dtype))


def gather_rows(x_ND: torch.Tensor, index_M: torch.Tensor, out_MD: torch.Tensor) -> None:
    """Overwrites out_MD (x's dtype) with the rows index_M (int32) of x_ND; index -1 gives a row of zeros."""
    check_rows(x_ND, index_M, out_MD)
    if x_ND.is_cuda:
        from fullstride.kernels.rows import gather_rows as kernel

        return kernel(x_ND, index_M, out_MD)
    out_MD.copy_(gather_rows_ref(x_ND, index_M))


def scatter_rows(x_MD: torch.Tensor, index_M: torch.Tensor, out_ND: torch.Tensor) -> None:
    """Overwrites the rows index_M (int32, without duplicates but for -1, which is skipped) of out_ND with x_MD's."""
    check_rows(x_MD, index_M, out_ND)
    if x_MD.is_cuda:
        from fullstride.kernels.rows import scatter_rows as kernel

        return kernel(x_MD, index_M, out_ND)
    out_ND.copy_(scatter_rows_ref(x_MD, index_M, out_ND))
