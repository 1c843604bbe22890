"""Final norm, LM head and loss, in chunks: logits of one chunk of supervised rows exist at a time, never of all.

For each chunk: gather its supervised rows, logits = x W^T, cross-entropy forward and backward in place on the logits,
then dx = dlogits W and dW (+)= dlogits^T x. Rows that are not supervised cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullstride.model.linear import Scratch
from fullstride.ops.cross_entropy import cross_entropy
from fullstride.ops.matmul import matmul
from fullstride.ops.rms_norm import rms_norm_bwd, rms_norm_fwd
from fullstride.ops.rows import gather_rows, scatter_rows


@dataclass(frozen=True)
class HeadWeights:
    """final_norm [D] and lm_head [V, D] (the embedding where tied); as gradients None stands for frozen."""

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
    """eps of the final norm, the z-loss coefficient (one element on the device), and scratch."""

    eps: float
    z_loss: torch.Tensor
    scratch: Scratch


def _final_norm(
    w: HeadWeights, ctx: HeadContext, residual_ND: torch.Tensor, branch_ND: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x_ND, normed_ND, rstd_N) in scratch, read until the micro-step's end."""
    assert w.final_norm is not None
    shape, dtype = tuple(residual_ND.shape), residual_ND.dtype
    x, normed = ctx.scratch("final_x", shape, dtype), ctx.scratch("final_normed", shape, dtype)
    rstd = ctx.scratch("final_rstd", shape[:1], torch.float64 if dtype == torch.float64 else torch.float32)
    rms_norm_fwd(residual_ND, branch_ND, w.final_norm, ctx.eps, x, normed, rstd)
    return x, normed, rstd


def _chunk_logits(
    w: HeadWeights, ctx: HeadContext, normed_ND: torch.Tensor, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, logits) of one chunk, in scratch."""
    assert w.lm_head is not None
    x = ctx.scratch("head_x", (len(index), normed_ND.shape[1]), normed_ND.dtype)
    gather_rows(normed_ND, index, x)
    logits = ctx.scratch("logits", (len(index), w.lm_head.shape[0]), normed_ND.dtype)
    matmul(x, w.lm_head.t(), logits)
    return x, logits


def head_loss(
    w: HeadWeights, ctx: HeadContext, residual_ND: torch.Tensor, branch_ND: torch.Tensor, rows: HeadRows
) -> None:
    """Forward only: overwrites rows.loss_M and rows.lse_M (0 beyond the supervised rows)."""
    _, normed, _ = _final_norm(w, ctx, residual_ND, branch_ND)
    rows.loss_M.zero_()
    rows.lse_M.zero_()
    for i in range(rows.num_chunks):
        part = slice(i * rows.chunk, (i + 1) * rows.chunk)
        _, logits = _chunk_logits(w, ctx, normed, rows.index_M[part])
        cross_entropy(logits, rows.targets_M[part], ctx.z_loss, rows.loss_M[part], rows.lse_M[part], backward=False)


def head_fwd_bwd(
    w: HeadWeights,
    g: HeadWeights,
    ctx: HeadContext,
    residual_ND: torch.Tensor,
    branch_ND: torch.Tensor,
    rows: HeadRows,
    dx_ND: torch.Tensor,
    accumulate: bool,
) -> None:
    """Loss as head_loss; overwrites dx_ND with the gradient of the loss sum (z-loss included) for residual + branch.

    g.lm_head is overwritten by the first chunk (with `accumulate`: added into); g.final_norm is added into.
    """
    assert w.final_norm is not None and w.lm_head is not None
    x, normed, rstd = _final_norm(w, ctx, residual_ND, branch_ND)
    dnormed = ctx.scratch("dnormed", tuple(x.shape), x.dtype)
    dnormed.zero_()
    rows.loss_M.zero_()
    rows.lse_M.zero_()
    if g.lm_head is not None and not accumulate and rows.num_chunks == 0:
        g.lm_head.zero_()
    for i in range(rows.num_chunks):
        part = slice(i * rows.chunk, (i + 1) * rows.chunk)
        x_chunk, logits = _chunk_logits(w, ctx, normed, rows.index_M[part])
        cross_entropy(logits, rows.targets_M[part], ctx.z_loss, rows.loss_M[part], rows.lse_M[part], backward=True)
        if g.lm_head is not None:
            matmul(logits.t(), x_chunk, g.lm_head, accumulate=accumulate or i > 0)
        dx_chunk = ctx.scratch("head_dx", tuple(x_chunk.shape), x_chunk.dtype)
        matmul(logits, w.lm_head, dx_chunk)
        scatter_rows(dx_chunk, rows.index_M[part], dnormed)
    rms_norm_bwd(dnormed, x, w.final_norm, rstd, None, dx_ND, g.final_norm)
