"""Cross-entropy and its gradient in place: see ops/cross_entropy.

One program a row: a pass for maximum and sum, a pass for the gradient. The second pass reads the row again, from the L2
cache where it is still there; so some blocks of the row stay in registers between the passes, and the rows that are
under way fit the cache better.
"""
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import next_power_of_2

WARPS, PER_THREAD, KEPT = 32, 16, 2  # of the gradient: warps, elements a thread takes at once, blocks kept
LOSS_WARPS = 8  # without the gradient
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-2.3e38)  # where a maximum starts: finite, and so is its multiple by LOG2E
MINUS_INF_TWICE = tl.constexpr(-0x7F0080)  # as two bf16


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
def load_block(words, block, V, IS_TAIL: tl.constexpr, PACK: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr):
    """Block number `block` of a row as words [LANES, WORDS] of PACK elements each, -inf beyond V."""
    at = block * (LANES * WORDS) + tl.arange(0, LANES)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    if not IS_TAIL:
        return tl.load(words + at)
    return tl.load(words + at, mask=at < V // PACK, other=MINUS_INF_TWICE if PACK == 2 else float("-inf"))


@triton.jit
def accumulate(x, top, total):
    """Running maximum and sum of exponentials of each lane, which subtract no infinities: `top` is finite."""
    new_top = tl.maximum(top, tl.max(x, axis=1))
    total = total * tl.exp2((top - new_top) * LOG2E) + tl.sum(tl.exp2((x - new_top[:, None]) * LOG2E), axis=1)
    return new_top, total


@triton.jit
def write_block(logits, block, V, x, top, scale, IS_TAIL: tl.constexpr):
    """Overwrites a block of a row with scale * exp(x - top)."""
    LANES: tl.constexpr = x.shape[0]
    LANE: tl.constexpr = x.shape[1]
    at = block * (LANES * LANE) + tl.arange(0, LANES)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    d = tl.exp2((x - top) * LOG2E) * scale
    if IS_TAIL:
        tl.store(logits + at, d, mask=at < V, eviction_policy="evict_first")
    else:
        tl.store(logits + at, d, eviction_policy="evict_first")


@triton.jit
def write_gradient(words, logits, V, top, scale, PACK: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr):
    """Overwrites a row of logits, whose words are read anew, with scale * exp(x - top)."""
    num_full = V // (LANES * WORDS * PACK)
    tail = unpack(load_block(words, num_full, V, True, PACK, LANES, WORDS), 0)
    write_block(logits, num_full, V, tail, top, scale, True)
    for turn in range(0, num_full):
        block = num_full - 1 - turn  # what was read last is the likeliest to be in the cache still
        x = unpack(load_block(words, block, V, False, PACK, LANES, WORDS), 0)
        write_block(logits, block, V, x, top, scale, False)


@triton.jit
def part_terms_kernel(
    logits,
    targets,
    terms,
    logits_stride,
    first,
    M,
    V,
    PACK: tl.constexpr,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    words = logits.to(tl.pointer_type(tl.int32)) if PACK == 2 else logits
    num_full = V // (LANES * WORDS * PACK)
    target = tl.load(targets + row)
    if target == -100:
        tl.store(terms + row, 0.0)
        tl.store(terms + M + row, 1.0)
        tl.store(terms + 2 * M + row, 0.0)
    else:
        top, total = tl.full([LANES], LOWEST, tl.float32), tl.zeros([LANES], tl.float32)
        for block in range(0, num_full):
            top, total = accumulate(unpack(load_block(words, block, V, False, PACK, LANES, WORDS), 0), top, total)
        top, total = accumulate(unpack(load_block(words, num_full, V, True, PACK, LANES, WORDS), 0), top, total)
        row_top = tl.max(top, axis=0)
        column = target - first
        here = (column >= 0) & (column < V)
        tl.store(terms + row, row_top)
        tl.store(terms + M + row, tl.sum(total * tl.exp2((top - row_top) * LOG2E), axis=0))
        tl.store(terms + 2 * M + row, tl.load(logits + column, mask=here, other=0.0).to(tl.float32))


@triton.jit
def part_bwd_kernel(
    logits,
    targets,
    z_loss,
    terms,
    logits_stride,
    first,
    M,
    V,
    PACK: tl.constexpr,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    target = tl.load(targets + row)
    if target == -100:
        nothing = tl.zeros([LANES, WORDS * PACK], tl.float32)
        for block in range(0, V // (LANES * WORDS * PACK) + 1):
            write_block(logits, block, V, nothing, 0.0, 0.0, True)
    else:
        words = logits.to(tl.pointer_type(tl.int32)) if PACK == 2 else logits
        top, total = tl.load(terms + row), tl.load(terms + M + row)
        scale = (1 + 2 * tl.load(z_loss).to(tl.float32) * (top + tl.log(total))) / total
        column = target - first
        here = (column >= 0) & (column < V)
        target_logit = tl.load(logits + column, mask=here, other=0.0).to(tl.float32)
        tl.debug_barrier()  # every thread has read it
        write_gradient(words, logits, V, top, scale, PACK, LANES, WORDS)
        tl.debug_barrier()  # every thread has written: this comes over it
        tl.store(logits + column, tl.exp2((target_logit - top) * LOG2E) * scale - 1, mask=here)


@triton.jit
def cross_entropy_kernel(
    logits,
    targets,
    z_loss,
    loss,
    lse_out,
    logits_stride,
    V,
    BACKWARD: tl.constexpr,
    PACK: tl.constexpr,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
    KEPT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    words = logits.to(tl.pointer_type(tl.int32)) if PACK == 2 else logits
    num_full = V // (LANES * WORDS * PACK)
    target = tl.load(targets + row)
    if target == -100:
        tl.store(loss + row, 0.0)
        tl.store(lse_out + row, 0.0)
        if BACKWARD:
            nothing = tl.zeros([LANES, WORDS * PACK], tl.float32)
            for block in range(0, num_full + 1):
                write_block(logits, block, V, nothing, 0.0, 0.0, True)
    else:
        target_logit = tl.load(logits + target).to(tl.float32)
        kept = load_block(words, 0, V, False, PACK, LANES * max(KEPT, 1), WORDS) if KEPT else words
        top, total = tl.full([LANES], LOWEST, tl.float32), tl.zeros([LANES], tl.float32)
        for block in range(KEPT, num_full):
            top, total = accumulate(unpack(load_block(words, block, V, False, PACK, LANES, WORDS), 0), top, total)
        top, total = accumulate(unpack(load_block(words, num_full, V, True, PACK, LANES, WORDS), 0), top, total)
        row_top = tl.max(top, axis=0)
        if KEPT:
            none = tl.zeros([LANES * KEPT], tl.float32)
            kept_top, kept_total = accumulate(unpack(kept, 0), none + LOWEST, none)
            row_top = tl.maximum(row_top, tl.max(kept_top, axis=0))
        row_total = tl.sum(total * tl.exp2((top - row_top) * LOG2E), axis=0)
        if KEPT:
            row_total += tl.sum(kept_total * tl.exp2((kept_top - row_top) * LOG2E), axis=0)
        # maximum and logarithm stay apart: in their float32 sum, logits of 1e4 would leave three digits of the loss
        log_total = tl.log(row_total)
        tl.store(loss + row, log_total - (target_logit - row_top))
        tl.store(lse_out + row, row_top + log_total)
        if BACKWARD:
            scale = (1 + 2 * tl.load(z_loss).to(tl.float32) * (row_top + log_total)) / row_total
            tail = unpack(load_block(words, num_full, V, True, PACK, LANES, WORDS), 0)
            write_block(logits, num_full, V, tail, row_top, scale, True)
            for turn in range(0, num_full - KEPT):
                block = num_full - 1 - turn  # what was read last is the likeliest to be in the cache still
                x = unpack(load_block(words, block, V, False, PACK, LANES, WORDS), 0)
                write_block(logits, block, V, x, row_top, scale, False)
            if KEPT:
                write_block(logits, 0, V, unpack(kept, tl.minimum(target, 0)), row_top, scale, False)
            tl.debug_barrier()  # every thread has written: this comes over it
            tl.store(logits + target, tl.exp2((target_logit - row_top) * LOG2E) * scale - 1)


def cross_entropy(
    logits_MV: torch.Tensor,
    targets_M: torch.Tensor,
    z_loss: torch.Tensor,
    loss_M: torch.Tensor,
    lse_M: torch.Tensor,
    backward: bool,
) -> None:
    """See ops/cross_entropy. Rows may be strided. Moves 2 M V elements (M V without the backward), plus what of the
    second reading misses registers and the L2 cache.
    """
    num_rows, vocab_size = logits_MV.shape
    block, launch = _launch(logits_MV, WARPS if backward else LOSS_WARPS)
    cross_entropy_kernel[(num_rows,)](
        logits_MV,
        targets_M,
        z_loss,
        loss_M,
        lse_M,
        logits_MV.stride(0),
        vocab_size,
        BACKWARD=backward,
        KEPT=KEPT if backward and vocab_size >= KEPT * block else 0,
        **launch,
    )


def part_terms(logits_MV: torch.Tensor, targets_M: torch.Tensor, first: int, terms_3M: torch.Tensor) -> None:
    """See ops/cross_entropy. Rows may be strided. Moves M V elements."""
    (num_rows, width), (_, launch) = logits_MV.shape, _launch(logits_MV, LOSS_WARPS)
    part_terms_kernel[(num_rows,)](
        logits_MV, targets_M, terms_3M, logits_MV.stride(0), first, num_rows, width, **launch
    )


def part_bwd(
    logits_MV: torch.Tensor, targets_M: torch.Tensor, first: int, z_loss: torch.Tensor, terms_3M: torch.Tensor
) -> None:
    """See ops/cross_entropy. Rows may be strided. Moves 2 M V elements."""
    (num_rows, width), (_, launch) = logits_MV.shape, _launch(logits_MV, WARPS)
    part_bwd_kernel[(num_rows,)](
        logits_MV, targets_M, z_loss, terms_3M, logits_MV.stride(0), first, num_rows, width, **launch
    )


def _launch(logits_MV: torch.Tensor, warps: int) -> tuple[int, dict[str, int]]:
    """(elements of a row at once, how they are laid out) with at most so many warps a row."""
    width, size = logits_MV.shape[1], logits_MV.element_size()
    # a word of 32 bits holds two bf16, unless words would straddle rows
    is_packed = size == 2 and (width | logits_MV.stride(0) | logits_MV.data_ptr() // 2) % 2 == 0
    pack, lane = 2 if is_packed else 1, 16 // size
    block = min(32 * warps * PER_THREAD, max(32 * lane, next_power_of_2(width)))
    layout = {"PACK": pack, "LANES": block // lane, "WORDS": lane // pack}
    return block, layout | {"num_warps": max(1, block // (32 * PER_THREAD))}
