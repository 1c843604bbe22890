from __future__ import annotations

import pytest
import torch

from fullstride.ops.dropout import dropout_ref, keep_scale, keep_threshold
from fullstride.ops.rounding import DROPOUT, stream

N = 100_000


def mask(step: int = 1, micro_step: int = 0, tensor: int = 2, p: float = 0.25) -> torch.Tensor:
    ones = torch.ones(N // 100, 100)
    return dropout_ref(ones, p, torch.tensor([3, step, micro_step, 0]), stream(DROPOUT, tensor)).flatten().double()


@pytest.mark.parametrize("p", [0.05, 0.25, 0.9])
def test_mean(p: float) -> None:
    """The mean stays 1: an element's deviation is sqrt(p / (1 - p)); four of them for the mean of N."""
    dropped = mask(p=p)
    assert abs(dropped.mean().item() - 1) <= 4 * (p / (1 - p)) ** 0.5 / N**0.5
    scale = keep_scale(keep_threshold(p))
    assert dropped.unique().tolist() == [0.0, pytest.approx(scale, rel=1e-6)]
    # p is rounded to 2**-17, which moves 1 / (1 - p) by that much of 1 / (1 - p)
    assert scale == pytest.approx(1 / (1 - p), rel=2**-17 / (1 - p))


def test_nothing_dropped() -> None:
    assert keep_threshold(0.0) == 0
    assert torch.equal(mask(p=0.0), torch.ones(N, dtype=torch.float64))


def test_masks_are_independent() -> None:
    """Neighbours in a row and in a column, steps, micro-steps, tensors: correlations within four deviations."""
    base = mask()
    others = [base.roll(lag) for lag in (1, 2, 3, 4, 100)] + [mask(step=2), mask(micro_step=1), mask(tensor=3)]
    for other in others:
        correlation = torch.corrcoef(torch.stack([base, other]))[0, 1].item()
        assert abs(correlation) <= 4 / N**0.5


def test_the_same_mask_again() -> None:
    assert torch.equal(mask(), mask())


def test_rows_have_noise_of_their_own_on_whatever_rank() -> None:
    """Ranks number their rows within all ranks' rows: exact, for a width that 8 does not divide too."""
    x, rng = torch.randn(6, 13), torch.tensor([3, 1, 0, 0])
    whole = dropout_ref(x, 0.4, rng, 5)
    assert torch.equal(dropout_ref(x[:4], 0.4, rng, 5), whole[:4])
    assert torch.equal(dropout_ref(x[4:], 0.4, torch.tensor([3, 1, 0, 4]), 5), whole[4:])
