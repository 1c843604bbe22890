"""One transformer block: forward, recompute, backward for its input (dgrad) and for its weights (wgrad).

    x    = residual + branch            normed = norm(x)        qkv = normed Wqkv^T
    q, k = rope(q/k-norm(qkv))          attn = attention(q, k, v)
    mid  = x + attn Wo^T                normed = norm(mid)      gate_up = normed Wgu^T
    act  = silu(gate) * up              branch = act Wdown^T

The residual stream travels as a pair (residual, branch): the addition happens inside the next norm. LoRA, recompute and
the KV cache enter as arguments; there is no second block. See model/spec for the shape legend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from fullstride.model.linear import (
    Adapter,
    Linear,
    LinearContext,
    adapter_dgrad,
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


SavedRow = tuple[str, int, frozenset[str], bool]


def saved_table(c: ModelConfig, adapter_ranks: dict[str, int]) -> list[SavedRow]:
    """What a block keeps: (name, columns per token, recompute flags that drop it, float32 always).

    Producer and readers stand in the functions below. `adapter_ranks`: columns of each linear's u = dropout(x) A^T.
    Attention's output and statistics come as new tensors from its library (see ATTENTION_DROPPED_BY).
    """
    qkv_columns = c.q_size + 2 * c.kv_size
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
    rows += [(f"u_{name}", rank, (), False) for name, rank in adapter_ranks.items()]
    return [(name, columns, frozenset(flags), wide) for name, columns, flags, wide in rows]


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
        return Linear(views.get(name), views.get(f"{name}_bias"), adapters.get(name))

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

    def buffer(self, name: str, columns: int, like: torch.Tensor) -> torch.Tensor:
        """Scratch [N, columns] of `like`'s dtype."""
        return self.linear.scratch(name, (like.shape[0], columns), like.dtype)

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

    def du(self, name: str, linear: Linear, like: torch.Tensor) -> torch.Tensor | None:
        """Scratch for the gradient of the linear's u; read by its wgrad. None without an adapter."""
        if linear.adapter is None:
            return None
        return self.buffer(f"du_{name}", linear.adapter.a.shape[0], like)


def _u(s: SavedTensors, name: str, linear: Linear) -> torch.Tensor | None:
    return None if linear.adapter is None else s[f"u_{name}"]


# ---- forward, in steps that the recompute calls again


def _attn_norm(
    w: BlockWeights, s: SavedTensors, ctx: BlockContext, residual: torch.Tensor, branch: torch.Tensor | None
) -> None:
    assert w.attn_norm is not None
    eps = ctx.config.rms_norm_eps
    rms_norm_fwd(residual, branch, w.attn_norm, eps, s["x"], s["attn_normed"], s["attn_rstd"])


def _qkv(w: BlockWeights, s: SavedTensors, ctx: BlockContext) -> None:
    c = ctx.config
    linear_fwd(w.qkv, s["attn_normed"], s["qkv"], _u(s, "qkv", w.qkv), ctx.linear)
    out = s["qk"] if c.qk_norm else s["qkv"]
    rope_fwd(s["qkv"], ctx.positions_N, ctx.rope, w.q_norm, w.k_norm, c.num_attention_heads, c.num_key_value_heads, out)


def _attention(s: SavedTensors, ctx: BlockContext) -> None:
    out, state = ctx.attend(*ctx.qkv_heads(s))
    s.attention = (out, *state)


def _mid(w: BlockWeights, s: SavedTensors, ctx: BlockContext) -> None:
    """mid = x + attn Wo^T and its norm."""
    assert w.mlp_norm is not None
    branch = ctx.buffer("branch", ctx.config.hidden_size, s["x"])
    linear_fwd(w.o, s.attention[0].flatten(1), branch, _u(s, "o", w.o), ctx.linear)
    eps = ctx.config.rms_norm_eps
    rms_norm_fwd(s["x"], branch, w.mlp_norm, eps, s["mid"], s["mlp_normed"], s["mlp_rstd"])


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
    linear_fwd(w.gate_up, s["mlp_normed"], s["gate_up"], _u(s, "gate_up", w.gate_up), ctx.linear)
    swiglu_fwd(s["gate_up"], s["act"])
    out = ctx.buffer("branch", ctx.config.hidden_size, s["x"])
    linear_fwd(w.down, s["act"], out, _u(s, "down", w.down), ctx.linear)
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
        assert w.mlp_norm is not None
        eps = ctx.config.rms_norm_eps
        rms_norm_fwd(s["mid"], None, w.mlp_norm, eps, s["mid"], s["mlp_normed"], s["mlp_rstd"])
    if flags & {"ffn", "block"}:
        linear_fwd(w.gate_up, s["mlp_normed"], s["gate_up"], _u(s, "gate_up", w.gate_up), ctx.linear)
    if flags & {"swiglu", "ffn", "block"}:
        swiglu_fwd(s["gate_up"], s["act"])


