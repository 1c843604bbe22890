"""Rotary position embedding on the merged QKV, with Qwen3's norm of each head: see ops/rope.

A program takes some heads of a token, as a left and a right half of [heads, E/2].
"""
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv, next_power_of_2, num_sms, num_warps
from fullstride.kernels.partials import add_partials

if TYPE_CHECKING:
    from fullstride.ops.rope import Rope


@triton.jit
def select_weight(q_norm, k_norm, is_query, cols, in_head):
    """The norm's weight of each head: [heads, E/2]."""
    q_weight = tl.load(q_norm + cols, mask=in_head, other=0.0).to(tl.float32)
    k_weight = tl.load(k_norm + cols, mask=in_head, other=0.0).to(tl.float32)
    return tl.where(is_query, q_weight, k_weight)


@triton.jit
def rope_fwd_kernel(
    qkv,
    positions,
    cos_table,
    sin_table,
    q_norm,
    k_norm,
    out,
    qkv_stride,
    out_stride,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    cols = tl.arange(0, BLOCK_HALF)[None, :]
    in_head = cols < HALF
    mask = (heads < H + K) & in_head
    offsets = heads * (2 * HALF) + cols
    left = tl.load(qkv + token * qkv_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(qkv + token * qkv_stride + HALF + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(left * left + right * right, axis=1) / (2 * HALF) + eps)[:, None]
        left *= rstd * select_weight(q_norm, k_norm, heads < H, cols, in_head)
        right *= rstd * select_weight(q_norm + HALF, k_norm + HALF, heads < H, cols, in_head)
    angle = tl.load(positions + token).to(tl.int64) * HALF + cols
    cos = tl.load(cos_table + angle, mask=in_head, other=0.0)
    sin = tl.load(sin_table + angle, mask=in_head, other=0.0)
    tl.store(out + token * out_stride + offsets, left * cos - right * sin, mask=mask)
    tl.store(out + token * out_stride + HALF + offsets, right * cos + left * sin, mask=mask)


@triton.jit
def rope_bwd_kernel(
    dq,
    dk,
    dv,
    qkv,
    positions,
    cos_table,
    sin_table,
    q_norm,
    k_norm,
    dqkv,
    partial,
    dq_token,
    dk_token,
    dv_token,
    qkv_stride,
    dqkv_stride,
    dq_head,
    dk_head,
    dv_head,
    eps,
    N,
    H: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_WEIGHT_GRAD: tl.constexpr,
    HAS_BIAS_GRAD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    cols = tl.arange(0, BLOCK_HALF)[None, :]
    in_head = cols < HALF
    is_rotated = heads < H + K
    mask = (heads < H + 2 * K) & in_head
    offsets = heads * (2 * HALF) + cols
    if HAS_NORM:
        w_left = select_weight(q_norm, k_norm, heads < H, cols, in_head)
        w_right = select_weight(q_norm + HALF, k_norm + HALF, heads < H, cols, in_head)
    acc_left = tl.zeros([BLOCK_HEADS, BLOCK_HALF], tl.float32)
    acc_right = tl.zeros([BLOCK_HEADS, BLOCK_HALF], tl.float32)
    for turn in tl.range(pid, N, tl.num_programs(0), num_stages=STAGES):
        token = tl.cast(turn, tl.int64)
        from_q = dq + token * dq_token + heads * dq_head
        from_k = dk + token * dk_token + (heads - H) * dk_head
        from_v = dv + token * dv_token + (heads - H - K) * dv_head
        source = tl.where(heads < H, from_q, tl.where(is_rotated, from_k, from_v)) + cols
        left = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        angle = tl.load(positions + token).to(tl.int64) * HALF + cols
        cos = tl.load(cos_table + angle, mask=in_head, other=0.0)
        sin = tl.load(sin_table + angle, mask=in_head, other=0.0)
        dleft = left * cos + right * sin
        dright = right * cos - left * sin
        if HAS_NORM:
            raw = qkv + token * qkv_stride + offsets
            xhat_left = tl.load(raw, mask=is_rotated & in_head, other=0.0).to(tl.float32)
            xhat_right = tl.load(raw + HALF, mask=is_rotated & in_head, other=0.0).to(tl.float32)
            square = xhat_left * xhat_left + xhat_right * xhat_right
            rstd = tl.rsqrt(tl.sum(square, axis=1) / (2 * HALF) + eps)[:, None]
            xhat_left *= rstd
            xhat_right *= rstd
            if HAS_WEIGHT_GRAD:
                acc_left += dleft * xhat_left
                acc_right += dright * xhat_right
            dleft *= w_left
            dright *= w_right
            mean = tl.sum(dleft * xhat_left + dright * xhat_right, axis=1)[:, None] / (2 * HALF)
            dleft = rstd * (dleft - xhat_left * mean)
            dright = rstd * (dright - xhat_right * mean)
        dleft = tl.where(is_rotated, dleft, left)
        dright = tl.where(is_rotated, dright, right)
        if HAS_BIAS_GRAD:
            acc_left += dleft
            acc_right += dright
        target = dqkv + token * dqkv_stride + offsets
        tl.store(target, dleft, mask=mask)
        tl.store(target + HALF, dright, mask=mask)
    if HAS_BIAS_GRAD:
        to = partial + pid * ((H + 2 * K) * 2 * HALF) + offsets
        tl.store(to, acc_left, mask=mask)
        tl.store(to + HALF, acc_right, mask=mask)
    if HAS_WEIGHT_GRAD:
        rows = tl.num_programs(0) * tl.num_programs(1)
        row = pid * tl.num_programs(1) + tl.program_id(1)
        for is_key in tl.static_range(2):
            mine = (heads >= H) & is_rotated if is_key else heads < H
            to = partial + (is_key * rows + row) * (2 * HALF) + tl.arange(0, BLOCK_HALF)
            within = tl.arange(0, BLOCK_HALF) < HALF
            tl.store(to, tl.sum(tl.where(mine, acc_left, 0.0), axis=0), mask=within)
            tl.store(to + HALF, tl.sum(tl.where(mine, acc_right, 0.0), axis=0), mask=within)


def _tile(num_heads: int, half: int) -> tuple[int, int, int]:
    """(heads, columns of half a head, warps) of a program: 1024 elements a half, 8 a thread, or fewer."""
    block_half = next_power_of_2(half)
    block_heads = min(next_power_of_2(num_heads), max(1, 1024 // block_half))
    return block_heads, block_half, num_warps(block_heads * block_half, 8)


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
    """See ops/rope. Rows may be strided. Moves 2 N (H + K) E elements."""
    assert (q_norm_E is None) == (k_norm_E is None)
    assert qkv_NC.stride(1) == out_NC.stride(1) == 1
    half = rope.cos.shape[1]
    block_heads, block_half, warps = _tile(num_heads + num_kv_heads, half)
    rope_fwd_kernel[(qkv_NC.shape[0], cdiv(num_heads + num_kv_heads, block_heads))](
        qkv_NC,
        positions_N,
        rope.cos,
        rope.sin,
        rope.cos if q_norm_E is None else q_norm_E,
        rope.cos if k_norm_E is None else k_norm_E,
        out_NC,
        qkv_NC.stride(0),
        out_NC.stride(0),
        rope.norm_eps,
        H=num_heads,
        K=num_kv_heads,
        HALF=half,
        HAS_NORM=q_norm_E is not None,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        num_warps=warps,
    )


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
    """See ops/rope. Moves 2 N (H + 2K) E elements, and with a norm N (H + K) E more.

    Where the norm's weights or the bias train, a fixed number of programs loop over tokens and keep their shares of
    those gradients in registers; otherwise there is a program for each token.
    """
    assert dbias_C is None or q_norm_E is None
    assert (q_norm_E is None) == (k_norm_E is None)
    assert dq_NHE.stride(2) == dk_NKE.stride(2) == dv_NKE.stride(2) == dqkv_NC.stride(1) == 1
    (num_tokens, num_heads, head_dim), num_kv_heads = dq_NHE.shape, dk_NKE.shape[1]
    raw = dqkv_NC if qkv_NC is None else qkv_NC
    block_heads, block_half, warps = _tile(num_heads + 2 * num_kv_heads, head_dim // 2)
    head_blocks = cdiv(num_heads + 2 * num_kv_heads, block_heads)
    num_programs, partial = num_tokens, None
    has_weight_grad = dq_norm_E is not None or dk_norm_E is not None
    if has_weight_grad or dbias_C is not None:
        num_programs = min(num_tokens, cdiv(4 * num_sms(dqkv_NC), head_blocks))
        norms = (2, num_programs * head_blocks, head_dim)
        shape = norms if has_weight_grad else (num_programs, dqkv_NC.shape[1])
        partial = torch.empty(shape, dtype=torch.float32, device=dqkv_NC.device)
    rope_bwd_kernel[(num_programs, head_blocks)](
        dq_NHE,
        dk_NKE,
        dv_NKE,
        raw,
        positions_N,
        rope.cos,
        rope.sin,
        rope.cos if q_norm_E is None else q_norm_E,
        rope.cos if k_norm_E is None else k_norm_E,
        dqkv_NC,
        rope.cos if partial is None else partial,
        dq_NHE.stride(0),
        dk_NKE.stride(0),
        dv_NKE.stride(0),
        raw.stride(0),
        dqkv_NC.stride(0),
        dq_NHE.stride(1),
        dk_NKE.stride(1),
        dv_NKE.stride(1),
        rope.norm_eps,
        num_tokens,
        H=num_heads,
        K=num_kv_heads,
        HALF=head_dim // 2,
        HAS_NORM=q_norm_E is not None,
        HAS_WEIGHT_GRAD=has_weight_grad,
        HAS_BIAS_GRAD=dbias_C is not None,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        STAGES=1 if partial is None else 3,
        num_warps=warps,
    )
    if dbias_C is not None and partial is not None:
        add_partials(partial, dbias_C)
    elif partial is not None:
        for share, dnorm_E in zip(partial, (dq_norm_E, dk_norm_E), strict=True):
            if dnorm_E is not None:
                add_partials(share, dnorm_E)
