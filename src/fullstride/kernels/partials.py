"""The second pass of every sum over rows: partial rows, one per program of the first pass, in a fixed order."""
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv, next_power_of_2

BLOCK_P = 1024  # rows at once: all of them, as a rule, so that the memory is waited for once
BLOCK_D = 8  # columns a program, 32 bytes: the sums are narrow, and programs must be many


@triton.jit
def add_partials_kernel(partial, out, P, D, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        mask = (rows < P)[:, None] & (cols < D)[None, :]
        acc += tl.load(partial + rows[:, None].to(tl.int64) * D + cols[None, :], mask=mask, other=0.0)
    total = tl.load(out + cols, mask=cols < D, other=0.0).to(tl.float32) + tl.sum(acc, axis=0)
    tl.store(out + cols, total, mask=cols < D)


def add_partials(partial_PD: torch.Tensor, out_D: torch.Tensor) -> None:
    """Adds the sum over rows of partial_PD (float32, contiguous) into out_D. Moves 4 P D bytes."""
    num_partials, width = partial_PD.shape
    add_partials_kernel[(cdiv(width, BLOCK_D),)](
        partial_PD,
        out_D,
        num_partials,
        width,
        BLOCK_P=min(BLOCK_P, next_power_of_2(num_partials)),
        BLOCK_D=BLOCK_D,
        num_warps=8,
    )
