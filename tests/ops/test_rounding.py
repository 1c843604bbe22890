from __future__ import annotations

import pytest
import torch

from fullstride.ops.adamw import AdamWBuffers, adamw, hyper_values
from fullstride.ops.rounding import (
    DROPOUT,
    M_ROUNDING,
    V_ROUNDING,
    noise_ref,
    philox_ref,
    stochastic_round,
    stochastic_round_ref,
    stream,
)


def halves(seed: int, step: int, micro_step: int, number: int, numel: int) -> torch.Tensor:
    return noise_ref(torch.tensor([seed, step, micro_step]), number, numel)


def test_philox_known_answer_of_zeros() -> None:
    words = philox_ref(torch.zeros(3, dtype=torch.int64), 0, 1)
    assert words.tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_philox_known_answer_of_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counter and key all ones: the first counter word comes from an arange, which starts at 2**32 - 1 here."""
    monkeypatch.setattr(torch, "arange", lambda n, dtype: torch.full((n,), 0xFFFFFFFF, dtype=dtype))
    words = philox_ref(torch.tensor([-1, 0xFFFFFFFF, 0xFFFFFFFF]), 0xFFFFFFFF, 1)
    assert words.tolist() == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_noise_is_both_halves_of_every_word() -> None:
    words = philox_ref(torch.tensor([1, 2, 3]), 4, 2)
    assert halves(1, 2, 3, 4, 16).tolist() == [half for w in words.tolist() for half in (w & 0xFFFF, w >> 16)]


def test_noise_of_an_element_does_not_depend_on_how_many_there_are() -> None:
    assert torch.equal(halves(1, 2, 3, 4, 1001)[:7], halves(1, 2, 3, 4, 7))


@pytest.mark.parametrize("first", [8, 13, 1000])
def test_noise_can_begin_at_any_element(first: int) -> None:
    rng = torch.tensor([1, 2, 3])
    assert torch.equal(noise_ref(rng, 4, 50, first), noise_ref(rng, 4, first + 50)[first:])


def test_streams_are_different() -> None:
    numbers = {stream(purpose, tensor) for purpose in range(7) for tensor in (0, 1, 2**24 - 1)}
    assert len(numbers) == 21 and max(numbers) < 2**31


N = 100_000
SIGMAS = 4  # of a correlation of N independent pairs, whose deviation is 1 / sqrt(N)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("seed", halves(8, 1, 2, stream(DROPOUT, 3), N)),
        ("step", halves(7, 2, 2, stream(DROPOUT, 3), N)),
        ("micro-step", halves(7, 1, 3, stream(DROPOUT, 3), N)),
        ("tensor", halves(7, 1, 2, stream(DROPOUT, 4), N)),
        ("purpose", halves(7, 1, 2, stream(V_ROUNDING, 3), N)),
    ],
)
def test_noise_is_independent(name: str, other: torch.Tensor) -> None:
    base = halves(7, 1, 2, stream(DROPOUT, 3), N)
    assert abs(correlation(base, other)) <= SIGMAS / N**0.5, name
    assert abs(correlation(base[1:], other[:-1])) <= SIGMAS / N**0.5, name


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5])
def test_neighbours_are_independent_and_uniform(lag: int) -> None:
    noise = halves(7, 1, 2, stream(DROPOUT, 3), N)
    assert abs(correlation(noise[lag:], noise[:-lag])) <= SIGMAS / N**0.5
    # a uniform variable's mean is 1/2 with deviation 1 / sqrt(12 N)
    assert abs(noise.double().mean().item() / 2**16 - 0.5) <= SIGMAS / (12 * N) ** 0.5


def test_rounding_is_up_or_down_with_the_right_mean() -> None:
    x = torch.randn(N, generator=torch.Generator().manual_seed(0))
    rounded = stochastic_round_ref(x, halves(7, 1, 2, stream(M_ROUNDING, 0), N)).float()
    step = torch.exp2(torch.floor(torch.log2(x.abs())) - 7)  # bf16 keeps 8 bits
    error = (rounded - x) / step
    assert error.abs().max() < 1
    # |error| < 1 and mean 0: the deviation of one is at most 1/2
    assert abs(error.double().mean().item()) <= SIGMAS * 0.5 / N**0.5
    exact = x.bfloat16().float()
    assert torch.equal(stochastic_round_ref(exact, halves(7, 1, 2, 5, N)).float(), exact)  # nothing to round


def test_special_values_are_left_alone() -> None:
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0])
    rounded = torch.empty(5, dtype=torch.bfloat16)
    stochastic_round(x, torch.tensor([1, 2, 3]), 4, rounded)
    assert torch.equal(rounded[:2], x[:2].bfloat16()) and rounded[2].isnan()
    assert torch.equal(rounded[3:].view(torch.int16), x[3:].bfloat16().view(torch.int16))


def update(param: torch.Tensor, grad: float, lr: float, weight_decay: float, step: int) -> None:
    """One AdamW step on bf16 weights whose momentum gives `grad`'s sign: w -= lr * sign + lr * weight_decay * w."""
    hyper = torch.tensor([*hyper_values(lr, 0.0, 0.0, 1e-30, weight_decay, step), 1.0], dtype=torch.float64)
    moments = [torch.zeros_like(param) for _ in range(2)]
    buffers = AdamWBuffers(param, None, torch.full_like(param, grad), *moments, tensor=0)
    adamw(buffers, hyper, True, torch.tensor([3, step, 0]))


def test_bf16_weights_move_by_less_than_their_step() -> None:
    """10,000 weights at 1.0, minus 1e-3 a hundred times: 0.900 (to nearest they would stay at 1.0)."""
    param = torch.ones(10_000, dtype=torch.bfloat16)
    for step in range(1, 101):
        update(param, 1.0, 1e-3, 0.0, step)
    assert abs(param.double().mean().item() - 0.900) <= 1e-3


def test_bf16_weights_decay() -> None:
    """Decay 1e-4 a hundred times: 0.990."""
    param = torch.ones(10_000, dtype=torch.bfloat16)
    for step in range(1, 101):
        update(param, 0.0, 1e-3, 0.1, step)
    assert abs(param.double().mean().item() - 0.990) <= 5e-4
