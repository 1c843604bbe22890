"""The one linear layer: y = x W^T (+ bias) (+ scale * dropout(x) A^T B^T), its input gradient and weight gradients.

The weight may be the merger of several projections (q, k, v; gate, up). Its adapter then holds the A of all adapted
projections in one matrix, so that x is read once, and a B for each (LoRA: Hu et al. 2021, arXiv 2106.09685). The
projections of a merger see the same dropped-out x.

An adapter costs no pass of its own over outputs or input gradients. The frozen weight has a copy of B beside it, each
projection's in columns of its own, and of A below it; u = scale * dropout(x) A^T stands beside x, du beside dy:

    y = [x | u] [W | B]^T          dx = [dy | du] [W]       with du = scale * dy B
                                                  [A]

So activations and gradients that go into an adapted linear have S spare columns, S = R for each adapted projection
(written x_NX = [x | u], dy_NY = [dy | du]; S = 0 without an adapter). Two cases cannot be folded: dropout in the
backward, which comes after du A alone; and an x that a library returned, which has no room for u.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from fullstride.ops.dropout import dropout
from fullstride.ops.matmul import Matmul


class Scratch(Protocol):
    """Gives buffers that live until their name is taken again."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, spare: int = 0) -> torch.Tensor: ...


@dataclass(frozen=True)
class AdapterB:
    """B [rows, R] of one projection, which is rows [start, stop) of the merged output."""

    start: int
    stop: int
    weight: torch.Tensor


@dataclass(frozen=True)
class Adapter:
    """LoRA beside one (merged) weight: a [len(b) * R, I], a B for each adapted projection, scale = alpha / R.

    What x is to this rank is columns first_column .. first_column + I of num_columns (0: I); so its dropout is theirs.
    """

    a: torch.Tensor
    b: tuple[AdapterB, ...]
    scale: float
    dropout: float = 0.0
    stream: int = 0  # of the dropout noise
    first_column: int = 0
    num_columns: int = 0

    @property
    def rank(self) -> int:
        """R."""
        return self.a.shape[0] // len(self.b)

    def columns(self, u_NR: torch.Tensor) -> list[torch.Tensor]:
        """The R columns of u_N(len(b)*R) that belong to each B."""
        return list(u_NR.split(self.rank, dim=1))


@dataclass(frozen=True)
class Linear:
    """weight [O, I], bias [O] or None, adapter or None; as a gradient container, None stands for frozen.

    extended [O + S, I + S], where there is an adapter: the weight with B beside it and A below it (see `fold`).
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None = None
    adapter: Adapter | None = None
    extended: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        assert self.weight is not None
        return self.weight.shape[0], self.weight.shape[1]


@dataclass
class LinearContext:
    """What linear layers need besides their tensors: products, scratch, dropout's key (ops/dropout), and whether it is
    on."""

    matmul: Matmul
    scratch: Scratch
    rng: torch.Tensor
    training: bool = True

    def drops(self, adapter: Adapter) -> bool:
        """Whether the adapter's x loses elements."""
        return adapter.dropout > 0 and self.training

    def dropped(self, adapter: Adapter, x_NI: torch.Tensor) -> torch.Tensor:
        """x with the adapter's dropout: x itself when there is none. The buffer is read until the next call."""
        if not self.drops(adapter):
            return x_NI
        out = self.scratch("dropped", tuple(x_NI.shape), x_NI.dtype)
        self.drop(adapter, x_NI, out)
        return out

    def drop(self, adapter: Adapter, x_NI: torch.Tensor, out_NI: torch.Tensor, accumulate: bool = False) -> None:
        """Overwrites out_NI with x_NI, some of it dropped; with `accumulate` adds that."""
        place = adapter.first_column, adapter.num_columns
        dropout(x_NI, adapter.dropout, self.rng, adapter.stream, out_NI, accumulate, *place)


def fold(linear: Linear) -> None:
    """Copy the adapter, if any, into `extended`: A below the weight, each B beside its rows. The rest stays zero."""
    adapter = linear.adapter
    if adapter is None:
        return
    assert linear.extended is not None
    outputs, inputs = linear.shape
    linear.extended[outputs:, :inputs].copy_(adapter.a)
    for b, columns in zip(adapter.b, adapter.columns(linear.extended[:, inputs:]), strict=True):
        columns[b.start : b.stop].copy_(b.weight)