# ---- backward


def _input_gradient(
    name: str, linear: Linear, dy: torch.Tensor, dx: torch.Tensor, ctx: BlockContext, until: str | None
) -> bool:
    """The backward through one linear: du for its wgrad, and dx unless this is where the backward ends (-> False)."""
    du = ctx.du(name, linear, dy)
    if linear.adapter is not None and du is not None:
        adapter_dgrad(linear.adapter, dy, du)
    if name == until:
        return False
    linear_dgrad(linear, dy, du, dx, ctx.linear)
    return True


def block_dgrad(
    w: BlockWeights,
    g: BlockWeights,
    s: SavedTensors,
    ctx: BlockContext,
    dy_ND: torch.Tensor,
    dx_ND: torch.Tensor,
    until: str | None = None,
) -> bool:
    """Overwrites dx_ND from dy_ND, the gradient of residual + branch; adds into the norms' and bias's gradients in `g`.

    What block_wgrad reads (dgate_up, dmid, dqkv and the adapters' du) stays in scratch until the next block's dgrad;
    dy_ND is left as it is. `until` names the linear (down, gate_up, o or qkv) below which no gradient is needed, in the
    lowest block of a LoRA run: then dx_ND is not written and the answer is False.
    """
    assert w.mlp_norm is not None and w.attn_norm is not None
    c = ctx.config
    dact = ctx.buffer("dact", c.intermediate_size, dy_ND)
    if not _input_gradient("down", w.down, dy_ND, dact, ctx, until):
        return False
    dgate_up = ctx.buffer("dgate_up", 2 * c.intermediate_size, dy_ND)
    swiglu_bwd(dact, s["gate_up"], dgate_up)
    dnormed = ctx.buffer("dnormed", c.hidden_size, dy_ND)
    if not _input_gradient("gate_up", w.gate_up, dgate_up, dnormed, ctx, until):
        return False
    dmid = ctx.buffer("dmid", c.hidden_size, dy_ND)
    rms_norm_bwd(dnormed, s["mid"], w.mlp_norm, s["mlp_rstd"], dy_ND, dmid, g.mlp_norm)
    dattn = ctx.buffer("dattn", c.q_size, dy_ND)
    if not _input_gradient("o", w.o, dmid, dattn, ctx, until):
        return False
    out, *state = s.attention
    dq, dk, dv = attention_bwd(dattn.view(out.shape), *ctx.qkv_heads(s), out, tuple(state), ctx.documents)
    dqkv = ctx.buffer("dqkv", c.q_size + 2 * c.kv_size, dy_ND)
    raw = s["qkv"] if c.qk_norm else None
    grads = g.q_norm, g.k_norm, g.qkv.bias
    rope_bwd(dq, dk, dv, raw, ctx.positions_N, ctx.rope, w.q_norm, w.k_norm, dqkv, *grads)
    if not _input_gradient("qkv", w.qkv, dqkv, dnormed, ctx, until):
        return False
    rms_norm_bwd(dnormed, s["x"], w.attn_norm, s["attn_rstd"], dmid, dx_ND, g.attn_norm)
    return True


def block_wgrad(
    w: BlockWeights,
    g: BlockWeights,
    s: SavedTensors,
    ctx: BlockContext,
    dy_ND: torch.Tensor,
    accumulate: bool,
    until: str | None = None,
) -> None:
    """Writes the gradients of the block's linears into `g` (see linear_wgrad), after block_dgrad of the same block."""
    c = ctx.config
    gradients = (
        ("down", w.down, g.down, lambda: s["act"], lambda: dy_ND),
        ("gate_up", w.gate_up, g.gate_up, lambda: s["mlp_normed"], lambda: buffer("dgate_up", 2 * c.intermediate_size)),
        ("o", w.o, g.o, lambda: s.attention[0].flatten(1), lambda: buffer("dmid", c.hidden_size)),
        ("qkv", w.qkv, g.qkv, lambda: s["attn_normed"], lambda: buffer("dqkv", c.q_size + 2 * c.kv_size)),
    )

    def buffer(name: str, columns: int) -> torch.Tensor:
        return ctx.buffer(name, columns, dy_ND)

    for name, linear, grad, x, dy in gradients:
        du = ctx.du(name, linear, dy_ND)
        linear_wgrad(linear, grad, x(), dy(), _u(s, name, linear), du, ctx.linear, accumulate)
        if name == until:
            return
