"""The embedding's backward, without atomics: see ops/embedding."""
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv, next_power_of_2

BLOCK_ROWS = 4  # of a run at once; most runs are one row
BLOCK_D = 4096


@triton.jit
def embedding_bwd_kernel(
    dout,
    sorted_ids,
    order,
    run_end,
    dtable,
    dout_stride,
    dtable_stride,
    D,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    first = tl.program_id(0)
    token = tl.load(sorted_ids + first).to(tl.int64)
    before = tl.load(sorted_ids + first - 1, mask=first > 0, other=-1).to(tl.int64)
    if token != before:
        end = tl.load(run_end + first)
        cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
        for start in range(first, end, BLOCK_ROWS):
            slots = start + tl.arange(0, BLOCK_ROWS)
            rows = tl.load(order + slots, mask=slots < end, other=0)[:, None]
            mask = (slots < end)[:, None] & (cols < D)[None, :]
            acc += tl.load(dout + rows * dout_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        target = dtable + token * dtable_stride + cols
        total = tl.load(target, mask=cols < D, other=0.0).to(tl.float32) + tl.sum(acc, axis=0)
        tl.store(target, total, mask=cols < D)


def embedding_bwd(dout_ND: torch.Tensor, ids_N: torch.Tensor, dtable_VD: torch.Tensor) -> None:
    """See ops/embedding. Rows may be strided. Moves N D elements, and twice the table's rows that occur.

    The ids are sorted, stably, so that equal ones lie together in order of position; the program of each run's first
    place sums the run, a few rows abreast, and adds the sum once.
    """
    num_tokens, width = dout_ND.shape
    block_d = min(BLOCK_D, next_power_of_2(width))
    assert dout_ND.stride(1) == dtable_VD.stride(1) == 1
    sorted_ids, order = torch.sort(ids_N, stable=True)
    run_end = torch.searchsorted(sorted_ids, sorted_ids, right=True, out_int32=True)
    embedding_bwd_kernel[(num_tokens, cdiv(width, block_d))](
        dout_ND,
        sorted_ids,
        order,
        run_end,
        dtable_VD,
        dout_ND.stride(0),
        dtable_VD.stride(0),
        width,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_D=block_d,
        num_warps=8 if block_d > 512 else 4,
    )
