"""Products whose algorithm is chosen by timing: they exist on a GPU in 16-bit types only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fullstride.kernels.matmul as matmul_module
from fullstride.ops.matmul import WORKSPACE_BYTES, Matmul, fastest_matmul
from tests.kernels.place import FLOAT32, assert_close, assert_same_bits, high

pytestmark = pytest.mark.gpu

SHAPES = [(512, 256, 384), (257, 40, 131), (1, 64, 8), (96, 1, 33), (64, 32, 1), (2048, 4096, 48)]  # M, N, K
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def products(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Matmul]:
    """Nothing chosen yet."""
    monkeypatch.setattr(matmul_module, "_plans", {})
    yield fastest_matmul(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=gpu))


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to("cuda", dtype)


def operand(rows: int, columns: int, transposed: bool, spare: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, columns], in one of the two orders, rows (or columns) `spare` elements apart."""
    if transposed:
        return randn(columns, rows + spare, dtype=dtype)[:, :rows].t()
    return randn(rows, columns + spare, dtype=dtype)[:, :columns]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", [(False, False), (False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_order_and_stride(
    shape: tuple[int, int, int], order: tuple[bool, bool], dtype: torch.dtype, products: Matmul
) -> None:
    m, n, k = shape
    for spare in (0, 8, 3):
        a, b = operand(m, k, order[0], spare, dtype), operand(k, n, order[1], spare, dtype)
        held = torch.full((m, n + spare), float("nan"), dtype=dtype, device="cuda")
        out = held[:, :n]
        products(a, b, out)
        assert_close(out, high(a) @ high(b), FLOAT32 * k**0.5)
        assert held[:, n:].isnan().all()
        start = randn(m, n, dtype=dtype)
        out.copy_(start)
        products(a, b, out, accumulate=True, alpha=0.37)  # chosen by timing, of which no trace may stay
        assert_close(out, high(start) + 0.37 * (high(a) @ high(b)), FLOAT32 * k**0.5)


def test_bias(products: Matmul) -> None:
    a, b = randn(300, 64), randn(64, 48)
    for bias in (randn(48), randn(48)):  # the second one meets the first one's plan
        out = torch.empty(300, 48, dtype=torch.bfloat16, device="cuda")
        products(a, b, out, bias=bias)
        assert_close(out, high(a) @ high(b) + high(bias), FLOAT32 * 8)


def test_captured_and_repeated(products: Matmul) -> None:
    """The choice is made once: a capture after the first product gives its bits, every time."""
    a, b = randn(2048, 512), randn(512, 1024)
    first = torch.empty(2048, 1024, dtype=torch.bfloat16, device="cuda")
    products(a, b, first)
    out, graph = torch.empty_like(first), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products(a, b, out)
    for _ in range(5):
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, first)
    assert len(matmul_module._plans) == 1
    with pytest.raises(AssertionError, match="inside a capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        out.zero_()  # torch warns of empty graphs
        products(a[:64], b, out[:64])
