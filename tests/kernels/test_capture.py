"""Kernels in CUDA graphs: capture fails where anything waits for the GPU, and a replay sees new device values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from fullstride.kernels.attention import attention_bwd, attention_fwd
from fullstride.ops.adamw import AdamWBuffers, hyper_values
from fullstride.ops.attention import Documents
from tests.kernels.place import Place, assert_same_bits


@dataclass
class Case:
    """`run` reads `inputs` and returns its results, new tensors. `changed` are other values for the inputs."""

    run: Callable[[], tuple[torch.Tensor, ...]]
    inputs: list[torch.Tensor]
    changed: list[torch.Tensor]


def rms_norm_case(place: Place) -> Case:
    from fullstride.kernels.rms_norm import rms_norm_bwd

    dnormed, x, weight = place.randn(300, 131), place.randn(300, 131), place.randn(131)
    rstd = place.randn(300, dtype=torch.float32).abs()

    def run() -> tuple[torch.Tensor, ...]:
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        rms_norm_bwd(dnormed, x, weight, rstd, None, dx, dweight)
        return dx, dweight

    return Case(run, [dnormed, x], [place.randn(300, 131), place.randn(300, 131)])


def embedding_case(place: Place) -> Case:
    from fullstride.kernels.embedding import embedding_bwd

    dout, ids = place.randn(5000, 131), place.randint(900, 5000)

    def run() -> tuple[torch.Tensor, ...]:
        dtable = torch.zeros(1000, 131, dtype=dout.dtype, device=dout.device)
        embedding_bwd(dout, ids, dtable)
        return (dtable,)

    return Case(run, [ids], [place.randint(1000, 5000)])


def cross_entropy_case(place: Place) -> Case:
    from fullstride.kernels.cross_entropy import cross_entropy

    logits, targets, z_loss = place.randn(64, 20011), place.randint(20011, 64), place.randn(1, dtype=torch.float32)

    def run() -> tuple[torch.Tensor, ...]:
        dlogits = logits.clone()
        loss, lse = (torch.empty(64, device=logits.device) for _ in range(2))
        cross_entropy(dlogits, targets, z_loss, loss, lse, True)
        return dlogits, loss, lse

    return Case(run, [targets, z_loss], [place.randint(20011, 64), place.randn(1, dtype=torch.float32)])


def adamw_case(place: Place) -> Case:
    from fullstride.kernels.adamw import adamw

    grad, m, param = place.randn(10007), place.randn(10007), place.randn(10007)
    v = place.randn(10007).square()
    hyper = place.put(torch.tensor([*hyper_values(1e-2, 0.9, 0.99, 1e-8, 0.1, 1), 1.0], dtype=torch.float64))
    rng = place.put(torch.tensor([1, 1, 0]))

    def run() -> tuple[torch.Tensor, ...]:
        b = AdamWBuffers(param.clone(), None, grad, m.clone(), v.clone(), 0)
        adamw(b, hyper, True, rng)
        return b.param, b.m, b.v

    later = torch.tensor([*hyper_values(1e-3, 0.9, 0.99, 1e-8, 0.1, 2), 0.5], dtype=torch.float64)
    return Case(run, [hyper, rng], [place.put(later), place.put(torch.tensor([1, 2, 0]))])


def accumulate_case(place: Place) -> Case:
    from fullstride.kernels.accumulate import accumulate

    total, terms, rng = place.randn(10007), place.randn(2, 10007), place.put(torch.tensor([1, 1, 0]))

    def run() -> tuple[torch.Tensor, ...]:
        out = total.clone()
        accumulate(out, terms, rng, 5, 8, False, -1)
        return (out,)

    return Case(run, [terms, rng], [place.randn(2, 10007), place.put(torch.tensor([1, 1, 1]))])


def attention_case(place: Place) -> Case:
    q, k, v, dout = (place.randn(512, heads, 64) for heads in (4, 2, 2, 4))
    documents = Documents(
        place.put(torch.tensor([0, 256, 512, 512, 512], dtype=torch.int32)), 2, 256, packed=True, deterministic=True
    )

    def run() -> tuple[torch.Tensor, ...]:
        out, saved = attention_fwd(q, k, v, documents)
        return out, *attention_bwd(dout, q, k, v, out, saved, documents)

    return Case(run, [documents.boundaries], [place.put(torch.tensor([0, 7, 256, 300, 512], dtype=torch.int32))])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [rms_norm_case, embedding_case, cross_entropy_case, adamw_case, accumulate_case, attention_case]
)
def test_replay_equals_a_new_run(gpu: torch.device, make: Callable[[Place], Case], dtype: torch.dtype) -> None:
    case = make(Place(gpu, dtype))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        before = case.run()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.run()
    for x, other in zip(case.inputs, case.changed, strict=True):
        x.copy_(other)
    graph.replay()
    again = case.run()
    for replayed, new in zip(captured, again, strict=True):
        assert_same_bits(replayed, new)
    assert not torch.equal(again[0], before[0])  # the values mattered
