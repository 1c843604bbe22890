"""SwiGLU on the merged gate and up projection: see ops/swiglu."""
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullstride.kernels.grid import cdiv

BLOCK_F = 1024  # columns a program: 8 elements a thread, one 16-byte load of each operand in bf16


@triton.jit
def row_and_cols(F, BLOCK: tl.constexpr):
    """The row and columns of a program: neighbours in the grid are neighbours in memory."""
    blocks = tl.cdiv(F, BLOCK)
    pid = tl.program_id(0)
    return (pid // blocks).to(tl.int64), pid % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def swiglu_fwd_kernel(gate_up, out, gate_up_stride, out_stride, F, BLOCK: tl.constexpr):
    row, cols = row_and_cols(F, BLOCK)
    mask = cols < F
    source = gate_up + row * gate_up_stride + cols
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + cols, gate * tl.sigmoid(gate) * up, mask=mask)


@triton.jit
def swiglu_bwd_kernel(dout, gate_up, dgate_up, dout_stride, gate_up_stride, dgate_up_stride, F, BLOCK: tl.constexpr):
    row, cols = row_and_cols(F, BLOCK)
    mask = cols < F
    source = gate_up + row * gate_up_stride + cols
    d = tl.load(dout + row * dout_stride + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    target = dgate_up + row * dgate_up_stride + cols
    tl.store(target, d * up * s * (1 + gate * (1 - s)), mask=mask)
    tl.store(target + F, d * gate * s, mask=mask)


def swiglu_fwd(gate_up_N2F: torch.Tensor, out_NF: torch.Tensor) -> None:
    """See ops/swiglu. Rows may be strided. Moves 3 N F elements."""
    num_rows, width = out_NF.shape
    swiglu_fwd_kernel[(cdiv(width, BLOCK_F) * num_rows,)](
        gate_up_N2F, out_NF, gate_up_N2F.stride(0), out_NF.stride(0), width, BLOCK=BLOCK_F, num_warps=4
    )


def swiglu_bwd(dout_NF: torch.Tensor, gate_up_N2F: torch.Tensor, dgate_up_N2F: torch.Tensor) -> None:
    """See ops/swiglu. Rows may be strided. Moves 5 N F elements."""
    num_rows, width = dout_NF.shape
    swiglu_bwd_kernel[(cdiv(width, BLOCK_F) * num_rows,)](
        dout_NF,
        gate_up_N2F,
        dgate_up_N2F,
        dout_NF.stride(0),
        gate_up_N2F.stride(0),
        dgate_up_N2F.stride(0),
        width,
        BLOCK=BLOCK_F,
        num_warps=4,
    )
