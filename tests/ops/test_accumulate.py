"""Sums of gradients, rounded without bias."""

from __future__ import annotations

import itertools

import pytest
import torch

from fullstride.ops.accumulate import accumulate, accumulate_ref
from fullstride.ops.rounding import GRAD_ROUNDING, RECEIVED_ROUNDING, stream

N = 20_000


def rng(micro_step: int, seed: int = 3) -> torch.Tensor:
    return torch.tensor([seed, 1, micro_step])


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("skip", [-1, 0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sum_of_terms_but_one(dtype: torch.dtype, skip: int, overwrite: bool) -> None:
    """float64 exactly; others to one rounding of a sum of four numbers of size 1."""
    torch.manual_seed(0)
    total, terms = torch.randn(100).to(dtype), torch.randn(3, 100).to(dtype)
    terms[skip if skip >= 0 else 0] += 1000 if skip >= 0 else 0
    expected = terms.double()[[p for p in range(3) if p != skip]].sum(0) + (0 if overwrite else total.double())
    accumulate(total, terms, rng(0), 5, 0, overwrite=overwrite, skip=skip)
    limit = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    assert ((total.double() - expected).abs() <= limit * expected.abs().clamp(min=1)).all()


def test_bias_over_micro_steps_and_seeds() -> None:
    """Sixteen micro-steps of terms that nearest rounding would lose: 1 + 16 * 2**-11, within 3 sigma.

    A step of bf16 at 1 is 2**-7; an addition rounds up with probability p = 1/16, so a sum of 16 has a deviation of
    2**-7 sqrt(16 p (1 - p)), and the mean of N elements and 4 seeds 1 / sqrt(4 N) of that.
    """
    means = []
    for seed in range(4):
        total = torch.ones(N, dtype=torch.bfloat16)
        for micro_step in range(16):
            term = torch.full((1, N), 2**-11, dtype=torch.bfloat16)
            accumulate(total, term, rng(micro_step, seed), stream(GRAD_ROUNDING, 7), 0)
        means.append(total.double().mean().item())
    deviation = 2**-7 * (16 * 1 / 16 * 15 / 16) ** 0.5
    assert abs(sum(means) / 4 - (1 + 16 * 2**-11)) < 3 * deviation / (4 * N) ** 0.5
    assert torch.tensor(1.0, dtype=torch.bfloat16) + torch.tensor(2**-11, dtype=torch.bfloat16) == 1  # nearest


def rounded(micro_step: int, purpose: int, tensor: int, first: int = 0) -> torch.Tensor:
    """Which of N elements were rounded up from the middle."""
    total = torch.ones(N, dtype=torch.bfloat16)
    term = torch.full((1, N), 2**-8, dtype=torch.bfloat16)
    accumulate(total, term, rng(micro_step), stream(purpose, tensor), first)
    return (total > 1).double()


def test_neighbours_micro_steps_tensors_parts_and_purposes_share_no_noise() -> None:
    """Correlations of N pairs are below 4 / sqrt(N); for neighbours up to 16 apart."""
    found = [
        rounded(0, GRAD_ROUNDING, 1),
        rounded(1, GRAD_ROUNDING, 1),
        rounded(0, GRAD_ROUNDING, 2),
        rounded(0, RECEIVED_ROUNDING, 1),
        rounded(0, GRAD_ROUNDING, 1, first=32_768),
    ]
    pairs = list(itertools.combinations(found, 2)) + [(found[0][:-d], found[0][d:]) for d in range(1, 17)]
    for a, b in pairs:
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 4 / N**0.5


def test_noise_belongs_to_the_element_of_the_whole() -> None:
    """Parts on two ranks are rounded as in one: exact."""
    assert torch.equal(rounded(0, GRAD_ROUNDING, 1, first=10_000)[:10_000], rounded(0, GRAD_ROUNDING, 1)[10_000:])


def test_reference_does_not_round() -> None:
    total, terms = torch.ones(4, dtype=torch.bfloat16), torch.full((2, 4), 2**-20, dtype=torch.bfloat16)
    assert torch.equal(accumulate_ref(total, terms, False, -1), torch.full((4,), 1 + 2**-19))
