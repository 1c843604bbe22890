"""Moving whole rows by an index: see ops/rows."""
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv, next_power_of_2, num_warps


@triton.jit
def gather_rows_kernel(x, index, out, x_stride, out_stride, D, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index + m).to(tl.int64)
    value = tl.load(x + row * x_stride + cols, mask=(cols < D) & (row >= 0), other=0.0)
    tl.store(out + m * out_stride + cols, value, mask=cols < D)


@triton.jit
def scatter_rows_kernel(x, index, out, x_stride, out_stride, D, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index + m).to(tl.int64)
    mask = (cols < D) & (row >= 0)
    value = tl.load(x + m * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + cols, value, mask=mask)


def _grid(num_rows: int, width: int) -> tuple[tuple[int, int], int, int]:
    """(grid, columns a program, warps): up to 4096 columns, 16 a thread."""
    block = min(4096, next_power_of_2(width))
    return (num_rows, cdiv(width, block)), block, num_warps(block, 16)


def gather_rows(x_ND: torch.Tensor, index_M: torch.Tensor, out_MD: torch.Tensor) -> None:
    """See ops/rows. Rows may be strided. Moves 2 M D elements."""
    assert x_ND.stride(1) == out_MD.stride(1) == 1
    grid, block, warps = _grid(*out_MD.shape)
    gather_rows_kernel[grid](
        x_ND, index_M, out_MD, x_ND.stride(0), out_MD.stride(0), out_MD.shape[1], BLOCK=block, num_warps=warps
    )


def scatter_rows(x_MD: torch.Tensor, index_M: torch.Tensor, out_ND: torch.Tensor) -> None:
    """See ops/rows. Rows may be strided. Moves 2 M D elements."""
    assert x_MD.stride(1) == out_ND.stride(1) == 1
    grid, block, warps = _grid(*x_MD.shape)
    scatter_rows_kernel[grid](
        x_MD, index_M, out_ND, x_MD.stride(0), out_ND.stride(0), x_MD.shape[1], BLOCK=block, num_warps=warps
    )
