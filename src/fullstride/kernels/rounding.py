"""Counter-based noise and stochastic rounding to bf16: see ops/rounding."""
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv

BLOCK = 2048


@triton.jit
def noise(rng, stream, start, BLOCK: tl.constexpr):
    """uint32 [BLOCK] for elements `start` (a multiple of 4) to start + BLOCK: ops/rounding's philox_ref, bit by bit.

    rng: int64 [3] = seed, step, micro-step. One Philox gives four neighbours their words.
    """
    group = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = group * 0
    step = zero + tl.load(rng + 1).to(tl.uint32)
    micro_step = zero + tl.load(rng + 2).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(rng), group, zero + stream.to(tl.uint32), step, micro_step)
    return tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK)


@triton.jit
def round_stochastically(value, random):
    """float32 whose lower 16 bits are zero, that is a bf16; infinities and NaN are left alone."""
    bits = value.to(tl.uint32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    bits = tl.where(is_finite, bits + (random & 0xFFFF), bits) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["stream"])
def stochastic_round_kernel(x, rng, stream, out, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(out + at, round_stochastically(value, noise(rng, stream, start, BLOCK)), mask=at < n)


def stochastic_round(x_n: torch.Tensor, rng: torch.Tensor, stream: int, out_n: torch.Tensor) -> None:
    """See ops/rounding. Moves 6 n bytes."""
    assert x_n.is_contiguous() and out_n.is_contiguous()
    grid = (cdiv(x_n.numel(), BLOCK),)
    stochastic_round_kernel[grid](x_n, rng, stream, out_n, x_n.numel(), BLOCK=BLOCK, num_warps=4)