def adapter_fwd(linear: Linear, x_NI: torch.Tensor, u_NS: torch.Tensor, context: LinearContext) -> None:
    """Overwrites u_NS = scale * dropout(x) A^T, where there is an adapter."""
    adapter = linear.adapter
    if adapter is not None:
        context.matmul(context.dropped(adapter, x_NI), adapter.a.t(), u_NS, alpha=adapter.scale)


def linear_fwd(
    linear: Linear,
    x_NX: torch.Tensor,
    out_NO: torch.Tensor,
    context: LinearContext,
    u_NS: torch.Tensor | None = None,
) -> None:
    """Overwrites out_NO. x_NX = [x | u] after adapter_fwd; or x alone, and u_NS for itself."""
    assert linear.weight is not None
    folded = linear.extended is not None and u_NS is None
    weight = linear.extended[: linear.shape[0]] if folded else linear.weight  # type: ignore[index]
    context.matmul(x_NX, weight.t(), out_NO, bias=linear.bias)
    if linear.adapter is not None and u_NS is not None:
        for b, u in zip(linear.adapter.b, linear.adapter.columns(u_NS), strict=True):
            context.matmul(u, b.weight.t(), out_NO[:, b.start : b.stop], accumulate=True)


def adapter_dgrad(linear: Linear, dy_NY: torch.Tensor, context: LinearContext) -> None:
    """Overwrites du, the last columns of dy_NY = [dy | du], with scale * dy B, where there is an adapter."""
    if linear.adapter is not None:
        assert linear.extended is not None
        outputs, inputs = linear.shape
        b_OS = linear.extended[:outputs, inputs:]
        context.matmul(dy_NY[:, :outputs], b_OS, dy_NY[:, outputs:], alpha=linear.adapter.scale)


def linear_dgrad(linear: Linear, dy_NY: torch.Tensor, dx_NI: torch.Tensor, context: LinearContext) -> None:
    """Overwrites dx_NI = dy W (+ dropout'(du A)), after adapter_dgrad."""
    assert linear.weight is not None
    (outputs, inputs), adapter = linear.shape, linear.adapter
    if adapter is None:
        context.matmul(dy_NY, linear.weight, dx_NI)
    elif not context.drops(adapter):
        assert linear.extended is not None
        context.matmul(dy_NY, linear.extended[:, :inputs], dx_NI)
    else:
        context.matmul(dy_NY[:, :outputs], linear.weight, dx_NI)
        branch = context.scratch("dropped", tuple(dx_NI.shape), dx_NI.dtype)
        context.matmul(dy_NY[:, outputs:], adapter.a, branch)
        context.drop(adapter, branch, dx_NI, accumulate=True)


def linear_wgrad(
    linear: Linear,
    grad: Linear,
    x_NX: torch.Tensor,
    dy_NY: torch.Tensor,
    context: LinearContext,
    accumulate: bool,
    u_NS: torch.Tensor | None = None,
) -> None:
    """Overwrites (with `accumulate`: adds into) the weights' gradients of `grad`; what is None there is frozen.

    x_NX and u_NS are the forward's, dy_NY is [dy | du]. The one bias, qkv's, is not here: its gradient comes with the
    rotary embedding's backward, which reads dy anyway.
    """
    adapter = linear.adapter
    if adapter is None:
        if grad.weight is not None:
            context.matmul(dy_NY.t(), x_NX, grad.weight, accumulate=accumulate)
        return
    if grad.adapter is None:
        return
    outputs, inputs = linear.shape
    us = adapter.columns(x_NX[:, inputs:] if u_NS is None else u_NS)
    for b, db, u in zip(adapter.b, grad.adapter.b, us, strict=True):
        context.matmul(dy_NY[:, b.start : b.stop].t(), u, db.weight, accumulate=accumulate)
    x_dropped = context.dropped(adapter, x_NX[:, :inputs])
    context.matmul(dy_NY[:, outputs:].t(), x_dropped, grad.adapter.a, accumulate=accumulate)
