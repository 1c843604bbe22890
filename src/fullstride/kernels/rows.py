"""Moving whole rows by an index: see ops/rows."""
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv, next_power_of_2, num_warps

TILE = 4096  # elements a program moves
PER_THREAD = 16


@triton.jit
def tile(index, M, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A program's places in the index and the rows that stand there, both [ROWS, 1] and -1 beyond M; columns; mask."""
    places = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    rows = tl.load(index + places, mask=places < M, other=-1).to(tl.int64)
    return places, rows, cols, (cols < D) & (rows >= 0)


@triton.jit
def gather_rows_kernel(x, index, out, x_stride, out_stride, M, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    places, rows, cols, mask = tile(index, M, D, ROWS, BLOCK)
    value = tl.load(x + rows * x_stride + cols, mask=mask, other=0.0)
    tl.store(out + places * out_stride + cols, value, mask=(places < M) & (cols < D))


@triton.jit
def scatter_rows_kernel(x, index, out, x_stride, out_stride, M, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    places, rows, cols, mask = tile(index, M, D, ROWS, BLOCK)
    value = tl.load(x + places * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + rows * out_stride + cols, value, mask=mask)


def _launch(
    kernel: triton.JITFunction, x: torch.Tensor, index_M: torch.Tensor, out: torch.Tensor, num_rows: int
) -> None:
    width = x.shape[1]
    block = min(TILE, next_power_of_2(width))
    rows = TILE // block
    kernel[(cdiv(num_rows, rows), cdiv(width, block))](
        x,
        index_M,
        out,
        x.stride(0),
        out.stride(0),
        num_rows,
        width,
        ROWS=rows,
        BLOCK=block,
        num_warps=num_warps(TILE, PER_THREAD),
    )


def gather_rows(x_ND: torch.Tensor, index_M: torch.Tensor, out_MD: torch.Tensor) -> None:
    """See ops/rows. Rows may be strided. Moves 2 M D elements."""
    _launch(gather_rows_kernel, x_ND, index_M, out_MD, out_MD.shape[0])


def scatter_rows(x_MD: torch.Tensor, index_M: torch.Tensor, out_ND: torch.Tensor) -> None:
    """See ops/rows. Rows may be strided. Moves 2 M D elements."""
    _launch(scatter_rows_kernel, x_MD, index_M, out_ND, x_MD.shape[0])
