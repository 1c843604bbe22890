"""The one linear layer: y = x W^T (+ bias) (+ scale * dropout(x) A^T B^T), its input gradient and weight gradients.

The weight may be the merger of several projections (q, k, v; gate, up). Its adapter then holds the A of all adapted
projections in one matrix, so that x is read once, and a B for each (LoRA: Hu et al. 2021, arXiv 2106.09685). The
projections of a merger see the same dropped-out x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fullstride.ops.dropout import dropout
from fullstride.ops.matmul import matmul, matmul_bias

# (name, shape, dtype) -> a buffer that lives until the name is taken again
Scratch = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class AdapterB:
    """B [rows, R] of one projection, which is rows [start, stop) of the merged output."""

    start: int
    stop: int
    weight: torch.Tensor


@dataclass(frozen=True)
class Adapter:
    """LoRA beside one (merged) weight: a [len(b) * R, I], a B for each adapted projection, scale = alpha / R."""

    a: torch.Tensor
    b: tuple[AdapterB, ...]
    scale: float
    dropout: float = 0.0
    stream: int = 0  # of the dropout noise

    @property
    def rank(self) -> int:
        """R."""
        return self.a.shape[0] // len(self.b)

    def columns(self, u_NR: torch.Tensor) -> list[torch.Tensor]:
        """The R columns of u_N(len(b)*R) that belong to each B."""
        return list(u_NR.split(self.rank, dim=1))


@dataclass(frozen=True)
class Linear:
    """weight [O, I], bias [O] or None, adapter or None. As a gradient container: None stands for frozen."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None = None
    adapter: Adapter | None = None


@dataclass
class LinearContext:
    """What linear layers need besides their tensors: scratch, the noise's key, and whether dropout is on."""

    scratch: Scratch
    rng: torch.Tensor
    training: bool = True

    def dropped(self, adapter: Adapter, x_NI: torch.Tensor) -> torch.Tensor:
        """x with the adapter's dropout: x itself when there is none. The buffer is read until the next call."""
        if not (adapter.dropout and self.training):
            return x_NI
        out = self.scratch("dropped", tuple(x_NI.shape), x_NI.dtype)
        dropout(x_NI, adapter.dropout, self.rng, adapter.stream, out)
        return out


def linear_fwd(
    linear: Linear, x_NI: torch.Tensor, out_NO: torch.Tensor, u_NR: torch.Tensor | None, context: LinearContext
) -> None:
    """Overwrites out_NO, and u_NR = dropout(x) A^T when there is an adapter (kept for its backward)."""
    assert linear.weight is not None
    if linear.bias is None:
        matmul(x_NI, linear.weight.t(), out_NO)
    else:
        matmul_bias(x_NI, linear.weight.t(), linear.bias, out_NO)
    adapter = linear.adapter
    if adapter is None:
        return
    assert u_NR is not None
    matmul(context.dropped(adapter, x_NI), adapter.a.t(), u_NR)
    for b, u in zip(adapter.b, adapter.columns(u_NR), strict=True):
        matmul(u, b.weight.t(), out_NO[:, b.start : b.stop], accumulate=True, alpha=adapter.scale)


def adapter_dgrad(adapter: Adapter, dy_NO: torch.Tensor, du_NR: torch.Tensor) -> None:
    """Overwrites du_NR, the gradient of u = dropout(x) A^T: dy B for each projection, without the scale."""
    for b, du in zip(adapter.b, adapter.columns(du_NR), strict=True):
        matmul(dy_NO[:, b.start : b.stop], b.weight, du)


def linear_dgrad(
    linear: Linear, dy_NO: torch.Tensor, du_NR: torch.Tensor | None, dx_NI: torch.Tensor, context: LinearContext
) -> None:
    """Overwrites dx_NI = dy W (+ dropout'(scale * du A)). du_NR comes from adapter_dgrad."""
    assert linear.weight is not None
    matmul(dy_NO, linear.weight, dx_NI)
    adapter = linear.adapter
    if adapter is None:
        return
    assert du_NR is not None
    if adapter.dropout and context.training:
        branch = context.scratch("dropped", tuple(dx_NI.shape), dx_NI.dtype)
        matmul(du_NR, adapter.a, branch)
        dropout(branch.mul_(adapter.scale), adapter.dropout, context.rng, adapter.stream, dx_NI, accumulate=True)
    else:
        matmul(du_NR, adapter.a, dx_NI, accumulate=True, alpha=adapter.scale)


def linear_wgrad(
    linear: Linear,
    grad: Linear,
    x_NI: torch.Tensor,
    dy_NO: torch.Tensor,
    u_NR: torch.Tensor | None,
    du_NR: torch.Tensor | None,
    context: LinearContext,
    accumulate: bool,
) -> None:
    """Overwrites (with `accumulate`: adds into) the weights' gradients of `grad`; what is None there is frozen.

    The one bias, qkv's, is not here: its gradient comes with the rotary embedding's backward, which reads dy anyway.
    """
    if grad.weight is not None:
        matmul(dy_NO.t(), x_NI, grad.weight, accumulate=accumulate)
    adapter = linear.adapter
    if adapter is None or grad.adapter is None:
        return
    assert u_NR is not None and du_NR is not None
    for b, db, u in zip(adapter.b, grad.adapter.b, adapter.columns(u_NR), strict=True):
        matmul(dy_NO[:, b.start : b.stop].t(), u, db.weight, accumulate=accumulate, alpha=adapter.scale)
    x_dropped = context.dropped(adapter, x_NI)
    matmul(du_NR.t(), x_dropped, grad.adapter.a, accumulate=accumulate, alpha=adapter.scale)
