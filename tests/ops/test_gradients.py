"""Every reference against torch's autograd through the plain formula, in float64, by ||a - b|| / ||b||."""

from __future__ import annotations

import pytest
import torch

from fullstride.ops.attention import Documents, attention_bwd, attention_fwd
from fullstride.ops.cross_entropy import IGNORED, cross_entropy
from fullstride.ops.dropout import dropout
from fullstride.ops.embedding import embedding_bwd, embedding_fwd
from fullstride.ops.matmul import matmul
from fullstride.ops.norm import sum_of_squares
from fullstride.ops.rms_norm import rms_norm_bwd, rms_norm_fwd
from fullstride.ops.rope import Rope, heads, rope_bwd, rope_frequencies, rope_fwd, rope_tables
from fullstride.ops.rows import gather_rows, scatter_rows
from fullstride.ops.swiglu import swiglu_bwd, swiglu_fwd
from tests.kernels.place import distance

EXACT = 1e-12  # two orders of the same sums in float64

Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def empty(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=torch.float64)


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


def check(*pairs: Pair) -> None:
    for actual, expected in pairs:
        assert distance(actual, expected) <= EXACT


def test_rms_norm() -> None:
    x, branch, weight, dnormed, dresidual = randn(5, 7), randn(5, 7), randn(7), randn(5, 7), randn(5, 7)
    residual, normed, rstd, dx = empty(5, 7), empty(5, 7), empty(5), empty(5, 7)
    before = randn(7)
    dweight = before.clone()
    rms_norm_fwd(x, branch, weight, 1e-5, residual, normed, rstd)
    rms_norm_bwd(dnormed, residual, weight, rstd, dresidual, dx, dweight)

    x_leaf, weight_leaf = leaf(x), leaf(weight)
    total = x_leaf + branch
    expected = torch.nn.functional.rms_norm(total, (7,), weight_leaf, 1e-5)
    torch.autograd.backward([expected, total], [dnormed, dresidual])
    assert x_leaf.grad is not None and weight_leaf.grad is not None
    check((residual, total), (normed, expected), (dx, x_leaf.grad), (dweight, before + weight_leaf.grad))

    # without a branch, a residual or a trained weight, in place
    rms_norm_fwd(x, None, weight, 1e-5, x, normed, rstd)
    x_leaf = leaf(x)
    expected = torch.nn.functional.rms_norm(x_leaf, (7,), weight, 1e-5)
    expected.backward(dnormed)
    rms_norm_bwd(dnormed, x, weight, rstd, None, dnormed, None)
    assert x_leaf.grad is not None
    check((normed, expected), (dnormed, x_leaf.grad))


def test_swiglu() -> None:
    gate_up, dout, out = randn(5, 14), randn(5, 7), empty(5, 7)
    swiglu_fwd(gate_up, out)
    gate_up_leaf = leaf(gate_up)
    gate, up = gate_up_leaf.chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    expected.backward(dout)
    swiglu_bwd(dout, gate_up, gate_up)  # in place
    assert gate_up_leaf.grad is not None
    check((out, expected), (gate_up, gate_up_leaf.grad))


@pytest.mark.parametrize("has_norm", [False, True])
def test_rope(has_norm: bool) -> None:
    """Against a rotation of complex numbers: element i of a head is the real part, i + E/2 the imaginary one."""
    tokens, num_heads, num_kv_heads, head_dim = 5, 3, 1, 6
    width = (num_heads + 2 * num_kv_heads) * head_dim
    rope = Rope(*rope_tables(rope_frequencies(head_dim, 100.0), 16), norm_eps=1e-5)
    positions = torch.tensor([0, 1, 2, 0, 15], dtype=torch.int32)
    norms = (randn(head_dim), randn(head_dim)) if has_norm else (None, None)
    qkv = randn(tokens, width)
    out = qkv.clone()
    rope_fwd(qkv if has_norm else out, positions, rope, *norms, num_heads, num_kv_heads, out)

    qkv_leaf = leaf(qkv)
    norm_leaves = [None if norm is None else leaf(norm) for norm in norms]
    parts = []
    for start, num, norm in ((0, num_heads, norm_leaves[0]), (num_heads, num_kv_heads, norm_leaves[1])):
        x = heads(qkv_leaf, start, num, head_dim)
        if norm is not None:
            x = torch.nn.functional.rms_norm(x, (head_dim,), norm, 1e-5)
        angle = positions[:, None].double() * 100.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
        turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)[:, None]
        parts.append(torch.cat([turned.real, turned.imag], dim=-1))
    parts.append(heads(qkv_leaf, num_heads + num_kv_heads, num_kv_heads, head_dim))
    grads = [randn(*part.shape) for part in parts]
    torch.autograd.backward(parts, grads)
    check((out, torch.cat(parts, dim=1).flatten(1)))

    dqkv, before = empty(tokens, width), randn(2, head_dim)
    dq_norm, dk_norm = before.clone() if has_norm else (None, None)
    dq, dk, dv = grads
    bias_before = randn(width)
    dbias = None if has_norm else bias_before.clone()
    rope_bwd(dq, dk, dv, qkv if has_norm else None, positions, rope, *norms, dqkv, dq_norm, dk_norm, dbias)
    assert qkv_leaf.grad is not None
    check((dqkv, qkv_leaf.grad))
    if dbias is not None:  # the bias is added to every token's qkv
        check((dbias, bias_before + qkv_leaf.grad.sum(0)))
    for dnorm, start, norm in zip((dq_norm, dk_norm), before, norm_leaves, strict=True):
        if dnorm is not None and norm is not None and norm.grad is not None:
            check((dnorm, start + norm.grad))


