from __future__ import annotations

import pytest
import torch

from fullstride.ops.rms_norm import rms_norm_bwd_ref, rms_norm_fwd_ref
from tests.kernels.place import Place, assert_close, assert_same_bits, assert_spare_untouched, high

EPS = 1e-6
SIZES = [(1, 3), (5, 7), (37, 131), (3, 896), (2, 4099)]
# the interpreter takes 20 seconds for the backward of the last
BWD_SIZES = [*SIZES[:-1], (2, 1031), pytest.param(*SIZES[-1], marks=pytest.mark.slow)]


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize(("num_rows", "width"), SIZES)
@pytest.mark.parametrize("has_branch", [False, True])
def test_forward(place: Place, num_rows: int, width: int, has_branch: bool, spaced: bool) -> None:
    from fullstride.kernels.rms_norm import rms_norm_fwd

    rows = place.spaced if spaced else torch.clone
    x, weight = rows(place.randn(num_rows, width)), place.randn(width)
    branch = rows(place.randn(num_rows, width)) if has_branch else None
    residual = rows(place.poisoned(num_rows, width)) if has_branch else x
    normed, rstd = rows(place.poisoned(num_rows, width)), place.poisoned(num_rows, dtype=torch.float32)
    before = x.clone()
    rms_norm_fwd(x, branch, weight, EPS, residual, normed, rstd)

    expected = before if branch is None else (before.float() + branch.float()).to(place.dtype)
    assert_same_bits(residual, expected)  # one addition, rounded once
    normed_ref, rstd_ref = rms_norm_fwd_ref(high(residual), high(weight), EPS)
    assert_close(normed, normed_ref)
    assert_close(rstd, rstd_ref)
    if spaced:
        assert_spare_untouched(residual, normed)


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize(("num_rows", "width"), BWD_SIZES)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("in_place_of", ["nothing", "dnormed", "x"])
def test_backward(
    place: Place, num_rows: int, width: int, has_residual: bool, frozen: bool, in_place_of: str, spaced: bool
) -> None:
    from fullstride.kernels.rms_norm import rms_norm_bwd

    rows = place.spaced if spaced else torch.clone
    dnormed, x, weight = rows(place.randn(num_rows, width)), rows(place.randn(num_rows, width)), place.randn(width)
    rstd = place.put(rms_norm_fwd_ref(high(x), high(weight), EPS)[1].float())
    dresidual = rows(place.randn(num_rows, width)) if has_residual else None
    dweight = None if frozen else place.randn(width)
    dx_ref, dweight_ref = rms_norm_bwd_ref(high(dnormed), high(x), high(weight), high(rstd))
    if dresidual is not None:
        dx_ref += high(dresidual)
    if dweight is not None:
        dweight_ref += high(dweight)
    dx = {"nothing": rows(place.poisoned(num_rows, width)), "dnormed": dnormed, "x": x}[in_place_of]
    rms_norm_bwd(dnormed, x, weight, rstd, dresidual, dx, dweight)

    assert_close(dx, dx_ref)
    if dweight is not None:
        assert_close(dweight, dweight_ref)
    if spaced:
        assert_spare_untouched(dx)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_repeats_bitwise(gpu: torch.device, dtype: torch.dtype) -> None:
    from fullstride.kernels.rms_norm import rms_norm_bwd

    place = Place(gpu, dtype)
    dnormed, x, weight = place.randn(16384, 896), place.randn(16384, 896), place.randn(896)
    rstd = torch.rsqrt(x.float().square().mean(-1) + EPS)
    results = []
    for i in range(20):
        # in the place of x too: what is read ahead there must not have been written
        dx, dweight = x.clone() if i % 2 else place.poisoned(16384, 896), torch.zeros_like(weight)
        rms_norm_bwd(dnormed, dx if i % 2 else x, weight, rstd, None, dx, dweight)
        results.append((dx, dweight))
    for dx, dweight in results[1:]:
        assert_same_bits(dx, results[0][0])
        assert_same_bits(dweight, results[0][1])
