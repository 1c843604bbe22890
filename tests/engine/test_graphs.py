"""Graphs of captured work: memsets in them become kernels, and replays do what the work did."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fullstride.engine.graph_nodes import replace_memsets
from fullstride.engine.graphs import Graphs

pytestmark = pytest.mark.gpu


def memset(target: torch.Tensor, value: int, element_bytes: int, count: int, offset: int = 0) -> None:
    """The driver's own memset, on the current stream, which capture turns into a memset node."""
    set_elements = getattr(ctypes.CDLL("libcuda.so.1"), f"cuMemsetD{8 * element_bytes}Async")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    address = ctypes.c_uint64(target.data_ptr() + offset)
    assert set_elements(address, ctypes.c_uint(value), ctypes.c_size_t(count), stream) == 0


@pytest.mark.parametrize(
    ("element_bytes", "value", "count", "offset", "stay"),
    [
        (1, 0xAB, 1000, 0, 0),
        (1, 0xAB, 1001, 0, 1),  # no whole words
        (1, 0, 8, 2, 1),  # not at a word
        (2, 0x1234, 514, 4, 0),
        (4, 0x89ABCDEF, 1, 0, 0),
        (4, 0, 129, 8, 0),
    ],
)
def test_a_memset_becomes_a_kernel_between_its_neighbours(
    element_bytes: int, value: int, count: int, offset: int, stay: int
) -> None:
    x = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    seen = torch.empty(2, 4096, dtype=torch.uint8, device="cuda")

    def work() -> None:
        x.add_(1)
        memset(x, value, element_bytes, count, offset)
        seen[0] = x
        x.mul_(3)
        memset(x, 0, 4, 2)
        seen[1] = x

    work()
    expected = seen.clone()
    x.zero_()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        work()
    assert replace_memsets(graph) == stay
    assert replace_memsets(graph) == stay, "those that became kernels are no memsets any more"
    graph.instantiate()
    for _ in range(2):
        x.zero_()
        seen.zero_()
        graph.replay()
        assert torch.equal(seen, expected)


def test_products_leave_no_memset() -> None:
    """Big enough that cuBLAS shares tiles through counters, which it sets before each product."""
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        torch.mm(a, b, out=out)
    assert replace_memsets(graph) == 0
    graph.instantiate()
    out.zero_()
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, expected)


def test_pieces_run_eagerly_then_by_their_graph() -> None:
    graphs, x, runs = Graphs(enabled=True), torch.zeros(4, device="cuda"), []

    def work() -> torch.Tensor:
        runs.append(None)
        return x.add_(1)

    results = [graphs.run("key", work) for _ in range(5)]
    assert len(runs) == 2, "an eager run and a capture"
    assert all(result.data_ptr() == x.data_ptr() for result in results)
    assert x.tolist() == [5.0] * 4
