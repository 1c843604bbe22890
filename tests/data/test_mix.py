"""Files with weights: shares of an epoch, and no document lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullstride.data.mix import mix
from fullstride.errors import UsageError


def test_shares_of_an_epoch() -> None:
    (a, b), notes = mix(["a", "b"], [30, 20], [0.3, 0.7], seed=1)
    # a's thirty come once, so an epoch has a hundred; twenty give seventy: each three times, ten once more
    assert np.bincount(a).tolist() == [1] * 30
    assert sorted(np.bincount(b).tolist()) == [3] * 10 + [4] * 10
    assert notes == [
        "a: 30 documents, each once an epoch (30.0 % of all)",
        "b: 20 documents, each 3 or 4 times an epoch (70.0 % of all)",
    ]


def test_which_come_once_more_depends_on_the_seed_alone() -> None:
    def drawn(seed: int) -> list[int]:
        return mix(["a", "b"], [30, 20], [3, 7], seed)[0][1].tolist()

    assert drawn(1) == drawn(1) != drawn(2)
    assert mix(["a", "b"], [30, 20], [0.3, 0.7], 1)[0][1].tolist() == drawn(1)  # only proportions count


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0.05, 5)), min_size=2, max_size=5), st.integers(0, 2**63 - 1))
def test_every_document_comes_and_shares_hold(files: list[tuple[int, float]], seed: int) -> None:
    counts, weights = [n for n, _ in files], [w for _, w in files]
    chosen, _ = mix([str(i) for i in range(len(files))], counts, weights, seed)
    total = sum(map(len, chosen))
    for count, weight, numbers in zip(counts, weights, chosen, strict=True):
        times = np.bincount(numbers, minlength=count)
        assert len(times) == count and times.min() >= 1 and times.max() - times.min() <= 1
        assert abs(len(numbers) - total * weight / sum(weights)) <= len(files)  # each is rounded to a whole number
    assert any(len(numbers) == count for count, numbers in zip(counts, chosen, strict=True))  # no longer than it must


def test_an_epoch_that_would_not_end_is_refused() -> None:
    with pytest.raises(UsageError, match=r"an epoch would have .* documents, since each one of b comes at least once"):
        mix(["a", "b"], [10, 10], [1, 1e-9], 0)
    with pytest.raises(UsageError, match="raise its weight"):
        mix(["a", "b"], [10, 10], [1e308, 1e-308], 0)
