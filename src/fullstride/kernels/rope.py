"""Rotary position embedding on the merged QKV, with Qwen3's norm of each head: see ops/rope.

A head is a left and a right half. A program takes some heads of a token, [heads, E/2]; in the backward, some heads of
some tokens, [tokens, E/2] at a time.
"""
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv, next_power_of_2, num_warps
from fullstride.kernels.partials import add_partials

if TYPE_CHECKING:
    from fullstride.ops.rope import Rope

# of the backward
TILE = 1024  # halves of heads: tokens times E / 2
HEADS = 8  # of a program, at most
PER_THREAD = 16


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
def select(kind, of_kinds):
    """The scalar of queries (kind 0), keys (1) or values (2)."""
    return tl.where(kind == 0, of_kinds[0], tl.where(kind == 1, of_kinds[1], of_kinds[2]))


@triton.jit
def place(H: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr):
    """(block of tokens, kind, first head and end within the kind, row of the norm's sums) of a program."""
    q_groups: tl.constexpr = (H + HEADS - 1) // HEADS
    k_groups: tl.constexpr = (K + HEADS - 1) // HEADS
    groups: tl.constexpr = q_groups + 2 * k_groups
    block, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    kind = (group >= q_groups).to(tl.int32) + (group >= q_groups + k_groups).to(tl.int32)
    group -= select(kind, (0, q_groups, q_groups + k_groups))
    num_blocks = tl.num_programs(0) // groups
    # the rows of the queries come first
    row = select(kind, (block * q_groups, num_blocks * q_groups + block * k_groups, 0)) + group
    return block, kind, group * HEADS, tl.minimum((group + 1) * HEADS, select(kind, (H, K, K))), row


@triton.jit
def angles(positions, tables, kind, tokens, cols, in_tile, N, HALF: tl.constexpr):
    """(cos, sin) of each token; values are not rotated."""
    position = tl.load(positions + tokens, mask=tokens < N, other=0).to(tl.int64)
    is_rotated = in_tile & (kind < 2)
    cos = tl.load(tables[0] + position * HALF + cols, mask=is_rotated, other=1.0)
    return cos, tl.load(tables[1] + position * HALF + cols, mask=is_rotated, other=0.0)


