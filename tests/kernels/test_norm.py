from __future__ import annotations

import pytest
import torch

from fullstride.ops.norm import sum_of_squares_ref
from tests.kernels.place import Place, assert_close, assert_same_bits, high


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 4095, 10007])
def test_sum_of_squares(place: Place, n: int, dtype: torch.dtype) -> None:
    from fullstride.kernels.norm import sum_of_squares

    x, out = place.randn(n), place.poisoned(1, dtype=dtype)
    sum_of_squares(x, out)
    assert_close(out[0], sum_of_squares_ref(high(x)))


@pytest.mark.gpu
def test_large_and_repeatable(gpu: torch.device) -> None:
    """2.2e9 bf16 ones: offsets beyond 32 bits; a thread adds 1,000 float32 in turn, exactly here."""
    from fullstride.kernels.norm import sum_of_squares

    n = 2**31 + 2**25
    x = torch.ones(n, dtype=torch.bfloat16, device=gpu)
    out = torch.full((1,), float("nan"), dtype=torch.float64, device=gpu)
    sum_of_squares(x, out)
    assert out.item() == n
    x = torch.randn(10_000_019, device=gpu)
    results = [torch.empty(1, device=gpu) for _ in range(20)]
    for result in results:
        sum_of_squares(x, result)
    for result in results[1:]:
        assert_same_bits(result, results[0])
