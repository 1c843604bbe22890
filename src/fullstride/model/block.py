"""One transformer block: forward, recompute, backward for its input (dgrad) and for its weights (wgrad).

    x    = residual + branch            normed = norm(x)        qkv = normed Wqkv^T
    q, k = rope(q/k-norm(qkv))          attn = attention(q, k, v)
    mid  = x + attn Wo^T                normed = norm(mid)      gate_up = normed Wgu^T
    act  = silu(gate) * up              branch = act Wdown^T

The residual stream travels as a pair (residual, branch): the addition happens inside the next norm. LoRA, recompute and
the KV cache enter as arguments; there is no second block. See model/spec for the shape legend, and model/linear for the
spare columns that an adapted linear's input and output gradient have (normed, act; dqkv, dmid, dgate_up, dy).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from fullstride.model.linear import (
    Adapter,
    Linear,
    LinearContext,
    adapter_dgrad,
    adapter_fwd,
    linear_dgrad,
    linear_fwd,
    linear_wgrad,
)
from fullstride.model.spec import ModelConfig
from fullstride.ops.attention import Documents, attention_bwd
from fullstride.ops.rms_norm import rms_norm_bwd, rms_norm_fwd
from fullstride.ops.rope import Rope, heads, rope_bwd, rope_fwd
from fullstride.ops.swiglu import swiglu_bwd, swiglu_fwd

# recompute flags that drop what attention returned: its output and statistics
ATTENTION_DROPPED_BY = frozenset({"att", "block"})

# (q_NHE, k_NKE, v_NKE) -> (out_NHE, what the backward needs besides)
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, tuple[torch.Tensor, ...]]]


class SavedTensors(Protocol):
    """What one layer keeps for its backward (memory/saved): tensors by name, and what attention returned."""

    attention: tuple[torch.Tensor, ...]

    def __getitem__(self, name: str) -> torch.Tensor: ...


SavedRow = tuple[str, int, frozenset[str], bool, int]


def saved_table(c: ModelConfig, spare: Mapping[str, int]) -> list[SavedRow]:
    """What a block keeps: (name, columns per token, recompute flags that drop it, float32 always, spare columns).

    Producer and readers stand in the functions below. `spare`: columns of u of each linear that has an adapter, which
    lie beside its x. Attention's output and statistics come as new tensors from its library (see ATTENTION_DROPPED_BY),
    so o's u lies apart.
    """
    qkv_columns = c.q_size + 2 * c.kv_size
    beside = {"attn_normed": spare.get("qkv", 0), "mlp_normed": spare.get("gate_up", 0), "act": spare.get("down", 0)}
    rows: list[tuple[str, int, tuple[str, ...], bool]] = [
        ("x", c.hidden_size, (), False),
        ("attn_rstd", 0, (), True),
        ("attn_normed", c.hidden_size, ("norm", "block"), False),
        ("qkv", qkv_columns, ("qkv", "block"), False),
        ("mid", c.hidden_size, ("block",), False),
        ("mlp_rstd", 0, (), True),
        ("mlp_normed", c.hidden_size, ("norm", "block"), False),
        ("gate_up", 2 * c.intermediate_size, ("ffn", "block"), False),
        ("act", c.intermediate_size, ("swiglu", "ffn", "block"), False),
    ]
    if c.qk_norm:  # its backward reads the heads before the norm, so the rotated ones need a place of their own
        rows.append(("qk", c.q_size + c.kv_size, ("qkv", "block"), False))
    if "o" in spare:
        rows.append(("u_o", spare["o"], (), False))
    return [(name, columns, frozenset(flags), wide, beside.get(name, 0)) for name, columns, flags, wide in rows]


@dataclass(frozen=True)
class BlockWeights:
    """The tensors of a block, or (same fields) their gradients, None standing for frozen."""

    attn_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


def block_weights(views: dict[str, torch.Tensor], adapters: dict[str, Adapter]) -> BlockWeights:
    """BlockWeights from a block unit's tensors (or their gradients: what is missing is frozen) and its adapters."""

    def linear(name: str) -> Linear:
        return Linear(views.get(name), views.get(f"{name}_bias"), adapters.get(name), views.get(f"{name}.extended"))

    norms = (views.get(name) for name in ("attn_norm", "mlp_norm"))
    linears = (linear(name) for name in ("qkv", "o", "gate_up", "down"))
    return BlockWeights(*norms, *linears, views.get("q_norm"), views.get("k_norm"))  # type: ignore[arg-type]


