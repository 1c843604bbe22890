"""The bias gradient, a sum over rows: see ops/matmul."""
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv, num_sms
from fullstride.kernels.partials import add_partials

BLOCK_O = 128
BLOCK_ROWS = 32


@triton.jit
def bias_bwd_kernel(dy, partial, dy_stride, N, O, BLOCK_ROWS: tl.constexpr, BLOCK_O: tl.constexpr):  # noqa: E741
    cols = (tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O))[None, :]
    split = tl.program_id(1).to(tl.int64)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_O], tl.float32)
    for start in tl.range(split * BLOCK_ROWS, N, tl.num_programs(1) * BLOCK_ROWS, num_stages=3):
        rows = (start + tl.arange(0, BLOCK_ROWS))[:, None].to(tl.int64)
        acc += tl.load(dy + rows * dy_stride + cols, mask=(rows < N) & (cols < O), other=0.0).to(tl.float32)
    tl.store(partial + split * O + cols, tl.sum(acc, axis=0)[None, :], mask=cols < O)


def bias_bwd(dy_NO: torch.Tensor, dbias_O: torch.Tensor) -> None:
    """See ops/matmul. Rows may be strided. Moves N O elements."""
    num_rows, width = dy_NO.shape
    assert dy_NO.stride(1) == 1
    column_blocks = cdiv(width, BLOCK_O)
    splits = min(cdiv(num_rows, BLOCK_ROWS), cdiv(8 * num_sms(dy_NO), column_blocks))
    partial = torch.empty(splits, width, dtype=torch.float32, device=dy_NO.device)
    bias_bwd_kernel[(column_blocks, splits)](
        dy_NO, partial, dy_NO.stride(0), num_rows, width, BLOCK_ROWS=BLOCK_ROWS, BLOCK_O=BLOCK_O, num_warps=4
    )
    add_partials(partial, dbias_O)
