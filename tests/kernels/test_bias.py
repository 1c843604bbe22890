from __future__ import annotations

import pytest

from fullstride.ops.matmul import bias_bwd_ref
from tests.kernels.place import Place, assert_close, high


@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (37, 131), (301, 7), (64, 256)])
def test_backward(place: Place, num_rows: int, width: int) -> None:
    from fullstride.kernels.bias import bias_bwd

    dy, dbias = place.spaced(place.randn(num_rows, width)), place.randn(width)
    expected = high(dbias) + bias_bwd_ref(high(dy))
    bias_bwd(dy, dbias)
    assert_close(dbias, expected)
