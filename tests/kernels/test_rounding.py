from __future__ import annotations

import pytest
import torch

from fullstride.ops.rounding import M_ROUNDING, noise_ref, stochastic_round_ref, stream
from tests.kernels.place import Place, assert_same_bits


@pytest.mark.parametrize("n", [1, 6, 4099])
@pytest.mark.parametrize("rng", [(0, 0, 0), (0x0123456789ABCDEF, 7, 3), (-3, -1, 2**33 + 9)])
def test_noise_is_the_references(place: Place, rng: tuple[int, int, int], n: int) -> None:
    """Integers: equal."""
    from tests.kernels.noise_kernel import show_noise

    for number in (1, stream(M_ROUNDING, 12345)):
        out = torch.full((n,), -1, dtype=torch.int64, device=place.device)
        rng_tensor = torch.tensor(rng)
        show_noise(place.put(rng_tensor), number, out)
        assert torch.equal(out.cpu(), noise_ref(rng_tensor, number, n))


@pytest.mark.parametrize("n", [1, 4099])
def test_stochastic_round(place: Place, n: int) -> None:
    """Integer arithmetic on the bits: equal. The interpreter stores the bf16 value in float32."""
    from fullstride.kernels.rounding import stochastic_round

    x = place.randn(n, dtype=torch.float32)
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 1e-40, 3.4e38, -3.4e38])
    x[: min(n, 7)] = place.put(special)[: min(n, 7)]
    rng, number = torch.tensor([5, 6, 7]), stream(M_ROUNDING, 3)
    stored = torch.bfloat16 if place.device.type == "cuda" else torch.float32
    out = torch.full((n,), -1.0, dtype=stored, device=place.device)
    stochastic_round(x, place.put(rng), number, out)
    expected = stochastic_round_ref(x.cpu(), noise_ref(rng, number, n)).to(stored)
    nan = expected.isnan()
    assert torch.equal(out.cpu().isnan(), nan)
    assert_same_bits(out.cpu()[~nan], expected[~nan])
