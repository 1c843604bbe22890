from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.kernels.attention import FLASH4_HEAD_DIMS, attention_bwd, attention_fwd
from fullstride.ops.attention import Documents, attention_bwd_ref, attention_fwd_ref
from tests.kernels.place import FLOAT32, Place, assert_same_bits, distance, high

ROWS, SEQ_LEN = 3, 160
ONE_A_ROW = (0, 160, 320, 480)
# documents of 1 token, of less and more than a kernel's block, over a whole row; empty ones at the end
PACKED = (0, 1, 60, 160, 320, 457, 480, 480, 480)


def flash4_installed() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


LIBRARIES = pytest.mark.parametrize(
    "flash4",
    [
        pytest.param(False, id="torch"),
        pytest.param(True, id="flash4", marks=pytest.mark.skipif(not flash4_installed(), reason="no flash-attn-4")),
    ],
)


def make_documents(packed: bool, deterministic: bool, device: torch.device | str, flash4: bool = False) -> Documents:
    bounds = torch.tensor(PACKED if packed else ONE_A_ROW, dtype=torch.int32, device=device)
    return Documents(bounds, ROWS, SEQ_LEN, packed, deterministic, flash4)


def make_qkv(
    place: Place, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of one merged buffer, as the engine passes them."""
    width = (num_heads + 2 * num_kv_heads) * head_dim
    merged = place.randn(ROWS * SEQ_LEN, width).unflatten(1, (-1, head_dim))
    q, k, v = merged.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v


def reference(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: tuple[int, ...]
) -> list[torch.Tensor]:
    """(out, dq, dk, dv) in float64, document by document."""
    parts = []
    for start, stop in itertools.pairwise(bounds):
        if stop == start:
            continue
        dout_d, q_d, k_d, v_d = (high(x[start:stop]) for x in (dout, q, k, v))
        out, lse = attention_fwd_ref(q_d, k_d, v_d)
        parts.append((out, *attention_bwd_ref(dout_d, q_d, k_d, v_d, out, lse)))
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def same_dtype_reference(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: tuple[int, ...]
) -> list[torch.Tensor]:
    """(out, dq, dk, dv) by plain products and torch's autograd in the dtype of q: the probabilities are rounded too."""
    parts = []
    for start, stop in itertools.pairwise(bounds):
        if stop == start:
            continue
        leaves = [x[start:stop].cpu().transpose(0, 1).detach().requires_grad_() for x in (q, k, v)]
        group = q.shape[1] // k.shape[1]
        q_d, k_d, v_d = leaves[0], *(x.repeat_interleave(group, 0) for x in leaves[1:])
        scores = q_d @ k_d.transpose(1, 2) * q.shape[2] ** -0.5
        future = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
        out = scores.masked_fill(future, float("-inf")).softmax(-1) @ v_d
        out.backward(dout[start:stop].cpu().transpose(0, 1))
        parts.append([x.transpose(0, 1) for x in (out, *(leaf.grad for leaf in leaves)) if x is not None])
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


@pytest.mark.gpu
@LIBRARIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 64), (6, 2, 64), (8, 2, 128), (3, 1, 40), (2, 1, 256)]
)
def test_against_references(
    gpu: torch.device,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    packed: bool,
    deterministic: bool,
    dtype: torch.dtype,
    flash4: bool,
) -> None:
    """At most twice as far from float64 as plain products in the same dtype; in float32 also some roundings more."""
    if flash4 and (head_dim not in FLASH4_HEAD_DIMS or dtype == torch.float32):
        pytest.skip("torch's operations run, as without it")
    place = Place(gpu, dtype)
    q, k, v = make_qkv(place, num_heads, num_kv_heads, head_dim)
    dout = place.randn(ROWS * SEQ_LEN, num_heads, head_dim)
    documents, bounds = make_documents(packed, deterministic, gpu, flash4), PACKED if packed else ONE_A_ROW
    out, saved = attention_fwd(q, k, v, documents)
    results = [out, *attention_bwd(dout, q, k, v, out, saved, documents)]
    expected = reference(dout, q, k, v, bounds)
    same_dtype = same_dtype_reference(dout, q, k, v, bounds)
    # float32 products on tensor cores split each factor in three TF32: a few more roundings than plain ones
    inside = 10 * FLOAT32 if dtype == torch.float32 else 0.0
    for result, right, plain in zip(results, expected, same_dtype, strict=True):
        assert result.dtype == dtype and result.stride(-1) == 1
        assert distance(result, right) <= 2 * distance(plain, right) + inside
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
@LIBRARIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_deterministic_repeats_bitwise(gpu: torch.device, packed: bool, dtype: torch.dtype, flash4: bool) -> None:
    """16 x 1024, twenty times: small sizes look deterministic and are no evidence."""
    place, rows, length = Place(gpu, dtype), 16, 1024
    q, k, v = (place.randn(rows * length, heads, 64) for heads in (8, 2, 2))
    dout = place.randn(rows * length, 8, 64)
    step = 256 if packed else length
    bounds = torch.arange(0, rows * length + 1, step, dtype=torch.int32, device=gpu)
    documents = Documents(bounds, rows, length, packed, deterministic=True, flash4=flash4)
    results = []
    for _ in range(20):
        out, saved = attention_fwd(q, k, v, documents)
        results.append((out, *attention_bwd(dout, q, k, v, out, saved, documents)))
    for result in results[1:]:
        for again, first in zip(result, results[0], strict=True):
            assert_same_bits(again, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_shapes(head_dim: int, packed: bool, deterministic: bool, dtype: torch.dtype) -> None:
    """Without data or a GPU: torch checks the arguments of every operation; what comes out has the faces' shapes."""
    place = Place(torch.device("meta"), dtype)
    q, k, v = make_qkv(place, 6, 2, head_dim)
    documents = make_documents(packed, deterministic, "meta")
    out, saved = attention_fwd(q, k, v, documents)
    assert out.shape == q.shape and out.dtype == dtype
    assert all(x.dtype == torch.float32 for x in saved)
    grads = attention_bwd(torch.empty_like(out), q, k, v, out, saved, documents)
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert grad.shape == x.shape and grad.dtype == dtype and grad.stride(2) == 1
    assert not torch.are_deterministic_algorithms_enabled()


def test_refusals() -> None:
    documents = make_documents(False, False, "meta")
    for head_dim in (20, 264):
        x = torch.empty(480, 1, head_dim, device="meta")
        with pytest.raises(ConfigError, match=f"multiple of 8, at most 256; this model has head_dim={head_dim}"):
            attention_fwd(x, x, x, documents)
    x = torch.empty(480, 1, 16, dtype=torch.float64, device="meta")
    with pytest.raises(ConfigError, match=r"bfloat16, float16 or float32, not float64\. Choose one"):
        attention_fwd(x, x, x, documents)
