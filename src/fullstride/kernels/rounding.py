"""Counter-based noise and stochastic rounding to bf16: see ops/rounding."""
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv

BLOCK = 2048


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """Philox4x32-10 of a counter of four uint32: four words of uint32.

    tl.philox multiplies twice, for the upper and the lower half of each product; here both come from one instruction.
    """
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def noise(rng, stream, start, BLOCK: tl.constexpr):
    """uint32 [BLOCK], each below 2**16, for elements `start` (a multiple of 8) to start + BLOCK: noise_ref, bit by bit.

    rng: int64 [3] = seed, step, micro-step. One Philox gives eight neighbours, which are one thread's, their halves.
    """
    return noise_of_groups(rng, stream, (start // 8 + tl.arange(0, BLOCK // 8)).to(tl.uint32), BLOCK)


@triton.jit
def noise_of_groups(rng, stream, group, BLOCK: tl.constexpr):
    """The same for the elements of BLOCK // 8 groups of eight, whose numbers are `group`."""
    step, micro_step = tl.load(rng + 1).to(tl.uint32), tl.load(rng + 2).to(tl.uint32)
    w0, w1, w2, w3 = philox(tl.load(rng), group, stream.to(tl.uint32), step, micro_step)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.join(words & 0xFFFF, words >> 16).reshape(BLOCK)


@triton.jit
def round_stochastically(value, random):
    """float32 whose lower 16 bits are zero, that is a bf16; infinities and NaN are left alone."""
    bits = value.to(tl.uint32, bitcast=True)
    bits = tl.where(tl.abs(value) < float("inf"), bits + random, bits) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["stream"])
def stochastic_round_kernel(x, rng, stream, out, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(out + at, round_stochastically(value, noise(rng, stream, start, BLOCK)), mask=at < n)


def stochastic_round(x_n: torch.Tensor, rng: torch.Tensor, stream: int, out_n: torch.Tensor) -> None:
    """See ops/rounding. Moves 6 n bytes."""
    grid = (cdiv(x_n.numel(), BLOCK),)
    stochastic_round_kernel[grid](x_n, rng, stream, out_n, x_n.numel(), BLOCK=BLOCK, num_warps=4)
