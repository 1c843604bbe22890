"""One transformer block: forward, recompute, backward for its input (dgrad) and for its weights (wgrad).

    x    = residual + branch            normed = norm(x)        qkv = normed Wqkv^T
    q, k = rope(q/k-norm(qkv))          attn = attention(q, k, v)
    mid  = x + attn Wo^T                normed = norm(mid)      gate_up = normed Wgu^T
    act  = silu(gate) * up              branch = act Wdown^T

The residual stream travels as a pair (residual, branch): the addition happens inside the next norm. LoRA, recompute,
the KV cache and tensor parallelism (model/tensor_parallel) enter as arguments; there is no second block. In the
backward the gradients of x, qkv, mid and gate_up take the places of those tensors. See model/spec for the shape legend,
and model/linear for the spare columns that an adapted linear's input and output gradient have.
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
from fullstride.model.tensor_parallel import ALONE, TensorParallel
from fullstride.ops.attention import Documents, attention_bwd
from fullstride.ops.rms_norm import rms_norm_bwd, rms_norm_fwd
from fullstride.ops.rope import Rope, heads, rope_bwd, rope_fwd
from fullstride.ops.swiglu import swiglu_bwd, swiglu_fwd

# recompute flags that drop what attention returned: its output and statistics
ATTENTION_DROPPED_BY = frozenset({"att", "block"})

# (q_NHE, k_NKE, v_NKE) -> (out_NHE, what the backward needs besides)
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, tuple[torch.Tensor, ...]]]


class SavedTensors(Protocol):
    """What one layer keeps for its backward (memory/saved): tensors by name, without or with their spare columns, and
    what attention returned."""

    attention: tuple[torch.Tensor, ...]

    def __getitem__(self, name: str) -> torch.Tensor: ...

    def extended(self, name: str) -> torch.Tensor: ...


# what is kept of the residual stream
STREAM = frozenset({"x", "attn_rstd", "mid", "mlp_rstd"})

SavedRow = tuple[str, int, frozenset[str], bool, int, int]


def saved_table(c: ModelConfig, spare: Mapping[str, int], row_shares: int = 1) -> list[SavedRow]:
    """What a block keeps: (name, columns per token, recompute flags that drop it, float32 always, spare columns, ranks
    that share its rows). row_shares: these, of the residual stream. c: the sizes of this rank's share of the block.

    Producer and readers stand in the functions below. `spare`: columns of u and du of each linear that has an adapter.
    They lie beside its input, and beside its output, whose place the output's gradient takes. x and mid are no linear's
    outputs, but mid and o's branch have one gradient, and so have x and the branch of the block below. Attention's
    output and statistics come as new tensors from its library (see ATTENTION_DROPPED_BY), so o's u lies apart. Where
    ranks share rows, what is beside x and mid lies apart too: see BlockContext.output_gradient.
    """
    qkv_columns = c.q_size + 2 * c.kv_size
    inputs = {"attn_normed": "qkv", "mlp_normed": "gate_up", "act": "down"}
    outputs = {"qkv": "qkv", "gate_up": "gate_up"} | ({"x": "down", "mid": "o"} if row_shares == 1 else {})
    beside = {name: spare.get(linear, 0) for name, linear in (inputs | outputs).items()}
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
    return [
        (name, columns, frozenset(flags), wide, beside.get(name, 0), row_shares if name in STREAM else 1)
        for name, columns, flags, wide in rows
    ]


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
    """What all layers of one micro-step share. config: the sizes of this rank's share of a block."""

    config: ModelConfig
    linear: LinearContext
    rope: Rope
    positions_N: torch.Tensor
    documents: Documents
    attend: Attend
    tp: TensorParallel = ALONE

    def buffer(self, name: str, columns: int, like: torch.Tensor, spare: int = 0) -> torch.Tensor:
        """Scratch [N, columns] of `like`'s dtype."""
        return self.linear.scratch(name, (self.positions_N.shape[0], columns), like.dtype, spare)

    def output_gradient(
        self, name: str, own: torch.Tensor, adapter: Adapter | None = None, *, filled: bool = False
    ) -> torch.Tensor:
        """[dy | du] of a linear whose output is a term of the residual stream, with the rows of all ranks.

        own: this rank's rows; that is all, unless ranks share them: then scratch `name`, which is filled from `own`, or
        was before (`filled`) by the same block.
        """
        if not self.tp.sequence:
            return own
        columns = self.config.hidden_size
        whole = self.buffer(name, columns, own, 0 if adapter is None else adapter.a.shape[0])
        if not filled:
            self.tp.own(whole)[:, :columns].copy_(own[:, :columns])
            self.tp.gather(whole[:, :columns], self.linear.scratch)
        return whole

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
    s: SavedTensors,
    names: tuple[str, str, str],
    ctx: BlockContext,
    source: tuple[torch.Tensor, torch.Tensor | None],
) -> None:
    """Writes (sum, normed, rstd) under `names`, from source = (residual, branch), and beside normed the u of `linear`,
    which reads it."""
    assert weight is not None
    residual, normed, rstd = names
    rms_norm_fwd(*source, weight, ctx.config.rms_norm_eps, s[residual], ctx.tp.own(s[normed]), s[rstd])
    ctx.tp.gather(s[normed], ctx.linear.scratch)
    adapter_fwd(linear, s[normed], s.extended(normed)[:, linear.shape[1] :], ctx.linear)


def _attn_norm(
    w: BlockWeights, s: SavedTensors, ctx: BlockContext, residual: torch.Tensor, branch: torch.Tensor | None
) -> None:
    _norm(w.attn_norm, w.qkv, s, ("x", "attn_normed", "attn_rstd"), ctx, (residual, branch))


