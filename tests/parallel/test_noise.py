"""The rounding of gradients' sums, as the managers do it: without bias, and with noise that nothing shares."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fullstride.memory.offload import Offloaded
from fullstride.parallel.comm import Communicator, Work
from fullstride.parallel.gradients import AllToAllGradients, GradientUnit, ShardedGradients
from fullstride.parallel.transport import Collectives

N = 1 << 14  # elements of a unit
UNITS = ("blocks.0", "blocks.1", "blocks.2")
MICRO_STEPS = 4


class Equal(Communicator):
    """One of several ranks which all have the same gradients: what they sum to, and send, is known."""

    def reduce_scatter(self, whole: torch.Tensor, part: torch.Tensor) -> Work:
        part.mul_(self.size)
        return Communicator().all_reduce(part)

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> Work:
        n = len(sent) // self.size
        received.copy_(sent[self.rank * n : (self.rank + 1) * n].repeat(self.size))
        return Communicator().all_reduce(received)


def sums(term: float, seed: int, rank: int = 0, size: int = 1, all_to_all: bool = False) -> list[dict[str, Any]]:
    """bf16 sums that begin at 1 and get `term` from every rank in each of four micro-steps: after each, by unit."""
    part = slice(rank * N // size, (rank + 1) * N // size)
    flats = [torch.zeros(N, dtype=torch.bfloat16) for _ in range(2)]
    units = {name: GradientUnit(flats[i % 2], {}, slice(N, N), part) for i, name in enumerate(UNITS)}
    held = Offloaded({name: torch.ones(N // size, dtype=torch.bfloat16) for name in UNITS}, {})
    rng = torch.tensor([seed, 1, 0])
    given = units, Equal(rank, size), held, frozenset(UNITS), rng, {name: i for i, name in enumerate(UNITS)}
    received = torch.empty(N, dtype=torch.bfloat16)
    manager = (
        AllToAllGradients(*given, dict.fromkeys(UNITS, received), Collectives(given[1]))
        if all_to_all
        else ShardedGradients(*given)
    )
    seen = []
    for micro_step in range(MICRO_STEPS):
        rng[2] = micro_step
        manager.start_micro_step(False, False)
        for name in UNITS[::-1]:
            manager.take(name)
            units[name].flat.fill_(term)
            manager.notify(name)
            if all_to_all:  # there is one buffer for what was received
                manager.end_micro_step()
        manager.end_micro_step()
        seen.append({name: held.get(name).clone() for name in UNITS})
    return seen


@pytest.mark.parametrize(("size", "all_to_all"), [(1, False), (2, False), (2, True)])
def test_bias_over_seeds(size: int, all_to_all: bool) -> None:
    """Four micro-steps of terms that nearest rounding would lose, over eight seeds, within 3 sigma; and so wide as
    independent roundings spread, which those that shared noise, own and received ones say, would not.

    A step of bf16 at 1 is s = 2**-7. What a rank adds in one rounding is p * s, so it rounds up with probability p and
    deviates by s sqrt(p (1 - p)); roundings, elements, units and seeds are independent, and so their variances add.
    """
    seeds, term = 8, 2**-11
    found = [sums(term, seed, 0, size, all_to_all)[-1] for seed in range(seeds)]
    values = torch.stack([one[name].double() for one in found for name in UNITS])
    assert values.unique().numel() > 2  # rounded this way and that
    pieces = [term] * size if all_to_all else [term * size]
    variance = MICRO_STEPS * sum(2**-14 * p * (1 - p) for p in (piece / 2**-7 for piece in pieces))
    error = values.mean() - (1 + MICRO_STEPS * size * term)
    assert abs(error) < 3 * (variance / values.numel()) ** 0.5
    # n samples tell a variance to sqrt((2 + excess kurtosis) / n) of it: here 0.5 % at most
    assert values.var().item() == pytest.approx(variance, rel=0.03)


@pytest.mark.parametrize(("size", "all_to_all"), [(1, False), (2, True)])
def test_neighbours_micro_steps_and_units_share_no_noise(size: int, all_to_all: bool) -> None:
    """Which elements a micro-step rounds up, from a middle: correlations of n pairs are below 4 / sqrt(n)."""
    seen = [{name: torch.ones(N // size) for name in UNITS}, *sums(2**-9 / size, 3, 0, size, all_to_all)]
    ups = [(b[name].double() - a[name].double()) for a, b in itertools.pairwise(seen) for name in UNITS]
    pairs = list(itertools.combinations(ups, 2)) + [(ups[0][:-d], ups[0][d:]) for d in range(1, 17)]
    for a, b in pairs:
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 4 / len(a) ** 0.5


def test_parts_are_rounded_as_the_whole() -> None:
    """Two ranks' parts, joined, are the sum of one rank whose gradients are twice theirs: exact."""
    whole = sums(2**-9, 5)
    parts = [sums(2**-10, 5, rank, 2) for rank in range(2)]
    for micro_step, name in itertools.product(range(MICRO_STEPS), UNITS):
        joined = torch.cat([parts[rank][micro_step][name] for rank in range(2)])
        assert torch.equal(joined, whole[micro_step][name])
