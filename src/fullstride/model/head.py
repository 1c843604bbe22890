"""Final norm, LM head and loss, in chunks: logits of one chunk of supervised rows exist at a time, never of all.

For each chunk: gather its supervised rows, logits = x W^T, cross-entropy forward and backward in place on the logits,
then dx = dlogits W and dW (+)= dlogits^T x. Rows that are not supervised cost nothing.

With tensor parallelism a rank has a part of the vocabulary, and all rows: see ops/cross_entropy for what is exchanged
of each chunk. Its dx is a term of a sum, which is taken once, over all chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullstride.model.linear import Scratch
from fullstride.model.tensor_parallel import TensorParallel
from fullstride.ops.cross_entropy import cross_entropy, join_terms, part_bwd, part_terms
from fullstride.ops.matmul import Matmul
from fullstride.ops.rms_norm import rms_norm_bwd, rms_norm_fwd
from fullstride.ops.rows import gather_rows, scatter_rows


@dataclass(frozen=True)
class HeadWeights:
    """final_norm [D] and lm_head [V, D] (the embedding where tied), of which this rank's part of the vocabulary may
    fill the first rows only; as gradients None stands for frozen."""

    final_norm: torch.Tensor | None
    lm_head: torch.Tensor | None


@dataclass
class HeadRows:
    """The supervised rows of a micro-batch, padded to whole chunks with index -1 and target -100 (device tensors).

    index_M: int32 row of x_ND; targets_M: int32; loss_M, lse_M: outputs. `num_chunks` of `chunk` rows are in use: the
    host knows it from the targets.
    """

    index_M: torch.Tensor
    targets_M: torch.Tensor
    loss_M: torch.Tensor
    lse_M: torch.Tensor
    chunk: int
    num_chunks: int


@dataclass
class HeadContext:
    """eps of the final norm, the z-loss coefficient (one element on the device), products, which tokens this rank's
    part of the vocabulary has (None: all), and scratch."""

    eps: float
    z_loss: torch.Tensor
    matmul: Matmul
    tp: TensorParallel
    vocabulary: range | None
    scratch: Scratch

    def rows_in_use(self, table_VD: torch.Tensor) -> torch.Tensor:
        """Those of this rank's part of the vocabulary that stand for a token."""
        return table_VD if self.vocabulary is None else table_VD[: len(self.vocabulary)]


def _final(ctx: HeadContext, like_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed_ND, rstd_N) in scratch: written by head_begin, read until head_end. like_ND: this rank's rows, as those
    of rstd; normed has all."""
    shape, dtype = tuple(like_ND.shape), like_ND.dtype
    rstd = ctx.scratch("final_rstd", shape[:1], torch.float64 if dtype == torch.float64 else torch.float32)
    return _all_rows(ctx, "final_normed", like_ND), rstd


def _all_rows(ctx: HeadContext, name: str, like_ND: torch.Tensor) -> torch.Tensor:
    """Scratch for the rows of all ranks that share them."""
    return ctx.scratch(name, (like_ND.shape[0] * ctx.tp.row_shares, like_ND.shape[1]), like_ND.dtype)


def head_begin(w: HeadWeights, ctx: HeadContext, x_ND: torch.Tensor, rows: HeadRows) -> None:
    """The final norm of the blocks' output x_ND; zeroes what the chunks write by rows: losses, log-sum-exps, and the
    norm's incoming gradient."""
    assert w.final_norm is not None
    normed, rstd = _final(ctx, x_ND)
    rms_norm_fwd(x_ND, None, w.final_norm, ctx.eps, x_ND, ctx.tp.own(normed), rstd)
    ctx.tp.gather(normed, ctx.scratch)
    _all_rows(ctx, "dnormed", x_ND).zero_()
    rows.loss_M.zero_()
    rows.lse_M.zero_()


def head_chunk(
    w: HeadWeights,
    g: HeadWeights | None,
    ctx: HeadContext,
    like_ND: torch.Tensor,
    rows: HeadRows,
    i: int,
    accumulate: bool,
) -> None:
    """Logits and loss of chunk i and, with `g` (None: forward only), their gradients.

    Overwrites the chunk's part of rows.loss_M and rows.lse_M and its rows of the norm's incoming gradient; overwrites
    g.lm_head, or with `accumulate` adds into it. like_ND gives the shape and dtype of the residual stream.
    """
    assert w.lm_head is not None
    lm_head = ctx.rows_in_use(w.lm_head)
    part = slice(i * rows.chunk, (i + 1) * rows.chunk)
    index, targets = rows.index_M[part], rows.targets_M[part]
    normed, dtype = _final(ctx, like_ND)[0], like_ND.dtype
    x = ctx.scratch("head_x", (rows.chunk, normed.shape[1]), dtype)
    gather_rows(normed, index, x)
    logits = ctx.scratch("logits", (rows.chunk, w.lm_head.shape[0]), dtype)[:, : lm_head.shape[0]]
    ctx.matmul(x, lm_head.t(), logits)
    _cross_entropy(ctx, logits, targets, rows.loss_M[part], rows.lse_M[part], backward=g is not None)
    if g is None:
        return
    if g.lm_head is not None:
        ctx.matmul(logits.t(), x, ctx.rows_in_use(g.lm_head), accumulate=accumulate)
    dx = ctx.scratch("head_dx", tuple(x.shape), dtype)
    ctx.matmul(logits, lm_head, dx)
    scatter_rows(dx, index, _all_rows(ctx, "dnormed", like_ND))


def _cross_entropy(
    ctx: HeadContext,
    logits_MV: torch.Tensor,
    targets_M: torch.Tensor,
    loss_M: torch.Tensor,
    lse_M: torch.Tensor,
    backward: bool,
) -> None:
    """See ops/cross_entropy; logits_MV are of this rank's part of the vocabulary."""
    if ctx.vocabulary is None:
        return cross_entropy(logits_MV, targets_M, ctx.z_loss, loss_M, lse_M, backward)
    terms_3M = ctx.scratch("loss_terms", (3, len(targets_M)), loss_M.dtype)
    terms_P3M = ctx.scratch("loss_terms_of_all", (ctx.tp.size, 3, len(targets_M)), loss_M.dtype)
    first = ctx.vocabulary.start
    part_terms(logits_MV, targets_M, first, terms_3M)
    ctx.tp.all_gather(terms_3M, terms_P3M)
    join_terms(terms_P3M, targets_M, terms_3M, loss_M, lse_M)
    if backward:
        part_bwd(logits_MV, targets_M, first, ctx.z_loss, terms_3M)


def head_end(w: HeadWeights, g: HeadWeights, ctx: HeadContext, x_ND: torch.Tensor) -> None:
    """Overwrites x_ND, the blocks' output, with the gradient of the loss sum (z-loss included) for it; adds into
    g.final_norm."""
    assert w.final_norm is not None
    _, rstd = _final(ctx, x_ND)
    dnormed = ctx.tp.summed(_all_rows(ctx, "dnormed", x_ND))
    rms_norm_bwd(dnormed, x_ND, w.final_norm, rstd, None, x_ND, g.final_norm)
