from __future__ import annotations

import pytest
import torch

from fullstride.ops.adamw import AdamWBuffers, adamw, adamw_ref, hyper_values
from tests.kernels.place import distance

RNG = torch.tensor([1, 2, 0])


@pytest.mark.parametrize("decay", [False, True])
def test_ten_steps_equal_torch(decay: bool) -> None:
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(101, dtype=torch.float64))
    lr, beta1, beta2, eps, weight_decay = 1e-2, 0.9, 0.95, 1e-8, 0.1
    theirs = torch.optim.AdamW([param], lr, (beta1, beta2), eps, weight_decay if decay else 0.0)
    w, m, v = param.detach().clone(), torch.zeros(101).double(), torch.zeros(101).double()
    for step in range(1, 11):
        grad = torch.randn(101, dtype=torch.float64)
        param.grad = grad.clone()
        theirs.step()
        # the gradient comes unscaled; its factor is the eighth value
        hyper = torch.tensor([*hyper_values(lr, beta1, beta2, eps, weight_decay, step), 0.25], dtype=torch.float64)
        w, m, v = adamw_ref(w, grad * 4, m, v, hyper, decay)
        assert distance(w, param.detach()) <= 1e-12


@pytest.mark.parametrize("master", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_buffers(master: torch.dtype | None, moments: torch.dtype) -> None:
    """Stored values are one rounding away from the reference; the parameter is its master copy, to nearest."""
    torch.manual_seed(0)
    b = AdamWBuffers(
        param=torch.randn(101).bfloat16(),
        master=None if master is None else torch.randn(101).to(master),
        grad=torch.randn(101).bfloat16(),
        m=torch.randn(101).to(moments),
        v=torch.rand(101).to(moments),
        tensor=3,
    )
    hyper = torch.tensor([*hyper_values(1e-2, 0.9, 0.95, 1e-8, 0.1, 1), 1.0], dtype=torch.float64)
    w = b.param if b.master is None else b.master
    new_w, new_m, new_v = adamw_ref(w.double(), b.grad.double(), b.m.double(), b.v.double(), hyper, True)
    adamw(b, hyper, True, RNG)
    for stored, expected in ((w, new_w), (b.m, new_m), (b.v, new_v)):
        # a bf16 is off by less than 2**-7 of itself either way; float32 by some roundings
        limit = 2**-7 if stored.dtype == torch.bfloat16 else 1e-6
        assert ((stored.double() - expected).abs() <= limit * expected.abs() + 1e-7).all()
    if b.master is not None:
        assert torch.equal(b.param, b.master.bfloat16())


def test_a_part_is_updated_as_within_the_whole() -> None:
    """Noise belongs to elements, whoever owns them: exact."""
    torch.manual_seed(0)
    values = [torch.randn(512).bfloat16() for _ in range(4)]
    hyper = torch.tensor([*hyper_values(1e-2, 0.9, 0.95, 1e-8, 0.1, 1), 1.0], dtype=torch.float64)

    def update(part: slice) -> list[torch.Tensor]:
        param, grad, m, v = (x[part].clone() for x in (*values[:3], values[3].abs()))
        adamw(AdamWBuffers(param, None, grad, m, v, tensor=3, first=part.start), hyper, True, RNG)
        return [param, m, v]

    whole, parts = update(slice(0, 512)), [update(slice(0, 256)), update(slice(256, 512))]
    assert all(torch.equal(a, torch.cat(b)) for a, b in zip(whole, zip(*parts, strict=True), strict=True))
    moved = AdamWBuffers(
        *(x[256:].clone() for x in (values[0],)), None, *(x[256:].clone() for x in values[1:]), tensor=3
    )
    adamw(moved, hyper, True, RNG)
    assert not torch.equal(moved.m, parts[1][1])  # the key is at work


def test_streams_of_weights_and_moments_differ() -> None:
    x = torch.zeros(1)
    alone = AdamWBuffers(x, None, x, x, x, tensor=5)
    with_master = AdamWBuffers(x, x, x, x, x, tensor=5)
    assert len({*alone.streams, *with_master.streams}) == 4
