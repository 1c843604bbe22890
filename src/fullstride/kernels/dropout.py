"""Dropout with regenerated noise: see ops/dropout."""
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv
from fullstride.kernels.rounding import noise

BLOCK = 2048


@triton.jit(do_not_specialize=["threshold", "stream"])
def dropout_kernel(x, threshold, scale, rng, stream, out, n, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32) * scale
    value = tl.where(noise(rng, stream, start, BLOCK) >= threshold.to(tl.uint32), value, 0.0)
    if ACCUMULATE:
        value += tl.load(out + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + at, value, mask=at < n)


def dropout(
    x_ND: torch.Tensor,
    threshold: int,
    scale: float,
    rng: torch.Tensor,
    stream: int,
    out_ND: torch.Tensor,
    accumulate: bool = False,
) -> None:
    """See ops/dropout, whose keep_threshold and keep_scale of p come in. Moves 2 N D elements (3 with `accumulate`)."""
    assert x_ND.is_contiguous() and out_ND.is_contiguous()
    n = x_ND.numel()
    dropout_kernel[(cdiv(n, BLOCK),)](
        x_ND, threshold, scale, rng, stream, out_ND, n, ACCUMULATE=accumulate, BLOCK=BLOCK, num_warps=4
    )
