"""Cross-entropy and its gradient in place: see ops/cross_entropy.

A row of a real vocabulary does not fit one multiprocessor's registers, and read a second time it comes from memory
again. So a row is cut into pieces. The program of a piece keeps it in registers, publishes its maximum and sum, waits
for those of the row's other pieces and writes its part of the gradient: every logit is read once.
"""
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv, next_power_of_2, num_warps

PIECE = 32768  # elements of a program
PER_THREAD = 64
REGISTERS = 64  # of a thread, half of which hold its part of the piece: so two programs fit a multiprocessor
ROWS = 32  # of loss_kernel
LOG2E = tl.constexpr(1.4426950408889634)
MINUS_INF_TWICE = tl.constexpr(-0x7F0080)  # as two bf16


@triton.jit
def load_piece(logits, start, V, PACK: tl.constexpr, LANES: tl.constexpr, LANE: tl.constexpr):
    """A piece as [LANES, LANE / PACK] words of PACK elements, -inf beyond V."""
    at = start // PACK + tl.arange(0, LANES)[:, None] * (LANE // PACK) + tl.arange(0, LANE // PACK)[None, :]
    if PACK == 2:
        words = logits.to(tl.pointer_type(tl.int32)) + at
        return tl.load(words, mask=at < V // 2, other=MINUS_INF_TWICE, eviction_policy="evict_first")
    else:
        return tl.load(logits + at, mask=at < V, other=float("-inf"), eviction_policy="evict_first")


@triton.jit
def unpack(words, hidden_zero):
    """float32 of each element: a bf16 is the upper half of a float32.

    hidden_zero is 0, which the compiler must not know where it should unpack anew: it would rather keep what it
    unpacked before, in twice the registers.
    """
    if words.dtype == tl.int32:
        lower = (words << (16 + hidden_zero)).to(tl.float32, bitcast=True)
        upper = (words & (-65536 + hidden_zero)).to(tl.float32, bitcast=True)
        return tl.join(lower, upper).reshape(words.shape[0], 2 * words.shape[1])
    else:
        return words.to(tl.float32)


@triton.jit
def publish(word, top, total):
    """Maximum and sum in one word of 64 bits, which is written at once; it is never zero, as the words are before."""
    upper = top.to(tl.int32, bitcast=True).to(tl.int64) << 32
    tl.store(word, upper | total.to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit
def combine(words, exists):
    """Maximum of a row and sum of exp(logit - maximum), from the words [.., pieces] that were published."""
    tops = tl.where(exists, (words >> 32).to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))
    totals = tl.where(exists, words.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    top = tl.max(tops, axis=1)
    return top, tl.sum(totals * tl.exp2((tops - top[:, None]) * LOG2E), axis=1)


@triton.jit
def wait(published, G, BLOCK_G: tl.constexpr):
    """The words of a row's G pieces [1, BLOCK_G], when all are there."""
    pieces = tl.arange(0, BLOCK_G)[None, :]
    words = tl.load(published + pieces, mask=pieces < G, other=1, volatile=True)
    while tl.min((words != 0).to(tl.int32)) == 0:
        words = tl.load(published + pieces, mask=pieces < G, other=1, volatile=True)
    return words, pieces < G


@triton.jit
def piece_kernel(
    logits,
    targets,
    z_loss,
    target_logits,
    published,
    logits_stride,
    V,
    G,
    BACKWARD: tl.constexpr,
    PACK: tl.constexpr,
    LANES: tl.constexpr,
    LANE: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    row = (tl.program_id(0) // G).to(tl.int64)
    start = tl.program_id(0) % G * (LANES * LANE)
    logits += row * logits_stride
    at = start + tl.arange(0, LANES)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    target = tl.load(targets + row)
    if target == -100:
        if BACKWARD:
            tl.store(logits + at, tl.zeros([LANES, LANE], tl.float32), mask=at < V, cache_modifier=".cs")
    else:
        words = load_piece(logits, start, V, PACK, LANES, LANE)
        is_mine = (target >= start) & (target < start + LANES * LANE)
        target_logit = tl.load(logits + target, mask=is_mine, other=0.0).to(tl.float32)
        x = unpack(words, 0)
        # finite, so that a lane that saw only -inf subtracts no infinities
        lane_top = tl.maximum(tl.max(x, axis=1), -1e38)
        lane_total = tl.sum(tl.exp2((x - lane_top[:, None]) * LOG2E), axis=1)
        top = tl.max(lane_top, axis=0)
        total = tl.sum(lane_total * tl.exp2((lane_top - top) * LOG2E), axis=0)
        publish(published + tl.program_id(0), top, total)
        if is_mine:
            tl.store(target_logits + row, target_logit)
        if BACKWARD:
            top, total = combine(*wait(published + row * G, G, BLOCK_G))
            top, total = tl.max(top, axis=0), tl.max(total, axis=0)
            scale = (1 + 2 * tl.load(z_loss).to(tl.float32) * (top + tl.log(total))) / total
            d = tl.exp2((unpack(words, tl.minimum(target, 0)) - top) * LOG2E) * scale
            tl.store(logits + at, d, mask=at < V, cache_modifier=".cs")
            if is_mine:
                tl.debug_barrier()  # every thread has written: this comes over it
                tl.store(logits + target, tl.exp2((target_logit - top) * LOG2E) * scale - 1)


@triton.jit
def loss_kernel(published, targets, loss, lse_out, M, G, ROWS: tl.constexpr, BLOCK_G: tl.constexpr):
    """`loss` holds the targets' logits before."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pieces = tl.arange(0, BLOCK_G)[None, :]
    exists = (rows < M)[:, None] & (pieces < G)
    words = tl.load(published + rows[:, None].to(tl.int64) * G + pieces, mask=exists, other=0)
    top, total = combine(words, pieces < G)
    supervised = tl.load(targets + rows, mask=rows < M, other=-100) != -100
    target_logit = tl.load(loss + rows, mask=supervised, other=0.0)
    # maximum and logarithm stay apart: in their float32 sum, logits of 1e4 would leave three digits of the loss
    log_total = tl.log(tl.where(supervised, total, 1.0))
    tl.store(loss + rows, tl.where(supervised, log_total - (target_logit - top), 0.0), mask=rows < M)
    tl.store(lse_out + rows, tl.where(supervised, top + log_total, 0.0), mask=rows < M)


def _tile(logits_MV: torch.Tensor) -> tuple[int, int, int]:
    """(elements in a word, of a program, that a thread loads at once and keeps one maximum and sum for)."""
    vocab_size, size = logits_MV.shape[1], logits_MV.element_size()
    # a word of 32 bits holds two bf16, unless words would straddle rows
    is_packed = size == 2 and (vocab_size | logits_MV.stride(0) | logits_MV.data_ptr() // 2) % 2 == 0
    piece = min(PIECE, next_power_of_2(vocab_size))
    return 2 if is_packed else 1, piece, min(piece, 16 // size)


def cross_entropy(
    logits_MV: torch.Tensor,
    targets_M: torch.Tensor,
    z_loss: torch.Tensor,
    loss_M: torch.Tensor,
    lse_M: torch.Tensor,
    backward: bool,
) -> None:
    """See ops/cross_entropy. Rows may be strided. Moves 2 M V elements (M V without the backward).

    Programs start in the order of their numbers, and those of a row are neighbours; so the oldest row that is not
    complete always has its programs running or next in turn, and waiting ends. In Triton's interpreter, where each
    program ends before the next begins, a round that only publishes goes before.
    """
    num_rows, vocab_size = logits_MV.shape
    assert logits_MV.stride(1) == 1
    pack, piece, lane = _tile(logits_MV)
    num_pieces = cdiv(vocab_size, piece)
    block_g = next_power_of_2(num_pieces)
    published = torch.zeros(num_rows, num_pieces, dtype=torch.int64, device=logits_MV.device)
    for also_gradient in (backward,) if logits_MV.is_cuda else (False, True)[: 1 + backward]:
        piece_kernel[(num_rows * num_pieces,)](
            logits_MV,
            targets_M,
            z_loss,
            loss_M,
            published,
            logits_MV.stride(0),
            vocab_size,
            num_pieces,
            BACKWARD=also_gradient,
            PACK=pack,
            LANES=piece // lane,
            LANE=lane,
            BLOCK_G=block_g,
            num_warps=num_warps(piece, PER_THREAD),
            maxnreg=REGISTERS * 2 // pack,
        )
    loss_kernel[(cdiv(num_rows, ROWS),)](
        published, targets_M, loss_M, lse_M, num_rows, num_pieces, ROWS=ROWS, BLOCK_G=block_g, num_warps=4
    )
