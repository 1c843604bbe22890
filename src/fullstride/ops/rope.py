"""Rotary position embedding on the merged QKV (Su et al. 2021, arXiv 2104.09864), Qwen3's per-head RMS norm before it.

Rotation pairs element i of a head with element i + E/2 ("rotate half", as transformers does):

    out[i]       = x[i] * cos[p, i] - x[i + E/2] * sin[p, i]
    out[i + E/2] = x[i + E/2] * cos[p, i] + x[i] * sin[p, i]

with p the token's position within its document. The backward rotates by the opposite angle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fullstride.ops.numerics import check_rows, wide
from fullstride.ops.rms_norm import rms_norm_bwd_ref, rms_norm_fwd_ref


def rope_frequencies(
    head_dim: int, theta: float, llama3: tuple[float, float, float, int] | None = None
) -> torch.Tensor:
    """float64 [E/2] angular frequencies: theta ** (-2i / E), optionally with Llama 3's scaling.

    `llama3` is (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings). Wavelengths under
    original/high keep their frequency, those over original/low are divided by factor, between them it is interpolated
    (transformers, modeling_rope_utils).
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if llama3 is None:
        return frequency
    factor, low, high, original = llama3
    smooth = ((original * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return frequency * (smooth + (1 - smooth) / factor)


def rope_tables(frequency: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), float64 [num_positions, E/2]: a float32 angle would be off at large positions."""
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency
    return angle.cos(), angle.sin()


@dataclass(frozen=True)
class Rope:
    """What every layer's rotation shares: cos and sin [positions, E/2] (float32, or float64 beside float64) and eps."""

    cos: torch.Tensor
    sin: torch.Tensor
    norm_eps: float


def _rotate_ref(x_NHE: torch.Tensor, cos_NE2: torch.Tensor, sin_NE2: torch.Tensor) -> torch.Tensor:
    left, right = x_NHE.chunk(2, dim=-1)
    cos, sin = cos_NE2[:, None], sin_NE2[:, None]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def rope_fwd_ref(
    x_NHE: torch.Tensor, positions_N: torch.Tensor, rope: Rope, norm_E: torch.Tensor | None
) -> torch.Tensor:
    """Heads x_NHE normalised by norm_E (if any) and rotated."""
    x = wide(x_NHE)
    if norm_E is not None:
        x = rms_norm_fwd_ref(x.reshape(-1, x.shape[-1]), norm_E, rope.norm_eps)[0].view_as(x)
    return _rotate_ref(x, rope.cos[positions_N].to(x.dtype), rope.sin[positions_N].to(x.dtype))


def rope_bwd_ref(
    dx_NHE: torch.Tensor,
    raw_NHE: torch.Tensor | None,
    positions_N: torch.Tensor,
    rope: Rope,
    norm_E: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dx before norm and rotation, dnorm_E). raw_NHE, the heads before the norm, is needed only where norm_E is."""
    dx = wide(dx_NHE)
    dx = _rotate_ref(dx, rope.cos[positions_N].to(dx.dtype), -rope.sin[positions_N].to(dx.dtype))
    if norm_E is None:
        return dx, None
    assert raw_NHE is not None
    raw = wide(raw_NHE).reshape(-1, dx.shape[-1])
    rstd = torch.rsqrt(raw.square().mean(-1) + rope.norm_eps)
    dx_flat, dnorm_E = rms_norm_bwd_ref(dx.reshape(raw.shape), raw, norm_E, rstd)
    return dx_flat.view_as(dx), dnorm_E


def heads(x_NC: torch.Tensor, start: int, num: int, head_dim: int) -> torch.Tensor:
    """View of `num` heads from head number `start` of x_NC: [N, num, head_dim], rows strided as x_NC's are."""
    return x_NC[:, start * head_dim : (start + num) * head_dim].unflatten(1, (num, head_dim))


def rope_fwd(
    qkv_NC: torch.Tensor,
    positions_N: torch.Tensor,
    rope: Rope,
    q_norm_E: torch.Tensor | None,
    k_norm_E: torch.Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    out_NC: torch.Tensor,
) -> None:
    """Writes the normalised and rotated queries and keys of qkv_NC into the first (H+K)*E columns of out_NC.

    qkv_NC: [N, (H+2K)*E]; positions_N: int32. out_NC may be qkv_NC itself where there is no norm (the backward of the
    norm needs its input); values are neither read nor written.
    """
    assert out_NC is not qkv_NC or q_norm_E is None
    assert (q_norm_E is None) == (k_norm_E is None)
    check_rows(qkv_NC, positions_N, q_norm_E, k_norm_E, out_NC)
    if qkv_NC.is_cuda:
        from fullstride.kernels.rope import rope_fwd as kernel

        return kernel(qkv_NC, positions_N, rope, q_norm_E, k_norm_E, num_heads, num_kv_heads, out_NC)
    head_dim = 2 * rope.cos.shape[1]
    for start, num, norm_E in ((0, num_heads, q_norm_E), (num_heads, num_kv_heads, k_norm_E)):
        rotated = rope_fwd_ref(heads(qkv_NC, start, num, head_dim), positions_N, rope, norm_E)
        heads(out_NC, start, num, head_dim).copy_(rotated)


def rope_bwd(
    dq_NHE: torch.Tensor,
    dk_NKE: torch.Tensor,
    dv_NKE: torch.Tensor,
    qkv_NC: torch.Tensor | None,
    positions_N: torch.Tensor,
    rope: Rope,
    q_norm_E: torch.Tensor | None,
    k_norm_E: torch.Tensor | None,
    dqkv_NC: torch.Tensor,
    dq_norm_E: torch.Tensor | None,
    dk_norm_E: torch.Tensor | None,
    dbias_C: torch.Tensor | None,
) -> None:
    """Overwrites dqkv_NC (merged) from attention's dq, dk, dv; adds into dq_norm_E and dk_norm_E (None: frozen).

    Adds the sum of dqkv_NC over tokens, the gradient of the projection's bias, into dbias_C (None: there is none, or it
    is frozen); no model has both norms and that bias.

    qkv_NC, the product's output before norm and rotation, is read only where there is a norm; dqkv_NC may be qkv_NC. dv
    passes unchanged.
    dq, dk and dv may be strided in their first two dimensions.
    """
    assert dbias_C is None or q_norm_E is None
    assert (q_norm_E is None) == (k_norm_E is None)
    check_rows(dq_NHE, dk_NKE, dv_NKE, qkv_NC, positions_N, dqkv_NC, dq_norm_E, dk_norm_E, dbias_C)
    if dq_NHE.is_cuda:
        from fullstride.kernels.rope import rope_bwd as kernel

        norms = q_norm_E, k_norm_E
        return kernel(dq_NHE, dk_NKE, dv_NKE, qkv_NC, positions_N, rope, *norms, dqkv_NC, dq_norm_E, dk_norm_E, dbias_C)
    (_, num_heads, head_dim), num_kv_heads = dq_NHE.shape, dk_NKE.shape[1]
    for dx, start, norm_E, dnorm_E in (
        (dq_NHE, 0, q_norm_E, dq_norm_E),
        (dk_NKE, num_heads, k_norm_E, dk_norm_E),
    ):
        raw = None if qkv_NC is None else heads(qkv_NC, start, dx.shape[1], head_dim)
        dx_raw, dnorm = rope_bwd_ref(dx, raw, positions_N, rope, norm_E)
        heads(dqkv_NC, start, dx.shape[1], head_dim).copy_(dx_raw)
        if dnorm_E is not None and dnorm is not None:
            dnorm_E.add_(dnorm)
    heads(dqkv_NC, num_heads + num_kv_heads, num_kv_heads, head_dim).copy_(dv_NKE)
    if dbias_C is not None:
        dbias_C.copy_(wide(dbias_C) + wide(dqkv_NC).sum(0))
