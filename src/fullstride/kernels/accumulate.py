"""Terms added into a flat sum, rounded stochastically: see ops/accumulate."""
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullstride.kernels.adamw import store_rounded
from fullstride.kernels.grid import cdiv

BLOCK = 1024


@triton.jit(do_not_specialize=["stream", "first"])
def accumulate_kernel(
    total,
    terms,
    rng,
    stream,
    first,
    n,
    TERMS: tl.constexpr,
    SKIP: tl.constexpr,
    OVERWRITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    mask = at < n
    value = tl.zeros((BLOCK,), tl.float32)
    if not OVERWRITE:
        value += tl.load(total + at, mask=mask, other=0.0).to(tl.float32)
    for p in tl.static_range(TERMS):
        if p != SKIP:
            value += tl.load(terms + at, mask=mask, other=0.0).to(tl.float32)
        terms += n
    store_rounded(total, at, value, n, rng, stream, start, first, BLOCK)


def accumulate(
    sum_n: torch.Tensor, terms_Pn: torch.Tensor, rng: torch.Tensor, stream: int, first: int, overwrite: bool, skip: int
) -> None:
    """See ops/accumulate. Moves n elements for each term, one for the result and, without `overwrite`, one more."""
    n = sum_n.numel()
    accumulate_kernel[(cdiv(n, BLOCK),)](
        sum_n,
        terms_Pn,
        rng,
        stream,
        first,
        n,
        TERMS=len(terms_Pn),
        SKIP=skip,
        OVERWRITE=overwrite,
        BLOCK=BLOCK,
        num_warps=4,
    )