def test_attention() -> None:
    """Documents of 1, 4 and 600 tokens and an empty one, three queries a key head: torch's attention, one by one."""
    q, k, v, dout = randn(605, 6, 5), randn(605, 2, 5), randn(605, 2, 5), randn(605, 6, 5)
    documents = Documents(torch.tensor([0, 1, 5, 605, 605], dtype=torch.int32), 1, 605, packed=True)
    out, saved = attention_fwd(q, k, v, documents)
    grads = attention_bwd(dout, q, k, v, out, saved, documents)

    leaves = [leaf(x) for x in (q, k, v)]
    parts = []
    for start, stop in ((0, 1), (1, 5), (5, 605)):
        q_d, k_d, v_d = (x[start:stop].transpose(0, 1)[None] for x in leaves)
        part = torch.nn.functional.scaled_dot_product_attention(q_d, k_d, v_d, is_causal=True, enable_gqa=True)
        parts.append(part[0].transpose(0, 1))
    expected = torch.cat(parts)
    expected.backward(dout)
    check((out, expected), *((grad, x.grad) for grad, x in zip(grads, leaves, strict=True) if x.grad is not None))


@pytest.mark.parametrize("z", [0.0, 1e-2])
def test_cross_entropy(z: float) -> None:
    """Loss without z-loss, gradient with it; an ignored row gives 0 whatever it holds."""
    logits, targets = randn(5, 7), torch.tensor([0, 6, IGNORED, 3, 3], dtype=torch.int32)
    logits_leaf = leaf(logits)
    logits[2] = float("nan")
    loss, lse, z_loss = empty(5), empty(5), torch.tensor([z], dtype=torch.float64)
    before = logits.clone()
    cross_entropy(logits, targets, z_loss, loss, lse, False)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    cross_entropy(logits, targets, z_loss, loss, lse, True)

    supervised = targets != IGNORED
    expected = torch.nn.functional.cross_entropy(logits_leaf, targets.long(), reduction="none", ignore_index=IGNORED)
    lse_leaf = torch.logsumexp(logits_leaf, dim=1) * supervised
    (expected.sum() + z * lse_leaf.square().sum()).backward()
    assert logits_leaf.grad is not None
    check((loss, expected), (lse, lse_leaf), (logits, logits_leaf.grad))
    assert loss[2] == 0 and lse[2] == 0 and logits[2].abs().sum() == 0


def test_embedding() -> None:
    table, ids, dout = randn(9, 7), torch.tensor([3, 0, 3, 8, 3], dtype=torch.int32), randn(5, 7)
    out, dtable = empty(5, 7), randn(9, 7)
    before = dtable.clone()
    embedding_fwd(table, ids, out)
    embedding_bwd(dout, ids, dtable)
    table_leaf = leaf(table)
    expected = torch.nn.functional.embedding(ids, table_leaf)
    expected.backward(dout)
    assert table_leaf.grad is not None
    assert torch.equal(out, expected)  # a move
    check((dtable, before + table_leaf.grad))


def test_rows() -> None:
    """Moves are exact; -1 gives zeros, and is skipped."""
    x, index = randn(6, 3), torch.tensor([4, -1, 0], dtype=torch.int32)
    out = empty(3, 3)
    gather_rows(x, index, out)
    assert torch.equal(out, torch.stack([x[4], torch.zeros(3, dtype=torch.float64), x[0]]))
    target, source = randn(6, 3), randn(3, 3)
    expected = target.clone()
    expected[4], expected[0] = source[0], source[2]
    scatter_rows(source, index, target)
    assert torch.equal(target, expected)


def test_matmul_and_bias() -> None:
    a, b, bias, out = randn(5, 7), randn(7, 3), randn(3), empty(5, 3)
    matmul(a, b, out)
    check((out, a @ b))
    matmul(a, b, out, accumulate=True, alpha=0.5)
    check((out, 1.5 * (a @ b)))
    matmul(a, b, out, bias=bias)
    check((out, a @ b + bias))


def test_norm() -> None:
    x, out = randn(1001), empty(1)
    sum_of_squares(x, out)
    check((out[0], x.dot(x)))


def test_dropout_is_its_own_backward() -> None:
    """It is linear, with the same mask both ways: <dropout(x), y> = <x, dropout(y)>; accumulating adds."""
    x, y, rng = randn(11, 7), randn(11, 7), torch.tensor([1, 2, 3, 0])
    dropped_x, dropped_y = empty(11, 7), y.clone()
    dropout(x, 0.3, rng, 5, dropped_x)
    dropout(y, 0.3, rng, 5, dropped_y, accumulate=True)
    check(((dropped_x * y).sum(), (x * (dropped_y - y)).sum()))
    assert 0 < (dropped_x == 0).sum() < 77