@dataclass
class BlockContext:
    """What all layers of one micro-step share."""

    config: ModelConfig
    linear: LinearContext
    rope: Rope
    positions_N: torch.Tensor
    documents: Documents
    attend: Attend
    spare: Mapping[str, int]  # columns of u and du of each linear that has an adapter

    def buffer(self, name: str, columns: int, like: torch.Tensor) -> torch.Tensor:
        """Scratch [N, columns] of `like`'s dtype."""
        return self.linear.scratch(name, (like.shape[0], columns), like.dtype)

    def dy_buffer(self, name: str, linear: str, like: torch.Tensor) -> torch.Tensor:
        """Scratch for the gradient of a linear's output, [N, O + S] of `like`'s dtype."""
        shape = like.shape[0], self.outputs(linear)
        return self.linear.scratch(name, shape, like.dtype, self.spare.get(linear, 0))

    def outputs(self, linear: str) -> int:
        """O of a linear."""
        c = self.config
        if linear == "qkv":
            return c.q_size + 2 * c.kv_size
        return 2 * c.intermediate_size if linear == "gate_up" else c.hidden_size

    def qkv_heads(self, s: SavedTensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views (q_NHE, k_NKE, v_NKE) of what attention reads."""
        c = self.config
        qk = s["qk"] if c.qk_norm else s["qkv"]
        num_q, num_kv = c.num_attention_heads, c.num_key_value_heads
        return (
            heads(qk, 0, num_q, c.head_dim),
            heads(qk, num_q, num_kv, c.head_dim),
            heads(s["qkv"], num_q + num_kv, num_kv, c.head_dim),
        )


def _u_o(w: BlockWeights, s: SavedTensors) -> torch.Tensor | None:
    return None if w.o.adapter is None else s["u_o"]


# ---- forward, in steps that the recompute calls again


def _norm(
    weight: torch.Tensor | None,
    linear: Linear,
    ctx: BlockContext,
    source: tuple[torch.Tensor, torch.Tensor | None],
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """out = (sum, [normed | u], rstd) of source = (residual, branch), where `linear` reads normed."""
    assert weight is not None
    residual, normed_NX, rstd = out
    inputs = linear.shape[1]
    rms_norm_fwd(*source, weight, ctx.config.rms_norm_eps, residual, normed_NX[:, :inputs], rstd)
    adapter_fwd(linear, normed_NX[:, :inputs], normed_NX[:, inputs:], ctx.linear)


def _attn_norm(
    w: BlockWeights, s: SavedTensors, ctx: BlockContext, residual: torch.Tensor, branch: torch.Tensor | None
) -> None:
    _norm(w.attn_norm, w.qkv, ctx, (residual, branch), (s["x"], s["attn_normed"], s["attn_rstd"]))


def _qkv(w: BlockWeights, s: SavedTensors, ctx: BlockContext) -> None:
    c = ctx.config
    linear_fwd(w.qkv, s["attn_normed"], s["qkv"], ctx.linear)
    out = s["qk"] if c.qk_norm else s["qkv"]
    rope_fwd(s["qkv"], ctx.positions_N, ctx.rope, w.q_norm, w.k_norm, c.num_attention_heads, c.num_key_value_heads, out)


def _attention(s: SavedTensors, ctx: BlockContext) -> None:
    out, state = ctx.attend(*ctx.qkv_heads(s))
    s.attention = (out, *state)


def _mid(w: BlockWeights, s: SavedTensors, ctx: BlockContext) -> None:
    """mid = x + attn Wo^T and its norm."""
    branch = ctx.buffer("branch", ctx.config.hidden_size, s["x"])
    attn, u = s.attention[0].flatten(1), _u_o(w, s)
    if u is not None:
        adapter_fwd(w.o, attn, u, ctx.linear)
    linear_fwd(w.o, attn, branch, ctx.linear, u)
    _mlp_norm(w, s, ctx, s["x"], branch)


def _mlp_norm(
    w: BlockWeights, s: SavedTensors, ctx: BlockContext, residual: torch.Tensor, branch: torch.Tensor | None
) -> None:
    _norm(w.mlp_norm, w.gate_up, ctx, (residual, branch), (s["mid"], s["mlp_normed"], s["mlp_rstd"]))


def _act(w: BlockWeights, s: SavedTensors, ctx: BlockContext) -> None:
    """act = silu(gate) * up, and down's u beside it."""
    act_NX, inputs = s["act"], ctx.config.intermediate_size
    swiglu_fwd(s["gate_up"], act_NX[:, :inputs])
    adapter_fwd(w.down, act_NX[:, :inputs], act_NX[:, inputs:], ctx.linear)


def block_fwd(
    w: BlockWeights, s: SavedTensors, ctx: BlockContext, residual: torch.Tensor, branch: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(residual_ND, branch_ND), whose sum is the block's output; writes what `s` keeps.

    Without a branch, `residual` must be s["x"] itself (the embedding writes there). The branch returned is scratch: its
    reader is the next norm.
    """
    _attn_norm(w, s, ctx, residual, branch)
    _qkv(w, s, ctx)
    _attention(s, ctx)
    _mid(w, s, ctx)
    linear_fwd(w.gate_up, s["mlp_normed"], s["gate_up"], ctx.linear)
    _act(w, s, ctx)
    out = ctx.buffer("branch", ctx.config.hidden_size, s["x"])
    linear_fwd(w.down, s["act"], out, ctx.linear)
    return s["mid"], out


def block_recompute(w: BlockWeights, s: SavedTensors, ctx: BlockContext, flags: frozenset[str]) -> None:
    """Fills again, by the forward's own steps, what the recompute `flags` did not keep."""
    if flags & {"norm", "block"}:
        _attn_norm(w, s, ctx, s["x"], None)
    if flags & {"qkv", "block"}:
        _qkv(w, s, ctx)
    if flags & ATTENTION_DROPPED_BY:
        _attention(s, ctx)
    if "block" in flags:
        _mid(w, s, ctx)
    elif "norm" in flags:
        _mlp_norm(w, s, ctx, s["mid"], None)
    if flags & {"ffn", "block"}:
        linear_fwd(w.gate_up, s["mlp_normed"], s["gate_up"], ctx.linear)
    if flags & {"swiglu", "ffn", "block"}:
        _act(w, s, ctx)


# ---- backward


def _input_gradient(
    name: str, linear: Linear, dy_NY: torch.Tensor, dx: torch.Tensor, ctx: BlockContext, until: str | None
) -> bool:
    """The backward through one linear: du beside dy, and dx unless this is where the backward ends (-> False)."""
    adapter_dgrad(linear, dy_NY, ctx.linear)
    if name == until:
        return False
    linear_dgrad(linear, dy_NY, dx, ctx.linear)
    return True


def block_dgrad(
    w: BlockWeights,
    g: BlockWeights,
    s: SavedTensors,
    ctx: BlockContext,
    dy_NY: torch.Tensor,
    dx_NY: torch.Tensor,
    until: str | None = None,
) -> bool:
    """Overwrites dx from dy, the gradient of residual + branch; adds into the norms' and bias's gradients in `g`.

    dy_NY and dx_NY are ctx.dy_buffer's for `down`: dy, or dx, and down's du beside it. What block_wgrad reads (dy_NY,
    dgate_up, dmid, dqkv, with du beside them) stays in scratch until the next block's dgrad. `until` names the linear
    (down, gate_up, o or qkv) below which no gradient is needed, in the lowest block of a LoRA run: then dx_NY is not
    written and the answer is False.
    """
    assert w.mlp_norm is not None and w.attn_norm is not None
    c = ctx.config
    width = c.hidden_size
    dact = ctx.buffer("dact", c.intermediate_size, dy_NY)
    if not _input_gradient("down", w.down, dy_NY, dact, ctx, until):
        return False
    dgate_up = ctx.dy_buffer("dgate_up", "gate_up", dy_NY)
    swiglu_bwd(dact, s["gate_up"], dgate_up[:, : 2 * c.intermediate_size])
    dnormed = ctx.buffer("dnormed", width, dy_NY)
    if not _input_gradient("gate_up", w.gate_up, dgate_up, dnormed, ctx, until):
        return False
    dmid = ctx.dy_buffer("dmid", "o", dy_NY)
    rms_norm_bwd(dnormed, s["mid"], w.mlp_norm, s["mlp_rstd"], dy_NY[:, :width], dmid[:, :width], g.mlp_norm)
    dattn = ctx.buffer("dattn", c.q_size, dy_NY)
    if not _input_gradient("o", w.o, dmid, dattn, ctx, until):
        return False
    out, *state = s.attention
    dq, dk, dv = attention_bwd(dattn.view(out.shape), *ctx.qkv_heads(s), out, tuple(state), ctx.documents)
    dqkv = ctx.dy_buffer("dqkv", "qkv", dy_NY)
    raw = s["qkv"] if c.qk_norm else None
    target, grads = dqkv[:, : ctx.outputs("qkv")], (g.q_norm, g.k_norm, g.qkv.bias)
    rope_bwd(dq, dk, dv, raw, ctx.positions_N, ctx.rope, w.q_norm, w.k_norm, target, *grads)
    if not _input_gradient("qkv", w.qkv, dqkv, dnormed, ctx, until):
        return False
    rms_norm_bwd(dnormed, s["x"], w.attn_norm, s["attn_rstd"], dmid[:, :width], dx_NY[:, :width], g.attn_norm)
    return True


def block_wgrad(
    w: BlockWeights,
    g: BlockWeights,
    s: SavedTensors,
    ctx: BlockContext,
    dy_NY: torch.Tensor,
    accumulate: bool,
    until: str | None = None,
) -> None:
    """Writes the gradients of the block's linears into `g` (see linear_wgrad), after block_dgrad of the same block."""
    gradients = (
        ("down", w.down, g.down, lambda: s["act"], lambda: dy_NY),
        ("gate_up", w.gate_up, g.gate_up, lambda: s["mlp_normed"], lambda: ctx.dy_buffer("dgate_up", "gate_up", dy_NY)),
        ("o", w.o, g.o, lambda: s.attention[0].flatten(1), lambda: ctx.dy_buffer("dmid", "o", dy_NY)),
        ("qkv", w.qkv, g.qkv, lambda: s["attn_normed"], lambda: ctx.dy_buffer("dqkv", "qkv", dy_NY)),
    )
    for name, linear, grad, x, dy in gradients:
        u = _u_o(w, s) if name == "o" else None
        linear_wgrad(linear, grad, x(), dy(), ctx.linear, accumulate, u)
        if name == until:
            return
