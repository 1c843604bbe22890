"""A kernel that shows the noise of kernels/rounding; imported inside the test, when the interpreter is set."""

from __future__ import annotations

import triton
import triton.language as tl

from fullstride.kernels.rounding import noise


@triton.jit(do_not_specialize=["stream"])
def noise_kernel(rng, stream, out, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    tl.store(out + at, noise(rng, stream, start, BLOCK).to(tl.int64), mask=at < n)
