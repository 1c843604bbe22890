"""Sum of squares of a flat buffer, in two stages: see ops/norm."""
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv, next_power_of_2, num_sms

BLOCK = 4096


@triton.jit
def sum_of_squares_kernel(x, partial, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    acc = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(pid * BLOCK, n, tl.num_programs(0) * BLOCK, num_stages=3):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        acc += value * value
    tl.store(partial + pid, tl.sum(acc.to(tl.float64), axis=0))


@triton.jit
def sum_partials_kernel(partial, out, P, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(partial + at, mask=at < P, other=0.0), axis=0))


def sum_of_squares(x_n: torch.Tensor, out: torch.Tensor) -> None:
    """See ops/norm. Moves n elements. Each thread adds its elements in float32, all that follows is in float64."""
    num_programs = max(1, min(cdiv(x_n.numel(), BLOCK), 4 * num_sms(x_n)))
    partial = torch.empty(num_programs, dtype=torch.float64, device=x_n.device)
    sum_of_squares_kernel[(num_programs,)](x_n, partial, x_n.numel(), BLOCK=BLOCK, num_warps=8)
    block = next_power_of_2(num_programs)
    sum_partials_kernel[(1,)](partial, out, num_programs, BLOCK=block, num_warps=4)
