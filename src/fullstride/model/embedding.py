"""The token embedding, of which each rank may have a part: see model/tensor_parallel."""

from __future__ import annotations

import torch

from fullstride.model.linear import Scratch
from fullstride.model.tensor_parallel import TensorParallel
from fullstride.ops.embedding import embedding_bwd, embedding_fwd


def embed_fwd(
    table_VD: torch.Tensor,
    ids_N: torch.Tensor,
    x_ND: torch.Tensor,
    tp: TensorParallel,
    vocabulary: range | None,
    scratch: Scratch,
) -> None:
    """Overwrites x_ND, this rank's rows, with the embeddings of ids_N, those of all rows; table_VD begins with the rows
    of `vocabulary` (None: of all tokens)."""
    if vocabulary is None:
        return embedding_fwd(table_VD, ids_N, x_ND)
    term = scratch("branch", (len(ids_N), x_ND.shape[1]), x_ND.dtype)
    embedding_fwd(table_VD, _rows(ids_N, vocabulary), term)
    x_ND.copy_(tp.summed(term))


def embed_bwd(
    dx_ND: torch.Tensor,
    ids_N: torch.Tensor,
    dtable_VD: torch.Tensor,
    tp: TensorParallel,
    vocabulary: range | None,
    scratch: Scratch,
) -> None:
    """Adds into dtable_VD, from the gradient of what embed_fwd gave."""
    whole = dx_ND
    if tp.sequence:
        whole = scratch("branch", (len(ids_N), dx_ND.shape[1]), dx_ND.dtype)
        tp.own(whole).copy_(dx_ND)
        tp.gather(whole, scratch)
    embedding_bwd(whole, ids_N if vocabulary is None else _rows(ids_N, vocabulary), dtable_VD)


def _rows(ids_N: torch.Tensor, vocabulary: range) -> torch.Tensor:
    """Rows of this rank's table, -1 for tokens that others have."""
    here = (ids_N >= vocabulary.start) & (ids_N < vocabulary.stop)
    return torch.where(here, ids_N - vocabulary.start, -1)
