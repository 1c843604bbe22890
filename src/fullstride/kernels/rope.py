"""Rotary position embedding on the merged QKV, with Qwen3's norm of each head: see ops/rope.

A program takes some heads of a token, as a left and a right half of [heads, E/2].
"""
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv, next_power_of_2, num_sms, num_warps
from fullstride.kernels.partials import add_partials

if TYPE_CHECKING:
    from fullstride.ops.rope import Rope

# of the backward where it sums gradients: programs on a multiprocessor, and tokens on their way from memory in each,
# of which a norm needs twice the bytes
PROGRAMS, STAGES, NORM_STAGES = 4, 4, 3


@triton.jit
def norm_weight(norms, is_query, cols, HALF: tl.constexpr):
    """Left and right half of the norm's weight, for queries or for keys."""
    weight = tl.where(is_query, norms[0], norms[1]) + cols
    left = tl.load(weight, mask=cols < HALF, other=0.0).to(tl.float32)
    return left, tl.load(weight + HALF, mask=cols < HALF, other=0.0).to(tl.float32)


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
        w_left, w_right = norm_weight((q_norm, k_norm), heads < H, cols, HALF)
        left *= rstd * w_left
        right *= rstd * w_right
    angle = tl.load(positions + token).to(tl.int64) * HALF + cols
    cos = tl.load(cos_table + angle, mask=in_head, other=0.0)
    sin = tl.load(sin_table + angle, mask=in_head, other=0.0)
    tl.store(out + token * out_stride + offsets, left * cos - right * sin, mask=mask)
    tl.store(out + token * out_stride + HALF + offsets, right * cos + left * sin, mask=mask)


