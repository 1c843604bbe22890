from __future__ import annotations

import pytest
import torch

from fullstride.ops.dropout import dropout_ref, keep_scale, keep_threshold
from fullstride.ops.rounding import DROPOUT, stream
from tests.kernels.place import Place, assert_close, assert_spare_untouched, high


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.75])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 3), (37, 131), (37, 136)])
def test_dropout(place: Place, num_rows: int, width: int, p: float, accumulate: bool, strided: bool) -> None:
    from fullstride.kernels.dropout import dropout

    x, rng, number = place.randn(num_rows, width), torch.tensor([11, 2, 1, 0]), stream(DROPOUT, 9)
    out = place.randn(num_rows, width) if accumulate else place.poisoned(num_rows, width)
    if strided:
        x, out = place.spaced(x), place.spaced(out)
    expected = dropout_ref(high(x), p, rng, number)
    kept = expected != 0
    if accumulate:
        expected = expected + high(out)
    threshold = keep_threshold(p)
    dropout(x, threshold, keep_scale(threshold), place.put(rng), number, out, accumulate)
    assert_close(out, expected)
    if not accumulate:
        assert torch.equal(out.cpu() != 0, kept)  # the same elements
    if strided:
        assert_spare_untouched(x, out)


def test_first_row(place: Place) -> None:
    """The rows of another rank: the elements before them are counted, beyond 32 bits too."""
    from fullstride.kernels.dropout import dropout

    x, number = place.randn(37, 136), stream(DROPOUT, 9)
    threshold = keep_threshold(0.5)
    for first_row in (3, 2**26):
        out, rng = place.poisoned(37, 136), torch.tensor([11, 2, 1, first_row])
        dropout(x, threshold, keep_scale(threshold), place.put(rng), number, out)
        expected = dropout_ref(high(x), 0.5, rng, number)
        assert_close(out, expected)
        assert torch.equal(out.cpu() != 0, expected != 0)


@pytest.mark.parametrize("accumulate", [False, True])
def test_columns_of_a_whole(place: Place, accumulate: bool) -> None:
    """A part's masks are those that the whole has there, with rows before it too."""
    from fullstride.kernels.dropout import dropout

    rng, number, threshold = torch.tensor([11, 2, 1, 5]), stream(DROPOUT, 9), keep_threshold(0.5)
    whole = place.randn(37, 3 * 136)
    expected = dropout_ref(high(whole), 0.5, rng, number)
    for first in (0, 136, 272):
        part = whole[:, first : first + 136]
        out = place.randn(37, 136) if accumulate else place.poisoned(37, 136)
        its = expected[:, first : first + 136] + (high(out) if accumulate else 0)
        assert torch.equal(dropout_ref(high(part), 0.5, rng, number, first, 408), expected[:, first : first + 136])
        dropout(part, threshold, keep_scale(threshold), place.put(rng), number, out, accumulate, first, 408)
        assert_close(out, its)
