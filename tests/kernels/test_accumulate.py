from __future__ import annotations

import pytest
import torch

from fullstride.ops.accumulate import accumulate_ref
from fullstride.ops.rounding import GRAD_ROUNDING, noise_ref, stochastic_round_ref, stream
from tests.kernels.place import Place, assert_close, assert_same_bits, high

RNG = torch.tensor([5, 6, 7])


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("terms", "skip"), [(1, -1), (4, 2), (2, 0)])
@pytest.mark.parametrize("n", [1, 1000, 4099])
def test_float32_sum(place: Place, n: int, terms: int, skip: int, overwrite: bool) -> None:
    from fullstride.kernels.accumulate import accumulate

    total = place.poisoned(n, dtype=torch.float32) if overwrite else place.randn(n, dtype=torch.float32)
    parts = place.randn(terms, n)
    if skip >= 0:
        parts[skip] = float("nan")  # what is left out is not read into the sum
    expected = accumulate_ref(high(total), high(parts), overwrite, skip)
    accumulate(total, parts, place.put(RNG), stream(GRAD_ROUNDING, 3), 8, overwrite, skip)
    assert_close(total, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 2**33])
def test_bf16_sum_is_rounded_with_the_elements_noise(gpu: torch.device, first: int) -> None:
    """Two terms, added in the reference's order in float32: its bits."""
    from fullstride.kernels.accumulate import accumulate

    place = Place(gpu, torch.bfloat16)
    total, parts, number = place.randn(4099), place.randn(2, 4099), stream(GRAD_ROUNDING, 3)
    exact = accumulate_ref(total.cpu(), parts.cpu(), False, -1)
    accumulate(total, parts, place.put(RNG), number, first, False, -1)
    assert_same_bits(total, stochastic_round_ref(exact, noise_ref(RNG, number, 4099, first)))