@triton.jit
def normalise(raw, mask, eps, HALF: tl.constexpr):
    """(left, right, 1/rms) of heads, normalised but not weighted."""
    left = tl.load(raw, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(raw + HALF, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(left * left + right * right, axis=1) / (2 * HALF) + eps)[:, None]
    return left * rstd, right * rstd, rstd


@triton.jit
def norm_back(g_left, g_right, xhat_left, xhat_right, rstd, E: tl.constexpr):
    """The norm's backward, a head a row: see ops/rms_norm."""
    mean = tl.sum(g_left * xhat_left + g_right * xhat_right, axis=1)[:, None] / E
    return rstd * (g_left - xhat_left * mean), rstd * (g_right - xhat_right * mean)


@triton.jit
def source_of(sources, token_strides, head_strides, token, heads, H: tl.constexpr, K: tl.constexpr):
    """Pointers to heads of a token, in dq, dk or dv."""
    q = sources[0] + token * token_strides[0] + heads * head_strides[0]
    k = sources[1] + token * token_strides[1] + (heads - H) * head_strides[1]
    v = sources[2] + token * token_strides[2] + (heads - H - K) * head_strides[2]
    return tl.where(heads < H, q, tl.where(heads < H + K, k, v))


@triton.jit
def store_halves(to, left, right, mask, HALF: tl.constexpr):
    """Both halves of heads."""
    tl.store(to, left, mask=mask)
    tl.store(to + HALF, right, mask=mask)


@triton.jit
def store_norm_sums(partial, left, right, heads, H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr):
    """A program's sums for the norm of the queries, and [rows] further for that of the keys."""
    rows = tl.num_programs(0) * tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    cols = tl.arange(0, left.shape[1])
    for is_key in tl.static_range(2):
        mine = (heads >= H) & (heads < H + K) if is_key else heads < H
        to = partial + (is_key * rows + row) * (2 * HALF) + cols
        tl.store(to, tl.sum(tl.where(mine, left, 0.0), axis=0), mask=cols < HALF)
        tl.store(to + HALF, tl.sum(tl.where(mine, right, 0.0), axis=0), mask=cols < HALF)


@triton.jit
def rope_bwd_kernel(
    sources,
    token_strides,
    head_strides,
    qkv,
    qkv_stride,
    positions,
    tables,
    norms,
    dqkv,
    dqkv_stride,
    partial,
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
    heads = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    cols = tl.arange(0, BLOCK_HALF)[None, :]
    in_head, is_rotated = cols < HALF, heads < H + K
    mask = (heads < H + 2 * K) & in_head
    column = heads * (2 * HALF) + cols
    if HAS_NORM:
        w_left, w_right = norm_weight(norms, heads < H, cols, HALF)
    acc_left = tl.zeros([BLOCK_HEADS, BLOCK_HALF], tl.float32)
    acc_right = tl.zeros([BLOCK_HEADS, BLOCK_HALF], tl.float32)
    for turn in tl.range(tl.program_id(0), N, tl.num_programs(0), num_stages=STAGES):
        token = tl.cast(turn, tl.int64)
        source = source_of(sources, token_strides, head_strides, token, heads, H, K) + cols
        left = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        angle = tl.load(positions + token).to(tl.int64) * HALF + cols
        cos = tl.load(tables[0] + angle, mask=in_head, other=0.0)
        sin = tl.load(tables[1] + angle, mask=in_head, other=0.0)
        dleft, dright = left * cos + right * sin, right * cos - left * sin
        if HAS_NORM:
            raw = qkv + token * qkv_stride + column
            xhat_left, xhat_right, rstd = normalise(raw, is_rotated & in_head, eps, HALF)
            if HAS_WEIGHT_GRAD:
                acc_left += dleft * xhat_left
                acc_right += dright * xhat_right
            dleft, dright = norm_back(dleft * w_left, dright * w_right, xhat_left, xhat_right, rstd, 2 * HALF)
        dleft, dright = tl.where(is_rotated, dleft, left), tl.where(is_rotated, dright, right)
        if HAS_BIAS_GRAD:
            acc_left += dleft
            acc_right += dright
        store_halves(dqkv + token * dqkv_stride + column, dleft, dright, mask, HALF)
    if HAS_BIAS_GRAD:
        row = partial + tl.program_id(0).to(tl.int64) * ((H + 2 * K) * 2 * HALF)
        store_halves(row + column, acc_left, acc_right, mask, HALF)
    if HAS_WEIGHT_GRAD:
        store_norm_sums(partial, acc_left, acc_right, heads, H, K, HALF)


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
    num_tokens, width = dqkv_NC.shape
    block_heads, *_ = _tile(width // dq_NHE.shape[2], rope.cos.shape[1])
    head_blocks = cdiv(width // dq_NHE.shape[2], block_heads)
    num_programs, partial = num_tokens, None
    has_weight_grad = dq_norm_E is not None or dk_norm_E is not None
    if has_weight_grad or dbias_C is not None:
        num_programs = min(num_tokens, cdiv(PROGRAMS * num_sms(dqkv_NC), head_blocks))
        shape = (2, num_programs * head_blocks, dq_NHE.shape[2]) if has_weight_grad else (num_programs, width)
        partial = torch.empty(shape, dtype=torch.float32, device=dqkv_NC.device)
    raw_NC = dqkv_NC if qkv_NC is None else qkv_NC
    norms = None if q_norm_E is None or k_norm_E is None else (q_norm_E, k_norm_E)
    grid = num_programs, head_blocks
    _launch_bwd(grid, (dq_NHE, dk_NKE, dv_NKE), raw_NC, positions_N, rope, norms, dqkv_NC, partial)
    if dbias_C is not None and partial is not None:
        add_partials(partial, dbias_C)
    elif partial is not None:
        for share, dnorm_E in zip(partial, (dq_norm_E, dk_norm_E), strict=True):
            if dnorm_E is not None:
                add_partials(share, dnorm_E)


def _launch_bwd(
    grid: tuple[int, int],
    sources: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    raw_NC: torch.Tensor,
    positions_N: torch.Tensor,
    rope: Rope,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    dqkv_NC: torch.Tensor,
    partial: torch.Tensor | None,
) -> None:
    """sources: dq, dk, dv. A kernel's pointer that it does not use is some tensor's."""
    (num_tokens, num_heads, head_dim), num_kv_heads = sources[0].shape, sources[1].shape[1]
    block_heads, block_half, warps = _tile(num_heads + 2 * num_kv_heads, head_dim // 2)
    rope_bwd_kernel[grid](
        sources,
        tuple(x.stride(0) for x in sources),
        tuple(x.stride(1) for x in sources),
        raw_NC,
        raw_NC.stride(0),
        positions_N,
        (rope.cos, rope.sin),
        norms or (raw_NC, raw_NC),
        dqkv_NC,
        dqkv_NC.stride(0),
        rope.cos if partial is None else partial,
        rope.norm_eps,
        num_tokens,
        H=num_heads,
        K=num_kv_heads,
        HALF=head_dim // 2,
        HAS_NORM=norms is not None,
        HAS_WEIGHT_GRAD=partial is not None and norms is not None,
        HAS_BIAS_GRAD=partial is not None and norms is None,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        STAGES=1 if partial is None else STAGES if norms is None else NORM_STAGES,
        num_warps=warps,
    )