def _qkv(w: BlockWeights, s: SavedTensors, ctx: BlockContext) -> None:
    c = ctx.config
    linear_fwd(w.qkv, s.extended("attn_normed"), s["qkv"], ctx.linear)
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
    _mlp_norm(w, s, ctx, s["x"], ctx.tp.summed(branch))


def _mlp_norm(
    w: BlockWeights, s: SavedTensors, ctx: BlockContext, residual: torch.Tensor, branch: torch.Tensor | None
) -> None:
    _norm(w.mlp_norm, w.gate_up, s, ("mid", "mlp_normed", "mlp_rstd"), ctx, (residual, branch))


def _act(w: BlockWeights, s: SavedTensors, ctx: BlockContext) -> None:
    """act = silu(gate) * up, and down's u beside it."""
    swiglu_fwd(s["gate_up"], s["act"])
    adapter_fwd(w.down, s["act"], s.extended("act")[:, ctx.config.intermediate_size :], ctx.linear)


def block_fwd(
    w: BlockWeights, s: SavedTensors, ctx: BlockContext, residual: torch.Tensor, branch: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(residual_ND, branch_ND), whose sum is the block's output (this rank's rows of it); writes what `s` keeps.

    Without a branch, `residual` must be s["x"] itself (the embedding writes there). The branch returned is scratch: its
    reader is the next norm.
    """
    _attn_norm(w, s, ctx, residual, branch)
    _qkv(w, s, ctx)
    _attention(s, ctx)
    _mid(w, s, ctx)
    linear_fwd(w.gate_up, s.extended("mlp_normed"), s["gate_up"], ctx.linear)
    _act(w, s, ctx)
    out = ctx.buffer("branch", ctx.config.hidden_size, s["x"])
    linear_fwd(w.down, s.extended("act"), out, ctx.linear)
    return s["mid"], ctx.tp.summed(out)


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
        linear_fwd(w.gate_up, s.extended("mlp_normed"), s["gate_up"], ctx.linear)
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
    until: str | None = None,
) -> None:
    """From dy_NY, the gradient of residual + branch (with columns for down's du), to that of the block's input: this
    rank's rows of both.

    The gradients of gate_up, mid, qkv and x take the places of those tensors, with du beside them, for block_wgrad and,
    the last one, for the block below. Adds into the norms' and bias's gradients in `g`. `until` names the linear (down,
    gate_up, o or qkv) below which no gradient is needed, in the lowest block of a LoRA run: what follows is not done.
    """
    assert w.mlp_norm is not None and w.attn_norm is not None
    c = ctx.config
    dact = ctx.buffer("dact", c.intermediate_size, dy_NY)
    dout = ctx.output_gradient("ddown", dy_NY, w.down.adapter)
    if not _input_gradient("down", w.down, dout, dact, ctx, until):
        return
    swiglu_bwd(dact, s["gate_up"], s["gate_up"])
    dnormed = ctx.buffer("dnormed", c.hidden_size, dy_NY)
    if not _input_gradient("gate_up", w.gate_up, s.extended("gate_up"), dnormed, ctx, until):
        return
    dmlp, dresidual = ctx.tp.summed(dnormed), dy_NY[:, : c.hidden_size]
    rms_norm_bwd(dmlp, s["mid"], w.mlp_norm, s["mlp_rstd"], dresidual, s["mid"], g.mlp_norm)
    dattn = ctx.buffer("dattn", c.q_size, dy_NY)
    dmid = ctx.output_gradient("do", s.extended("mid"), w.o.adapter)
    if not _input_gradient("o", w.o, dmid, dattn, ctx, until):
        return
    out, *state = s.attention
    dq, dk, dv = attention_bwd(dattn.view(out.shape), *ctx.qkv_heads(s), out, tuple(state), ctx.documents)
    raw, grads = s["qkv"] if c.qk_norm else None, (g.q_norm, g.k_norm, g.qkv.bias)
    rope_bwd(dq, dk, dv, raw, ctx.positions_N, ctx.rope, w.q_norm, w.k_norm, s["qkv"], *grads)
    if not _input_gradient("qkv", w.qkv, s.extended("qkv"), dnormed, ctx, until):
        return
    rms_norm_bwd(ctx.tp.summed(dnormed), s["x"], w.attn_norm, s["attn_rstd"], s["mid"], s["x"], g.attn_norm)


def block_wgrad(
    w: BlockWeights,
    g: BlockWeights,
    s: SavedTensors,
    ctx: BlockContext,
    dy_NY: torch.Tensor,
    accumulate: bool,
    until: str | None = None,
) -> None:
    """Writes the gradients of the block's linears into `g` (see linear_wgrad), after block_dgrad of the same block;
    where ranks share rows, right after it."""

    def dout(name: str, linear: Linear, own: torch.Tensor) -> torch.Tensor:
        return ctx.output_gradient(name, own, linear.adapter, filled=True)

    gradients = (
        ("down", w.down, g.down, lambda: s.extended("act"), lambda: dout("ddown", w.down, dy_NY)),
        ("gate_up", w.gate_up, g.gate_up, lambda: s.extended("mlp_normed"), lambda: s.extended("gate_up")),
        ("o", w.o, g.o, lambda: s.attention[0].flatten(1), lambda: dout("do", w.o, s.extended("mid"))),
        ("qkv", w.qkv, g.qkv, lambda: s.extended("attn_normed"), lambda: s.extended("qkv")),
    )
    for name, linear, grad, x, dy in gradients:
        u = _u_o(w, s) if name == "o" else None
        linear_wgrad(linear, grad, x(), dy(), ctx.linear, accumulate, u)
        if name == until:
            return
