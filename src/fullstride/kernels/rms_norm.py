"""RMS norm with the residual addition before it: see ops/rms_norm."""
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv, next_power_of_2, num_sms, num_warps
from fullstride.kernels.partials import add_partials

TILE = 2048  # elements of a program's tile at least; a wider row is one tile
PER_THREAD = 16
WARPS_PER_SM = 16  # of the backward: all programs at once, by their registers
STAGES = 3  # of the backward: this many tiles of three inputs in a multiprocessor's 227 KiB of shared memory


@triton.jit
def rms_norm_fwd_kernel(
    x,
    branch,
    weight,
    residual,
    normed,
    rstd,
    x_stride,
    branch_stride,
    residual_stride,
    normed_stride,
    eps,
    N,
    D,
    HAS_BRANCH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)[None, :]
    row = rows[:, None]
    mask = (row < N) & (cols < D)
    value = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        value += tl.load(branch + row * branch_stride + cols, mask=mask, other=0.0).to(tl.float32)
        stored = value.to(residual.dtype.element_ty)
        tl.store(residual + row * residual_stride + cols, stored, mask=mask)
        value = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)
    tl.store(rstd + rows, scale, mask=rows < N)
    w = tl.load(weight + cols, mask=cols < D, other=0.0).to(tl.float32)
    tl.store(normed + row * normed_stride + cols, value * scale[:, None] * w, mask=mask)


@triton.jit
def rms_norm_bwd_kernel(
    dnormed,
    x,
    weight,
    rstd,
    dresidual,
    dx,
    partial,
    dnormed_stride,
    x_stride,
    dresidual_stride,
    dx_stride,
    N,
    D,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT_GRAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)[None, :]
    w = tl.load(weight + cols, mask=cols < D, other=0.0).to(tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in tl.range(pid * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        row = rows[:, None].to(tl.int64)
        mask = (row < N) & (cols < D)
        dy = tl.load(dnormed + row * dnormed_stride + cols, mask=mask, other=0.0).to(tl.float32)
        xhat = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(rstd + rows, mask=rows < N, other=0.0)[:, None]
        xhat *= scale
        g = dy * w
        mean = tl.sum(g * xhat, axis=1)[:, None] / D
        d = scale * (g - xhat * mean)
        if HAS_RESIDUAL:
            d += tl.load(dresidual + row * dresidual_stride + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + row * dx_stride + cols, d, mask=mask)
        if HAS_WEIGHT_GRAD:
            acc += dy * xhat
    if HAS_WEIGHT_GRAD:
        total = tl.sum(acc, axis=0)[None, :]
        tl.store(partial + pid * D + cols, total, mask=cols < D)


def _tile(width: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program's tile."""
    block_d = next_power_of_2(width)
    rows = max(1, TILE // block_d)
    return rows, block_d, num_warps(rows * block_d, PER_THREAD)


def rms_norm_fwd(
    x_ND: torch.Tensor,
    branch_ND: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    residual_ND: torch.Tensor,
    normed_ND: torch.Tensor,
    rstd_N: torch.Tensor,
) -> None:
    """See ops/rms_norm. Rows may be strided. Moves 4 N D elements (2 N D without a branch) and N float32."""
    num_rows, width = x_ND.shape
    branch = x_ND if branch_ND is None else branch_ND
    rows, block_d, warps = _tile(width)
    rms_norm_fwd_kernel[(cdiv(num_rows, rows),)](
        x_ND,
        branch,
        weight_D,
        residual_ND,
        normed_ND,
        rstd_N,
        x_ND.stride(0),
        branch.stride(0),
        residual_ND.stride(0),
        normed_ND.stride(0),
        eps,
        num_rows,
        width,
        HAS_BRANCH=branch_ND is not None,
        ROWS=rows,
        BLOCK_D=block_d,
        num_warps=warps,
    )


def rms_norm_bwd(
    dnormed_ND: torch.Tensor,
    x_ND: torch.Tensor,
    weight_D: torch.Tensor,
    rstd_N: torch.Tensor,
    dresidual_ND: torch.Tensor | None,
    dx_ND: torch.Tensor,
    dweight_D: torch.Tensor | None,
) -> None:
    """See ops/rms_norm. Rows may be strided. Moves 4 N D elements (3 N D without dresidual).

    A fixed number of programs loop over rows, each keeping its share of dweight in registers; two rows ahead are on
    their way from memory while one is computed. The shares, a few rows of float32 per multiprocessor, are summed after.
    """
    num_rows, width = x_ND.shape
    dresidual = dnormed_ND if dresidual_ND is None else dresidual_ND
    rows, block_d, warps = _tile(width)
    tile_bytes = rows * block_d * x_ND.element_size()
    num_programs = min(cdiv(num_rows, rows), num_sms(x_ND) * (WARPS_PER_SM // warps))
    partial = None
    if dweight_D is not None:
        partial = torch.empty(num_programs, width, dtype=torch.float32, device=x_ND.device)
    rms_norm_bwd_kernel[(num_programs,)](
        dnormed_ND,
        x_ND,
        weight_D,
        rstd_N,
        dresidual,
        dx_ND,
        rstd_N if partial is None else partial,
        dnormed_ND.stride(0),
        x_ND.stride(0),
        dresidual.stride(0),
        dx_ND.stride(0),
        num_rows,
        width,
        HAS_RESIDUAL=dresidual_ND is not None,
        HAS_WEIGHT_GRAD=partial is not None,
        ROWS=rows,
        BLOCK_D=block_d,
        STAGES=STAGES if tile_bytes <= 2**14 else 1,
        num_warps=warps,
    )
    if dweight_D is not None and partial is not None:
        add_partials(partial, dweight_D)
