from __future__ import annotations

import pytest
import torch

from fullstride.ops.adamw import AdamWBuffers, adamw_ref, hyper_values
from fullstride.ops.rounding import noise_ref, stochastic_round_ref
from tests.kernels.place import Place, assert_close, assert_same_bits, high

HYPER = torch.tensor([*hyper_values(1e-2, 0.9, 0.999, 1e-8, 0.1, 3), 0.5], dtype=torch.float64)
RNG = torch.tensor([1, 2, 0])


def make_buffers(
    place: Place, n: int, master: torch.dtype | None, moments: torch.dtype, first: int = 0
) -> AdamWBuffers:
    return AdamWBuffers(
        param=place.randn(n),
        master=None if master is None else place.randn(n, dtype=master),
        grad=place.randn(n),
        m=place.randn(n, scale=0.1, dtype=moments),
        v=place.randn(n, dtype=torch.float32).square().to(moments),
        tensor=4,
        first=first,
    )


def check_stored(stored: torch.Tensor, expected: torch.Tensor, stream: int, first: int = 0) -> None:
    """float32: rounding. bf16: the bits of the reference, with the same noise, but for a tiny share one step off.

    The kernel's float32 value differs from the reference's in its last bits (fused multiply-adds): 2 ** -16 of a bf16
    step each, so the carry differs once in about 2 ** 16 / 8 elements. 1e-3 allows eight times that. Where terms of
    size 0.1 to 1 cancel to almost nothing those last bits are the value: there 1e-6 of 1 is the bound.
    """
    if stored.dtype != torch.bfloat16:
        return assert_close(stored, expected)
    rounded = stochastic_round_ref(expected.float(), noise_ref(RNG, stream, expected.numel(), first))
    steps = (stored.cpu().view(torch.int16).int() - rounded.view(torch.int16).int()).abs()
    cancelled = expected.abs() < 1e-5
    assert steps[~cancelled].max() <= 1
    assert (stored.cpu().double() - expected)[cancelled].abs().le(1e-6).all()
    assert (steps != 0).double().mean() <= 1e-3


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("has_master", [False, True])
@pytest.mark.parametrize("n", [1, 1000, 20011])
def test_update(place: Place, n: int, has_master: bool, narrow: bool, decay: bool) -> None:
    """`narrow`: master and moments are of the storage dtype too, otherwise float32."""
    from fullstride.kernels.adamw import adamw

    if narrow and place.dtype == torch.float32:
        pytest.skip("float32 is the other case already")
    wide = place.dtype if narrow else torch.float32
    b = make_buffers(place, n, wide if has_master else None, wide)
    w = b.param if b.master is None else b.master
    new_w, new_m, new_v = adamw_ref(high(w), high(b.grad), high(b.m), high(b.v), HYPER, decay)
    adamw(b, place.put(HYPER), decay, place.put(RNG))

    w_stream, m_stream, v_stream = b.streams
    check_stored(b.m, new_m, m_stream)
    check_stored(b.v, new_v, v_stream)
    check_stored(w, new_w, w_stream)
    if b.master is not None:
        assert_same_bits(b.param, b.master.to(b.param.dtype))  # rounded to nearest


@pytest.mark.parametrize("first", [8, 2**33])
def test_noise_of_a_part_is_that_of_its_elements(place: Place, first: int) -> None:
    from fullstride.kernels.adamw import adamw

    b = make_buffers(place, 1000, None, place.dtype, first)
    new_w, new_m, _ = adamw_ref(high(b.param), high(b.grad), high(b.m), high(b.v), HYPER, True)
    adamw(b, place.put(HYPER), True, place.put(RNG))
    for stored, expected, stream in zip((b.param, b.m), (new_w, new_m), b.streams, strict=False):
        check_stored(stored, expected, stream, first)


@pytest.mark.gpu
def test_decay_of_bf16_weights_has_the_right_mean(gpu: torch.device) -> None:
    """Weights at 1, decay 1e-4 a hundred times, no gradient: 0.990 (rounded to nearest they would stay at 1)."""
    from fullstride.kernels.adamw import adamw

    n = 10_000
    param = torch.ones(n, dtype=torch.bfloat16, device=gpu)
    grad, m, v = (torch.zeros(n, dtype=torch.bfloat16, device=gpu) for _ in range(3))
    for step in range(1, 101):
        hyper = torch.tensor([*hyper_values(1e-3, 0.9, 0.999, 1e-8, 0.1, step), 1.0], dtype=torch.float64, device=gpu)
        adamw(AdamWBuffers(param, None, grad, m, v, 0), hyper, True, torch.tensor([0, step, 0], device=gpu))
    # a step is 2 ** -8, one time in 39: the mean of 10,000 weights has a deviation of 6e-5 after a hundred
    assert abs(param.double().mean().item() - 0.990) <= 5e-4
