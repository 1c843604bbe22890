"""A kernel that shows the noise of kernels/rounding; imported inside the test, when the interpreter is set."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fullstride.kernels.rounding import noise


@triton.jit(do_not_specialize=["stream"])
def noise_kernel(rng, stream, out, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    tl.store(out + at, noise(rng, stream, start, BLOCK).to(tl.int64), mask=at < n)


def show_noise(rng: torch.Tensor, stream: int, out_n: torch.Tensor) -> None:
    """Overwrites out_n (int64) with the noise of its elements."""
    block: Any = 256
    noise_kernel[(-(-out_n.numel() // block),)](rng, stream, out_n, out_n.numel(), BLOCK=block)
