from __future__ import annotations

import pytest
import torch

from fullstride.ops.rope import Rope, heads, rope_bwd_ref, rope_frequencies, rope_fwd_ref, rope_tables
from tests.kernels.place import Place, assert_close, assert_same_bits, assert_spare_untouched, high

# query heads, key/value heads, head size: halves of 1, 3, 16 and 128 columns; more heads than a program takes
SIZES = [(1, 1, 2), (3, 1, 6), (14, 2, 32), (9, 3, 256)]
NUM_TOKENS = 11


def make_rope(place: Place, head_dim: int) -> tuple[Rope, Rope]:
    """The tables on the device, and the same float32 values on the CPU for the reference."""
    cos, sin = (table.float() for table in rope_tables(rope_frequencies(head_dim, 10000.0), 64))
    return Rope(place.put(cos), place.put(sin), 1e-6), Rope(cos, sin, 1e-6)


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SIZES)
def test_forward(place: Place, num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool, spaced: bool) -> None:
    from fullstride.kernels.rope import rope_fwd

    rows = place.spaced if spaced else torch.clone
    width = (num_heads + 2 * num_kv_heads) * head_dim
    rope, rope_ref = make_rope(place, head_dim)
    positions = place.randint(64, NUM_TOKENS)
    norms = (place.randn(head_dim), place.randn(head_dim)) if has_norm else (None, None)
    qkv = rows(place.randn(NUM_TOKENS, width))
    before = high(qkv)
    out = rows(place.poisoned(NUM_TOKENS, width)) if has_norm else qkv
    rope_fwd(qkv, positions, rope, *norms, num_heads, num_kv_heads, out)

    for start, num, norm in ((0, num_heads, norms[0]), (num_heads, num_kv_heads, norms[1])):
        expected = rope_fwd_ref(
            heads(before, start, num, head_dim), positions.cpu(), rope_ref, None if norm is None else high(norm)
        )
        assert_close(heads(out, start, num, head_dim), expected)
    values = heads(out, num_heads + num_kv_heads, num_kv_heads, head_dim)
    if has_norm:
        assert values.isnan().all()  # not written
    else:
        original = heads(before, num_heads + num_kv_heads, num_kv_heads, head_dim)
        assert_same_bits(values, original.to(place.dtype))
    if spaced:
        assert_spare_untouched(out)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("trained", ["both", "k", "bias", "neither"])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SIZES)
def test_backward(
    place: Place, num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool, trained: str, in_place: bool
) -> None:
    from fullstride.kernels.rope import rope_bwd

    if has_norm == (trained == "bias") and trained != "neither":
        pytest.skip("a norm and a bias exclude one another")
    if in_place and not has_norm:
        pytest.skip("without a norm nothing is read there")
    width = (num_heads + 2 * num_kv_heads) * head_dim
    rope, rope_ref = make_rope(place, head_dim)
    positions = place.randint(64, NUM_TOKENS)
    # as attention returns them: [heads, N, E] in memory for one, [N, heads, E] for the others
    dq = place.randn(num_heads, NUM_TOKENS, head_dim).transpose(0, 1)
    dk, dv = (place.randn(NUM_TOKENS, num_kv_heads, head_dim) for _ in range(2))
    norms = (place.randn(head_dim), place.randn(head_dim)) if has_norm else (None, None)
    qkv = place.spaced(place.randn(NUM_TOKENS, width)) if has_norm else None
    dq_norm = place.randn(head_dim) if trained == "both" else None
    dk_norm = place.randn(head_dim) if trained in ("both", "k") else None
    dbias = place.randn(width) if trained == "bias" else None
    dbias_before = None if dbias is None else high(dbias)
    before = [None if x is None else high(x) for x in (dq_norm, dk_norm)]
    raw_qkv = None if qkv is None else high(qkv)
    dqkv = qkv if in_place and qkv is not None else place.spaced(place.poisoned(NUM_TOKENS, width))
    rope_bwd(dq, dk, dv, qkv, positions, rope, *norms, dqkv, dq_norm, dk_norm, dbias)

    for dx, start, norm, dnorm, dnorm_before in (
        (dq, 0, norms[0], dq_norm, before[0]),
        (dk, num_heads, norms[1], dk_norm, before[1]),
    ):
        raw = None if raw_qkv is None else heads(raw_qkv, start, dx.shape[1], head_dim)
        weight = None if norm is None else high(norm)
        dx_ref, dnorm_ref = rope_bwd_ref(high(dx), raw, positions.cpu(), rope_ref, weight)
        # with a head of two the norm's gradient nearly cancels: eps / x ** 2 of it is left
        assert_close(heads(dqkv, start, dx.shape[1], head_dim), dx_ref, inside=1e-5 if head_dim == 2 else 1e-6)
        if dnorm is not None:
            assert dnorm_ref is not None and dnorm_before is not None
            assert_close(dnorm, dnorm_before + dnorm_ref)
    if dbias is not None and dbias_before is not None:
        parts = [rope_bwd_ref(high(x), None, positions.cpu(), rope_ref, None)[0] for x in (dq, dk)]
        assert_close(dbias, dbias_before + torch.cat([*parts, high(dv)], dim=1).flatten(1).sum(0))
    assert_same_bits(heads(dqkv, num_heads + num_kv_heads, num_kv_heads, head_dim), dv)
    assert_spare_untouched(dqkv)


@pytest.mark.gpu
@pytest.mark.parametrize("trained", [False, True])
def test_backward_in_place_of_what_it_reads(gpu: torch.device, trained: bool) -> None:
    """At a training size, where programs have tokens on their way: the same bits as beside it."""
    from fullstride.kernels.rope import rope_bwd

    place, num_tokens, (num_heads, num_kv, head_dim) = Place(gpu, torch.bfloat16), 16384, (32, 8, 128)
    rope, _ = make_rope(place, head_dim)
    positions = place.randint(64, num_tokens)
    dq, dk, dv = (place.randn(num_tokens, heads, head_dim) for heads in (num_heads, num_kv, num_kv))
    norms, qkv = (
        (place.randn(head_dim), place.randn(head_dim)),
        place.randn(num_tokens, (num_heads + 2 * num_kv) * head_dim),
    )
    results = []
    for in_place in (False, *[True] * 5):
        raw = qkv.clone()
        out = raw if in_place else place.poisoned(*qkv.shape)
        dq_norm, dk_norm = (torch.zeros_like(x) if trained else None for x in norms)
        rope_bwd(dq, dk, dv, raw, positions, rope, *norms, out, dq_norm, dk_norm, None)
        results.append([x for x in (out, dq_norm, dk_norm) if x is not None])
    for result in results[1:]:
        for again, first in zip(result, results[0], strict=True):
            assert_same_bits(again, first)
