"""Cross-entropy and its gradient in place: see ops/cross_entropy."""
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv, next_power_of_2

LANE = 8  # neighbouring elements a thread takes at once: it keeps one running maximum and sum for them


@triton.jit
def cross_entropy_kernel(
    logits,
    targets,
    z_loss,
    loss,
    lse_out,
    logits_stride,
    V,
    BACKWARD: tl.constexpr,
    LANES: tl.constexpr,
    LANE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    cols = tl.arange(0, LANES)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    target = tl.load(targets + row)
    num_blocks = tl.cdiv(V, LANES * LANE)
    if target == -100:
        tl.store(loss + row, 0.0)
        tl.store(lse_out + row, 0.0)
        if BACKWARD:
            for block in range(0, num_blocks):
                at = block * (LANES * LANE) + cols
                tl.store(logits + at, tl.zeros([LANES, LANE], tl.float32), mask=at < V, cache_modifier=".cs")
    else:
        target_logit = tl.load(logits + target).to(tl.float32)
        # finite, so that a lane that saw only -inf (masked or not) subtracts no infinities
        top = tl.full([LANES], -1e38, tl.float32)
        total = tl.zeros([LANES], tl.float32)
        ahead = tl.load(logits + cols, mask=cols < V, other=float("-inf"), eviction_policy="evict_last")
        for block in range(0, num_blocks):
            x = ahead.to(tl.float32)
            at = (block + 1) * (LANES * LANE) + cols
            ahead = tl.load(logits + at, mask=at < V, other=float("-inf"), eviction_policy="evict_last")
            new_top = tl.maximum(top, tl.max(x, axis=1))
            total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top[:, None]), axis=1)
            top = new_top
        row_top = tl.max(top, axis=0)
        # maximum and logarithm stay apart: in their float32 sum, logits of 1e4 would leave three digits of the loss
        log_total = tl.log(tl.sum(total * tl.exp(top - row_top), axis=0))
        lse = row_top + log_total
        tl.store(loss + row, log_total - (target_logit - row_top))
        tl.store(lse_out + row, lse)
        if BACKWARD:
            scale = 1 + 2 * tl.load(z_loss).to(tl.float32) * lse
            for turn in range(0, num_blocks):
                # from the end: what was read last is the likeliest to be in the L2 cache still
                at = (num_blocks - 1 - turn) * (LANES * LANE) + cols
                x = tl.load(logits + at, mask=at < V, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
                d = tl.exp(x - row_top - log_total) * scale - tl.where(at == target, 1.0, 0.0)
                tl.store(logits + at, d, mask=at < V, cache_modifier=".cs")


def cross_entropy(
    logits_MV: torch.Tensor,
    targets_M: torch.Tensor,
    z_loss: torch.Tensor,
    loss_M: torch.Tensor,
    lse_M: torch.Tensor,
    backward: bool,
) -> None:
    """See ops/cross_entropy. Rows may be strided. Moves 2 M V elements (M V without the backward), plus what of the
    second reading misses the L2 cache.

    One program a row: a pass for maximum and sum, a pass for the gradient. At real vocabularies a program has so many
    threads that a multiprocessor holds one, so that the rows being worked on fit the cache.
    """
    num_rows, vocab_size = logits_MV.shape
    assert logits_MV.stride(1) == 1
    lanes = max(32, min(2048, next_power_of_2(cdiv(vocab_size, LANE))))
    cross_entropy_kernel[(num_rows,)](
        logits_MV,
        targets_M,
        z_loss,
        loss_M,
        lse_M,
        logits_MV.stride(0),
        vocab_size,
        BACKWARD=backward,
        LANES=lanes,
        LANE=LANE,
        num_warps=min(32, lanes // 32),
    )