@triton.jit
def store_sums(row, cols, left, right, HALF: tl.constexpr):
    """Sums over the tile's tokens into a row of partial sums."""
    tl.store(row + cols, tl.sum(left, axis=0)[None, :], mask=cols < HALF)
    tl.store(row + HALF + cols, tl.sum(right, axis=0)[None, :], mask=cols < HALF)


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
    bias_sums,
    norm_sums,
    eps,
    N,
    H: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_WEIGHT_GRAD: tl.constexpr,
    HAS_BIAS_GRAD: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    block, kind, begin, end, norm_row = place(H, K, HEADS)
    tokens = (block * TOKENS + tl.arange(0, TOKENS))[:, None].to(tl.int64)
    cols = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (tokens < N) & (cols < HALF)
    cos, sin = angles(positions, tables, kind, tokens, cols, mask, N, HALF)
    w_left, w_right = norm_weight(norms, kind == 0, cols, HALF)
    acc_left = tl.zeros([TOKENS, BLOCK_HALF], tl.float32)
    acc_right = tl.zeros([TOKENS, BLOCK_HALF], tl.float32)
    source = select(kind, sources) + tokens * select(kind, token_strides) + cols
    head_stride = select(kind, head_strides).to(tl.int64)
    for head in range(begin, end):
        column = (select(kind, (0, H, H + K)) + head) * (2 * HALF)
        left = tl.load(source + head * head_stride, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(source + head * head_stride + HALF, mask=mask, other=0.0).to(tl.float32)
        dleft, dright = left * cos + right * sin, right * cos - left * sin
        if HAS_NORM and kind < 2:
            raw = qkv + tokens * qkv_stride + column + cols
            xhat_left, xhat_right, rstd = normalise(raw, mask, eps, HALF)
            if HAS_WEIGHT_GRAD:
                acc_left += dleft * xhat_left
                acc_right += dright * xhat_right
            dleft, dright = norm_back(dleft * w_left, dright * w_right, xhat_left, xhat_right, rstd, 2 * HALF)
        target = dqkv + tokens * dqkv_stride + column + cols
        tl.store(target, dleft, mask=mask)
        tl.store(target + HALF, dright, mask=mask)
        if HAS_BIAS_GRAD:
            store_sums(bias_sums + block.to(tl.int64) * ((H + 2 * K) * 2 * HALF) + column, cols, dleft, dright, HALF)
    if HAS_WEIGHT_GRAD and kind < 2:
        store_sums(norm_sums + norm_row.to(tl.int64) * (2 * HALF), cols, acc_left, acc_right, HALF)


def _tile(num_heads: int, half: int) -> tuple[int, int, int]:
    """(heads, columns of half a head, warps) of a program: 1024 elements a half, 8 a thread, or fewer."""
    block_half = next_power_of_2(half)
    block_heads = min(next_power_of_2(num_heads), max(1, 1024 // block_half))
    return block_heads, block_half, num_warps(block_heads * block_half, 8)


def _bwd_tile(half: int, has_norm: bool) -> tuple[int, int]:
    """(tokens, warps) of a program of the backward."""
    block_half = next_power_of_2(half)
    tokens = max(1, TILE // block_half)
    return tokens, num_warps(tokens * block_half, PER_THREAD // 2 if has_norm else PER_THREAD)


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
    """See ops/rope. Moves 2 N (H + 2K) E elements, with a norm N (H + K) E more, and with a bias 8 bytes of sums for
    every column of every block of tokens.

    A program takes some tokens and some heads, all queries, all keys or all values, one head after the other: the
    angles, which are float32, are read once for them all. The gradients of norms and bias are summed over each
    program's tokens first, and over programs by add_partials.
    """
    assert dbias_C is None or q_norm_E is None
    assert (q_norm_E is None) == (k_norm_E is None)
    tokens, _ = _bwd_tile(rope.cos.shape[1], q_norm_E is not None)
    blocks = cdiv(dq_NHE.shape[0], tokens)
    # one row of partial sums for each block and each group of heads; those of the bias are as wide as dqkv
    rows = [blocks * cdiv(dx.shape[1], HEADS) for dx in (dq_NHE, dk_NKE)]
    sums = partial(torch.empty, dtype=torch.float32, device=dqkv_NC.device)
    bias_sums = None if dbias_C is None else sums(blocks, dqkv_NC.shape[1])
    norm_sums = None if dq_norm_E is None and dk_norm_E is None else sums(sum(rows), dq_NHE.shape[2])
    raw_NC = dqkv_NC if qkv_NC is None else qkv_NC
    norms = None if q_norm_E is None or k_norm_E is None else (q_norm_E, k_norm_E)
    _launch_bwd((dq_NHE, dk_NKE, dv_NKE), raw_NC, positions_N, rope, norms, dqkv_NC, bias_sums, norm_sums)
    if dbias_C is not None and bias_sums is not None:
        add_partials(bias_sums, dbias_C)
    if norm_sums is not None:
        for share, dnorm_E in zip(norm_sums.split(rows), (dq_norm_E, dk_norm_E), strict=True):
            if dnorm_E is not None:
                add_partials(share, dnorm_E)


def _launch_bwd(
    sources: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    raw_NC: torch.Tensor,
    positions_N: torch.Tensor,
    rope: Rope,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    dqkv_NC: torch.Tensor,
    bias_sums: torch.Tensor | None,
    norm_sums: torch.Tensor | None,
) -> None:
    """sources: dq, dk, dv. A kernel's pointer that it does not use is some tensor's."""
    assert all(x.stride(2) == 1 for x in sources) and dqkv_NC.stride(1) == raw_NC.stride(1) == 1
    (num_tokens, num_heads, head_dim), num_kv_heads = sources[0].shape, sources[1].shape[1]
    tokens, warps = _bwd_tile(head_dim // 2, norms is not None)
    groups = cdiv(num_heads, HEADS) + 2 * cdiv(num_kv_heads, HEADS)
    rope_bwd_kernel[(cdiv(num_tokens, tokens) * groups,)](
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
        rope.cos if bias_sums is None else bias_sums,
        rope.cos if norm_sums is None else norm_sums,
        rope.norm_eps,
        num_tokens,
        H=num_heads,
        K=num_kv_heads,
        HALF=head_dim // 2,
        HAS_NORM=norms is not None,
        HAS_WEIGHT_GRAD=norm_sums is not None,
        HAS_BIAS_GRAD=bias_sums is not None,
        TOKENS=tokens,
        HEADS=HEADS,
        BLOCK_HALF=next_power_of_2(head_dim // 2),
        num_warps=warps,
    )
