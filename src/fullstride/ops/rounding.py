"""Counter-based noise, and stochastic rounding to bf16 with it.

The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Noise is keyed by
what it is for, never by call order: the key is the run's seed, the counter is

    (element // 8, stream, step, micro-step)

and of the four words that come out, element e takes half of word e % 8 // 2: the lower half where e is even, the upper
where it is odd. `stream` names the tensor (see `stream`). seed, step and micro-step live in one int64 tensor [3] on the
device, so a captured graph sees new values.
"""

from __future__ import annotations

import torch

# purposes: two uses of one tensor never share noise
DROPOUT, WEIGHT_ROUNDING, MASTER_ROUNDING, M_ROUNDING, V_ROUNDING, GRAD_ROUNDING, RECEIVED_ROUNDING = range(7)

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # Philox4x32 multipliers and key increments, as published
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def stream(purpose: int, tensor: int) -> int:
    """The stream number of one use of one tensor, below 2**31."""
    assert 0 <= purpose < 64 and 0 <= tensor < 1 << 24
    return purpose << 24 | tensor


def philox_ref(rng: torch.Tensor, stream: int, num_counters: int, first: int = 0) -> torch.Tensor:
    """int64 [4 * num_counters], uint32 words for the counters (first, stream, step, micro-step), first + 1, ...

    rng: int64 [3] = seed, step, micro-step.
    """
    seed, step, micro_step = rng.tolist()
    c0 = torch.arange(num_counters, dtype=torch.int64) + first & _MASK
    c1 = torch.full_like(c0, stream)
    c2, c3 = torch.full_like(c0, step & _MASK), torch.full_like(c0, micro_step & _MASK)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        # int64 products wrap modulo 2**64, which keeps the bits that are needed
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return torch.stack([c0, c1, c2, c3], dim=1).view(-1)


def noise_ref(rng: torch.Tensor, stream: int, numel: int, first: int = 0) -> torch.Tensor:
    """int64 [numel], each in [0, 2**16): the noise of elements first .. first+numel-1."""
    skipped = first % 8
    words = philox_ref(rng, stream, (skipped + numel + 7) // 8, first // 8)
    return torch.stack([words & 0xFFFF, words >> 16], dim=1).view(-1)[skipped : skipped + numel]


def stochastic_round_ref(x_n: torch.Tensor, noise_n: torch.Tensor) -> torch.Tensor:
    """bf16 [n] from float32 x_n: up or down with the probability that makes the mean right.

    The noise is added to the float's bits before the lower half is cut off; infinities and NaN are left alone.
    """
    bits = x_n.float().contiguous().view(torch.int32)
    rounded = bits + noise_n.to(torch.int32)
    bits = torch.where(torch.isfinite(x_n), rounded, bits) & -65536
    return bits.view(torch.float32).to(torch.bfloat16)


def stochastic_round(x_n: torch.Tensor, rng: torch.Tensor, stream: int, out_n: torch.Tensor) -> None:
    """Overwrites out_n (bf16, contiguous) with x_n (float32, contiguous), stochastically rounded."""
    assert x_n.is_contiguous() and out_n.is_contiguous()
    if x_n.is_cuda:
        from fullstride.kernels.rounding import stochastic_round as kernel

        return kernel(x_n, rng, stream, out_n)
    noise = noise_ref(rng, stream, x_n.numel())
    out_n.copy_(stochastic_round_ref(x_n.reshape(-1), noise).view_as(out_n))
