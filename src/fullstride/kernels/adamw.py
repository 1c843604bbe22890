"""AdamW over flat buffers, one pass: see ops/adamw."""
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv
from fullstride.kernels.rounding import noise, round_stochastically

if TYPE_CHECKING:
    from fullstride.ops.adamw import AdamWBuffers

BLOCK = 1024


@triton.jit
def store_rounded(pointer, at, value, n, rng, stream, start, first, BLOCK: tl.constexpr):
    """Stores float32 `value`, rounded stochastically where the tensor is bf16, and returns what was stored.

    at = start .. start + BLOCK in the tensor, whose own first element is number `first` for the noise.
    """
    if pointer.dtype.element_ty == tl.bfloat16:
        value = round_stochastically(value, noise(rng, stream, first.to(tl.int64) + start, BLOCK))
    tl.store(pointer + at, value, mask=at < n)
    return value


@triton.jit(do_not_specialize=["w_stream", "m_stream", "v_stream", "first"])
def adamw_kernel(
    param,
    master,
    grad,
    m_buffer,
    v_buffer,
    hyper,
    rng,
    w_stream,
    m_stream,
    v_stream,
    first,
    n,
    DECAY: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # differences are taken in float64, where 1 - beta2 keeps its digits; quotients lose none in float32
    lr, beta1, beta2 = tl.load(hyper), tl.load(hyper + 1), tl.load(hyper + 2)
    rest1, rest2 = (1 - beta1).to(tl.float32), (1 - beta2).to(tl.float32)
    beta1, beta2 = beta1.to(tl.float32), beta2.to(tl.float32)
    eps = tl.load(hyper + 3).to(tl.float32)
    shrink = (1 - lr * tl.load(hyper + 4)).to(tl.float32)
    step_size = lr.to(tl.float32) / tl.load(hyper + 5).to(tl.float32)
    root_correction2 = tl.sqrt(tl.load(hyper + 6).to(tl.float32))
    grad_scale = tl.load(hyper + 7).to(tl.float32)

    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    mask = at < n
    w = tl.load((master if HAS_MASTER else param) + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32) * grad_scale
    m = beta1 * tl.load(m_buffer + at, mask=mask, other=0.0).to(tl.float32) + rest1 * g
    v = beta2 * tl.load(v_buffer + at, mask=mask, other=0.0).to(tl.float32) + rest2 * g * g
    if DECAY:
        w *= shrink
    w -= step_size * m / (tl.sqrt(v) * (1 / root_correction2) + eps)
    store_rounded(m_buffer, at, m, n, rng, m_stream, start, first, BLOCK)
    store_rounded(v_buffer, at, v, n, rng, v_stream, start, first, BLOCK)
    if HAS_MASTER:
        w = store_rounded(master, at, w, n, rng, w_stream, start, first, BLOCK)
        tl.store(param + at, w, mask=mask)
    else:
        store_rounded(param, at, w, n, rng, w_stream, start, first, BLOCK)


def adamw(b: AdamWBuffers, hyper: torch.Tensor, decay: bool, rng: torch.Tensor) -> None:
    """See ops/adamw. Reads and writes w, m and v, reads the gradient, writes the parameter: 14 n bytes all in bf16,
    28 n with float32 master and moments. Noise is drawn only for what is stored in bf16.
    """
    w_stream, m_stream, v_stream = b.streams
    n = b.param.numel()
    adamw_kernel[(cdiv(n, BLOCK),)](
        b.param,
        b.param if b.master is None else b.master,
        b.grad,
        b.m,
        b.v,
        hyper,
        rng,
        w_stream,
        m_stream,
        v_stream,
        b.first,
        n,
        DECAY=decay,
        HAS_MASTER=b.master is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )
