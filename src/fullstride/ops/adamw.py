"""AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), as torch.optim.AdamW computes it, over flat buffers.

    g = grad * grad_scale
    w = w * (1 - lr * weight_decay)                          (decayed tensors only)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g ** 2
    w = w - lr / (1 - beta1 ** step) * m / (sqrt(v) / sqrt(1 - beta2 ** step) + eps)

w is the master copy where there is one, else the parameter. What is stored in bf16 is rounded stochastically; a
parameter beside a float32 master is rounded to nearest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullstride.ops.numerics import wide
from fullstride.ops.rounding import (
    M_ROUNDING,
    MASTER_ROUNDING,
    V_ROUNDING,
    WEIGHT_ROUNDING,
    noise_ref,
    stochastic_round_ref,
    stream,
)

# elements of the float64 tensor `hyper`
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, BIAS_CORRECTION1, BIAS_CORRECTION2, GRAD_SCALE = range(8)


def hyper_values(
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int
) -> tuple[float, ...]:
    """The first seven elements of `hyper`: the host knows them; the eighth, GRAD_SCALE, is computed on the device."""
    return lr, beta1, beta2, eps, weight_decay, 1 - beta1**step, 1 - beta2**step


@dataclass(frozen=True)
class AdamWBuffers:
    """Flat buffers [n] of one group of tensors: parameter, its master copy (or None), gradient, the two moments.

    `tensor` numbers what the group is a piece of, and `first` (a multiple of 8) its first element there, for the noise.
    """

    param: torch.Tensor
    master: torch.Tensor | None
    grad: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    tensor: int
    first: int = 0

    @property
    def streams(self) -> tuple[int, int, int]:
        """Noise streams of what is updated: the weights (the master copy where there is one), m and v."""
        weight = WEIGHT_ROUNDING if self.master is None else MASTER_ROUNDING
        return stream(weight, self.tensor), stream(M_ROUNDING, self.tensor), stream(V_ROUNDING, self.tensor)


def adamw_ref(
    w: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, hyper: torch.Tensor, decay: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(w, m, v) after the step, unrounded. hyper: float64 [8]."""
    w, g, m, v = wide(w), wide(grad), wide(m), wide(v)
    lr, beta1, beta2, eps, weight_decay, correction1, correction2, grad_scale = hyper.tolist()
    g = g * grad_scale
    if decay:
        w = w * (1 - lr * weight_decay)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    return w - lr / correction1 * m / (v.sqrt() / correction2**0.5 + eps), m, v


def _store(out: torch.Tensor, value: torch.Tensor, rng: torch.Tensor, stream: int, first: int) -> None:
    if out.dtype == torch.bfloat16:
        out.copy_(stochastic_round_ref(value, noise_ref(rng, stream, value.numel(), first)))
    else:
        out.copy_(value)


def adamw(b: AdamWBuffers, hyper: torch.Tensor, decay: bool, rng: torch.Tensor) -> None:
    """Overwrites param, master, m and v. hyper: float64 [8] on the device; rng: see ops/rounding."""
    if b.param.is_cuda:
        from fullstride.kernels.adamw import adamw as kernel

        return kernel(b, hyper, decay, rng)
    w = b.param if b.master is None else b.master
    new_w, new_m, new_v = adamw_ref(w, b.grad, b.m, b.v, hyper, decay)
    w_stream, m_stream, v_stream = b.streams
    _store(w, new_w, rng, w_stream, b.first)
    _store(b.m, new_m, rng, m_stream, b.first)
    _store(b.v, new_v, rng, v_stream, b.first)
    if b.master is not None:
        b.param.copy_(b.master)
