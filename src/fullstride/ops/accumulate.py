"""Gradients of micro-steps and ranks added up in a shard, rounded without bias.

A bf16 sum is rounded stochastically, once for all terms of a call: with rounding to nearest, terms under half a step of
the sum would vanish.
"""

from __future__ import annotations

import torch

from fullstride.ops.numerics import wide
from fullstride.ops.rounding import noise_ref, stochastic_round_ref


def accumulate_ref(sum_n: torch.Tensor, terms_Pn: torch.Tensor, overwrite: bool, skip: int) -> torch.Tensor:
    """[n], in at least float32: the sum (without `overwrite`) and, in order, the terms but for number `skip`."""
    total = torch.zeros_like(wide(sum_n)) if overwrite else wide(sum_n)
    for p, term_n in enumerate(terms_Pn):
        total = total if p == skip else total + wide(term_n)
    return total


def accumulate(
    sum_n: torch.Tensor,
    terms_Pn: torch.Tensor,
    rng: torch.Tensor,
    stream: int,
    first: int,
    *,
    overwrite: bool = False,
    skip: int = -1,
) -> None:
    """Adds terms_Pn into sum_n, or with `overwrite` overwrites it; term number `skip` is left out.

    Both contiguous. A bf16 sum is rounded stochastically with the noise of elements first .. first + n of `stream`
    (first: a multiple of 8; see ops/rounding); others to nearest.
    """
    assert sum_n.is_contiguous() and terms_Pn.is_contiguous() and first % 8 == 0
    if sum_n.is_cuda:
        from fullstride.kernels.accumulate import accumulate as kernel

        return kernel(sum_n, terms_Pn, rng, stream, first, overwrite, skip)
    total = accumulate_ref(sum_n, terms_Pn, overwrite, skip)
    if sum_n.dtype == torch.bfloat16:
        total = stochastic_round_ref(total, noise_ref(rng, stream, sum_n.numel(), first))
    sum_n.copy_(total)
