from __future__ import annotations

import pytest
import torch

from fullstride.ops.rows import gather_rows_ref, scatter_rows_ref
from tests.kernels.place import Place, assert_same_bits, assert_spare_untouched

# moves of whole rows are exact


@pytest.mark.parametrize("width", [1, 7, 131, 4099])
def test_gather(place: Place, width: int) -> None:
    from fullstride.kernels.rows import gather_rows

    x, index = place.spaced(place.randn(13, width)), place.put(torch.tensor([5, -1, 5, 0, 12], dtype=torch.int32))
    out = place.spaced(place.poisoned(5, width))
    gather_rows(x, index, out)
    assert_same_bits(out, gather_rows_ref(x.cpu(), index.cpu()))
    assert_spare_untouched(out)


@pytest.mark.parametrize("width", [1, 7, 131, 4099])
def test_scatter(place: Place, width: int) -> None:
    from fullstride.kernels.rows import scatter_rows

    x, index = place.spaced(place.randn(5, width)), place.put(torch.tensor([5, -1, 6, 0, 12], dtype=torch.int32))
    out = place.spaced(place.randn(13, width))
    expected = scatter_rows_ref(x.cpu(), index.cpu(), out.cpu())
    scatter_rows(x, index, out)
    assert_same_bits(out, expected)
    assert_spare_untouched(out)
