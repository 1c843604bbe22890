"""The embedding's backward, without atomics: see ops/embedding.

The ids are sorted, stably, so that equal ones lie together in order of position: a run. The sorted places are cut into
pieces. A run that lies within one piece is summed and added by the program of its first place; of a longer one each
piece's share goes into a row of float32, and a second kernel adds those, in order.
"""
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv, next_power_of_2, num_warps

PIECE = 32
BLOCK_ROWS = 4  # of a run at once; most runs are one row
BLOCK_SHARES = 16
BLOCK_D = 4096
SHARE_BLOCK_D = 512
PER_THREAD = 8  # columns


@triton.jit
def sum_shares_kernel(
    dout,
    sorted_ids,
    order,
    dtable,
    shares,
    dout_stride,
    dtable_stride,
    N,
    D,
    PIECE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A piece has two rows of `shares`: for a run that began before it, and for one that begins in it and goes on."""
    first = tl.program_id(0)
    piece = first // PIECE
    token = tl.load(sorted_ids + first)
    begins = (first == 0) | (tl.load(sorted_ids + first - 1, mask=first > 0, other=0) != token)
    if (begins | (first % PIECE == 0)) & (token >= 0):
        places = first + tl.arange(0, PIECE)
        in_piece = places < tl.minimum((piece + 1) * PIECE, N)
        same = in_piece & (tl.load(sorted_ids + places, mask=in_piece, other=0) == token)
        end = first + tl.sum(same.to(tl.int32))
        goes_on = (end < N) & (tl.load(sorted_ids + end, mask=end < N, other=0) == token)
        cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
        for start in range(first, end, BLOCK_ROWS):
            here = start + tl.arange(0, BLOCK_ROWS)
            rows = tl.load(order + here, mask=here < end, other=0)[:, None]
            mask = (here < end)[:, None] & (cols < D)[None, :]
            acc += tl.load(dout + rows * dout_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        total = tl.sum(acc, axis=0)
        if begins & (goes_on == 0):
            target = dtable + token.to(tl.int64) * dtable_stride + cols
            tl.store(target, tl.load(target, mask=cols < D, other=0.0).to(tl.float32) + total, mask=cols < D)
        else:
            tl.store(shares + (2 * piece + begins).to(tl.int64) * D + cols, total, mask=cols < D)


@triton.jit
def add_shares_kernel(
    sorted_ids,
    dtable,
    shares,
    dtable_stride,
    N,
    D,
    PIECE: tl.constexpr,
    BLOCK_SHARES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The program of the piece in which a run begins that goes on beyond it adds the run's shares."""
    piece = tl.program_id(0)
    after = (piece + 1) * PIECE
    token = tl.load(sorted_ids + after - 1)  # there is a piece after this one
    begins = (piece == 0) | (tl.load(sorted_ids + piece * PIECE - 1, mask=piece > 0, other=0) != token)
    if begins & (token >= 0) & (tl.load(sorted_ids + after) == token):
        cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        acc = tl.zeros([BLOCK_SHARES, BLOCK_D], tl.float32)
        start = piece + 1
        while start >= 0:
            pieces = start + tl.arange(0, BLOCK_SHARES)
            exists = pieces * PIECE < N
            same = exists & (tl.load(sorted_ids + pieces * PIECE, mask=exists, other=0) == token)
            source = shares + (2 * pieces)[:, None].to(tl.int64) * D + cols[None, :]
            acc += tl.load(source, mask=same[:, None] & (cols < D)[None, :], other=0.0)
            start = tl.where(tl.min(same.to(tl.int32)) == 1, start + BLOCK_SHARES, -1)
        total = tl.load(shares + (2 * piece + 1).to(tl.int64) * D + cols, mask=cols < D, other=0.0) + tl.sum(
            acc, axis=0
        )
        target = dtable + token.to(tl.int64) * dtable_stride + cols
        tl.store(target, tl.load(target, mask=cols < D, other=0.0).to(tl.float32) + total, mask=cols < D)


def embedding_bwd(dout_ND: torch.Tensor, ids_N: torch.Tensor, dtable_VD: torch.Tensor) -> None:
    """See ops/embedding. Rows may be strided.

    Moves N D elements, twice the table's rows that occur, and twice 4 D bytes for each piece of a run over several.
    """
    num_tokens, width = dout_ND.shape
    sorted_ids, order = torch.sort(ids_N, stable=True)
    num_pieces = cdiv(num_tokens, PIECE)
    shares = torch.empty(2 * num_pieces, width, dtype=torch.float32, device=dout_ND.device)
    block_d = min(BLOCK_D, next_power_of_2(width))
    sum_shares_kernel[(num_tokens, cdiv(width, block_d))](
        dout_ND,
        sorted_ids,
        order,
        dtable_VD,
        shares,
        dout_ND.stride(0),
        dtable_VD.stride(0),
        num_tokens,
        width,
        PIECE=PIECE,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_D=block_d,
        num_warps=num_warps(block_d, PER_THREAD),
    )
    if num_pieces > 1:
        block_d = min(SHARE_BLOCK_D, next_power_of_2(width))
        add_shares_kernel[(num_pieces - 1, cdiv(width, block_d))](
            sorted_ids,
            dtable_VD,
            shares,
            dtable_VD.stride(0),
            num_tokens,
            width,
            PIECE=PIECE,
            BLOCK_SHARES=BLOCK_SHARES,
            BLOCK_D=block_d,
            num_warps=4,
        )
