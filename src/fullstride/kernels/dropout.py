"""Dropout with regenerated noise: see ops/dropout."""
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv
from fullstride.kernels.rounding import noise, noise_of_groups

BLOCK = 2048


@triton.jit
def offsets(n, D, x_stride, out_stride, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """(in x, in out, is there) of a program's elements, of the rows laid end to end: [BLOCK / GROUP, GROUP].

    A group, in which elements are neighbours in memory, lies within one row. Groups are counted in 32 bits.
    """
    group = (tl.program_id(0) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP))[:, None]
    row, one = group // (D // GROUP), tl.arange(0, GROUP)[None, :]
    column = (group - row * (D // GROUP)) * GROUP + one
    exists = group.to(tl.int64) * GROUP + one < n
    return row.to(tl.int64) * x_stride + column, row.to(tl.int64) * out_stride + column, exists


@triton.jit
def part_noise(rng, stream, first, D, skipped, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Noise [BLOCK / 8, 8] where `skipped` elements that are elsewhere follow each row's D, both multiples of 8."""
    tl.static_assert(GROUP == 8)
    group = tl.program_id(0) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    number = first // 8 + group + (group // (D // 8)).to(tl.int64) * (skipped // 8)
    return noise_of_groups(rng, stream, number.to(tl.uint32), BLOCK).reshape(BLOCK // 8, 8)


@triton.jit(do_not_specialize=["threshold", "stream", "first_column"])
def dropout_kernel(
    x,
    threshold,
    scale,
    rng,
    stream,
    out,
    first_column,
    n,
    D,
    skipped,
    x_stride,
    out_stride,
    IS_PART: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at, to, mask = offsets(n, D, x_stride, out_stride, GROUP, BLOCK)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * scale
    # a multiple of 8: one Philox gives eight neighbours their noise
    first = tl.load(rng + 3) * (D + skipped) + first_column
    if IS_PART:
        random = part_noise(rng, stream, first, D, skipped, GROUP, BLOCK)
    else:
        random = noise(rng, stream, first + start, BLOCK).reshape(BLOCK // GROUP, GROUP)
    value = tl.where(random >= threshold.to(tl.uint32), value, 0.0)
    if ACCUMULATE:
        value += tl.load(out + to, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + to, value, mask=mask)


def dropout(
    x_ND: torch.Tensor,
    threshold: int,
    scale: float,
    rng: torch.Tensor,
    stream: int,
    out_ND: torch.Tensor,
    accumulate: bool = False,
    first_column: int = 0,
    num_columns: int = 0,
) -> None:
    """See ops/dropout, whose keep_threshold and keep_scale of p come in. Rows may be strided. Moves 2 N D elements (3
    with `accumulate`)."""
    n, width = x_ND.numel(), x_ND.shape[1]
    whole = num_columns or width
    assert first_column % 8 == 0, "one Philox gives eight neighbours their noise"
    assert whole == width or width % 8 == whole % 8 == 0, "one Philox gives eight neighbours their noise"
    dropout_kernel[(cdiv(n, BLOCK),)](
        x_ND,
        threshold,
        scale,
        rng,
        stream,
        out_ND,
        first_column,
        n,
        width,
        whole - width,
        x_ND.stride(0),
        out_ND.stride(0),
        IS_PART=whole != width,
        ACCUMULATE=accumulate,
        GROUP=8 if width % 8 == 0 else 1,
        BLOCK=BLOCK,
        num_warps=4,
    )
