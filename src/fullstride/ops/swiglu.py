"""SwiGLU on the merged gate and up projection (Shazeer 2020, arXiv 2002.05202): out = silu(gate) * up."""

from __future__ import annotations

import torch

from fullstride.ops.numerics import check_rows, wide


def swiglu_fwd_ref(gate_up_N2F: torch.Tensor) -> torch.Tensor:
    """out_NF; gate is the left half of gate_up_N2F, up the right half."""
    gate, up = wide(gate_up_N2F).chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def swiglu_bwd_ref(dout_NF: torch.Tensor, gate_up_N2F: torch.Tensor) -> torch.Tensor:
    """dgate_up_N2F. With s = sigmoid(gate): dgate = dout * up * s * (1 + gate * (1 - s)), dup = dout * gate * s."""
    gate, up = wide(gate_up_N2F).chunk(2, dim=-1)
    dout_NF, s = wide(dout_NF), torch.sigmoid(gate)
    return torch.cat([dout_NF * up * s * (1 + gate * (1 - s)), dout_NF * gate * s], dim=-1)


def swiglu_fwd(gate_up_N2F: torch.Tensor, out_NF: torch.Tensor) -> None:
    """Overwrites out_NF."""
    check_rows(gate_up_N2F, out_NF)
    if gate_up_N2F.is_cuda:
        from fullstride.kernels.swiglu import swiglu_fwd as kernel

        return kernel(gate_up_N2F, out_NF)
    out_NF.copy_(swiglu_fwd_ref(gate_up_N2F))


def swiglu_bwd(dout_NF: torch.Tensor, gate_up_N2F: torch.Tensor, dgate_up_N2F: torch.Tensor) -> None:
    """Overwrites dgate_up_N2F, which may be gate_up_N2F itself."""
    check_rows(dout_NF, gate_up_N2F, dgate_up_N2F)
    if gate_up_N2F.is_cuda:
        from fullstride.kernels.swiglu import swiglu_bwd as kernel

        return kernel(dout_NF, gate_up_N2F, dgate_up_N2F)
    dgate_up_N2F.copy_(swiglu_bwd_ref(dout_NF, gate_up_N2F))
