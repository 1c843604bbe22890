"""Token embedding: the forward gathers rows, the backward adds each token's gradient into its row, in a fixed order.

Id -1 is a token whose row is elsewhere: its embedding is zeros, and its gradient is left out.
"""

from __future__ import annotations

import torch

from fullstride.ops.numerics import check_rows, wide
from fullstride.ops.rows import gather_rows


def embedding_bwd_ref(dout_ND: torch.Tensor, ids_N: torch.Tensor, num_rows: int) -> torch.Tensor:
    """dtable_VD: row v is the sum of dout's rows whose id is v."""
    here = ids_N >= 0
    dout_ND, ids_N = wide(dout_ND)[here], ids_N[here]
    return dout_ND.new_zeros(num_rows, dout_ND.shape[1]).index_add_(0, ids_N, dout_ND)


def embedding_fwd(table_VD: torch.Tensor, ids_N: torch.Tensor, out_ND: torch.Tensor) -> None:
    """Overwrites out_ND with the rows ids_N (int32, each in [-1, V)) of table_VD."""
    gather_rows(table_VD, ids_N, out_ND)


def embedding_bwd(dout_ND: torch.Tensor, ids_N: torch.Tensor, dtable_VD: torch.Tensor) -> None:
    """Adds into dtable_VD. Equal ids are summed in at least float32, in order of position, before the one addition."""
    check_rows(dout_ND, ids_N, dtable_VD)
    if dout_ND.is_cuda:
        from fullstride.kernels.embedding import embedding_bwd as kernel

        return kernel(dout_ND, ids_N, dtable_VD)
    dtable_VD.copy_(wide(dtable_VD) + embedding_bwd_ref(dout_ND, ids_N, dtable_VD.shape[0]))
