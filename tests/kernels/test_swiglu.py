from __future__ import annotations

import pytest
import torch

from fullstride.ops.swiglu import swiglu_bwd_ref, swiglu_fwd_ref
from tests.kernels.place import Place, assert_close, assert_spare_untouched, high

SIZES = [(1, 1), (3, 7), (5, 131), (2, 1031), (1, 2048)]


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize(("num_rows", "width"), SIZES)
def test_forward(place: Place, num_rows: int, width: int, spaced: bool) -> None:
    from fullstride.kernels.swiglu import swiglu_fwd

    rows = place.spaced if spaced else torch.clone
    gate_up = rows(place.randn(num_rows, 2 * width, scale=3))
    out = rows(place.poisoned(num_rows, width))
    swiglu_fwd(gate_up, out)
    assert_close(out, swiglu_fwd_ref(high(gate_up)))
    if spaced:
        assert_spare_untouched(out)


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("num_rows", "width"), SIZES)
def test_backward(place: Place, num_rows: int, width: int, in_place: bool, spaced: bool) -> None:
    from fullstride.kernels.swiglu import swiglu_bwd

    rows = place.spaced if spaced else torch.clone
    dout, gate_up = rows(place.randn(num_rows, width)), rows(place.randn(num_rows, 2 * width, scale=3))
    expected = swiglu_bwd_ref(high(dout), high(gate_up))
    dgate_up = gate_up if in_place else rows(place.poisoned(num_rows, 2 * width))
    swiglu_bwd(dout, gate_up, dgate_up)
    assert_close(dgate_up, expected)
    if spaced:
        assert_spare_untouched(dgate_up)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(gpu: torch.device) -> None:
    """2.5e9 elements: the last row lies where an int32 offset would have wrapped."""
    from fullstride.kernels.swiglu import swiglu_bwd, swiglu_fwd

    num_rows, width = 65552, 19000
    gate_up = torch.zeros(num_rows, 2 * width, dtype=torch.bfloat16, device=gpu)
    out = torch.empty(num_rows, width, dtype=torch.bfloat16, device=gpu)
    gate_up[-1] = 2.0
    expected = swiglu_fwd_ref(high(gate_up[-1:]))
    expected_grad = swiglu_bwd_ref(torch.ones(1, width, dtype=torch.float64), high(gate_up[-1:]))
    swiglu_fwd(gate_up, out)
    assert_close(out[-1:], expected)
    swiglu_bwd(out.fill_(1.0), gate_up, gate_up)
    assert_close(gate_up[-1:], expected_grad)
