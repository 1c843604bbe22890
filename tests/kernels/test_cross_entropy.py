from __future__ import annotations

import itertools
import math

import pytest
import torch

from fullstride.ops.cross_entropy import IGNORED, cross_entropy_ref, join_terms, part_bwd_ref, part_terms_ref
from tests.kernels.place import Place, assert_close, assert_same_bits, assert_spare_untouched, high

# exp(x - lse): the float32 product of the exponent and log2(e) is off by |x - lse| * 1e-7, and x - lse reaches -30 here
INSIDE = 5e-6


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("vocab_size", [2, 257, 1009, 33331])
def test_loss_and_gradient(place: Place, vocab_size: int, backward: bool, z_loss: float) -> None:
    """A vocabulary below a program's least, primes, and one of three turns; the first, the last and an ignored row."""
    from fullstride.kernels.cross_entropy import cross_entropy

    logits = place.spaced(place.randn(5, vocab_size, scale=4))
    targets = torch.tensor([0, vocab_size - 1, IGNORED, vocab_size // 2, 1], dtype=torch.int32)
    logits[2] = float("nan")  # what stands in an ignored row must not matter
    logits[4, 0] = float("-inf")
    before = logits.clone()
    loss, lse = (place.poisoned(5, dtype=torch.float32) for _ in range(2))
    z = torch.tensor([z_loss])
    cross_entropy(logits, place.put(targets), place.put(z), loss, lse, backward)

    loss_ref, lse_ref, dlogits_ref = cross_entropy_ref(high(before), targets, z)
    assert_close(loss, loss_ref, inside=INSIDE)
    assert_close(lse, lse_ref)
    if backward:
        assert_close(logits, dlogits_ref, inside=INSIDE)
    else:
        assert_same_bits(logits, before)
    assert_spare_untouched(logits)


@pytest.mark.parametrize("vocab_size", [302, 70004])
def test_two_bf16_in_a_word(place: Place, vocab_size: int) -> None:
    """Rows whose width and stride are even are read as words; the interpreter can do that, but not store bf16."""
    from fullstride.kernels.cross_entropy import cross_entropy

    backward = place.device.type == "cuda"
    base = place.randn(4, vocab_size + 6, scale=4, dtype=torch.bfloat16)
    logits, spare = base[:, :vocab_size], base[:, vocab_size:].clone()
    logits[3, 5] = float("-inf")
    targets, z = torch.tensor([0, vocab_size - 1, IGNORED, 7], dtype=torch.int32), torch.tensor([1e-2])
    loss_ref, lse_ref, dlogits_ref = cross_entropy_ref(high(logits), targets, z)
    loss, lse = (place.poisoned(4, dtype=torch.float32) for _ in range(2))
    cross_entropy(logits, place.put(targets), place.put(z), loss, lse, backward)
    assert_close(loss, loss_ref, inside=INSIDE)
    assert_close(lse, lse_ref)
    if backward:
        assert_close(logits, dlogits_ref, inside=INSIDE)
    assert_same_bits(base[:, vocab_size:], spare)


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("bounds", [(0, 5, 257), (0, 257, 263), (0, 16700, 33331)], ids=str)
def test_parts_of_a_vocabulary(place: Place, bounds: tuple[int, ...], z_loss: float) -> None:
    """Two ranks' parts, joined: targets at the parts' ends, an ignored row, a part whose logits are all -inf."""
    from fullstride.kernels.cross_entropy import part_bwd, part_terms

    _, middle, end = bounds
    whole = place.randn(6, end, scale=4)
    targets = torch.tensor([0, middle - 1, IGNORED, middle, end - 1, end - 1], dtype=torch.int32)
    whole[2] = float("nan")  # what stands in an ignored row must not matter
    whole[5, :middle] = float("-inf")
    z = torch.tensor([z_loss])
    loss_ref, lse_ref, dlogits_ref = cross_entropy_ref(high(whole), targets, z)
    parts = [place.spaced(whole[:, start:stop]) for start, stop in itertools.pairwise(bounds)]
    terms = place.poisoned(2, 3, 6, dtype=torch.float32)
    for part, start, its in zip(parts, bounds, terms, strict=False):
        part_terms(part, place.put(targets), start, its)
    joined, loss, lse = place.poisoned(3, 6, dtype=torch.float32), *place.poisoned(2, 6, dtype=torch.float32)
    join_terms(terms, place.put(targets), joined, loss, lse)
    for part, start in zip(parts, bounds, strict=False):
        part_bwd(part, place.put(targets), start, place.put(z), joined)
    assert_close(loss, loss_ref, inside=INSIDE)
    assert_close(lse, lse_ref)
    assert_close(torch.cat(parts, 1), dlogits_ref, inside=INSIDE)
    assert_spare_untouched(*parts)


def test_references_of_parts_are_the_whole() -> None:
    """In float64, beside autograd's formula above: the same sums in another order."""
    generator = torch.Generator().manual_seed(3)
    whole = 4 * torch.randn(4, 50, generator=generator, dtype=torch.float64)
    targets, z = torch.tensor([0, 29, IGNORED, 49], dtype=torch.int32), torch.tensor([1e-2])
    loss_ref, lse_ref, dlogits_ref = cross_entropy_ref(whole, targets, z)
    starts, parts = (0, 20, 40), [part.clone() for part in whole.split(20, dim=1)]
    terms = torch.stack([part_terms_ref(part, targets, start) for part, start in zip(parts, starts, strict=True)])
    joined, loss, lse = torch.empty(3, 4).double(), *torch.empty(2, 4).double()
    join_terms(terms, targets, joined, loss, lse)
    dlogits = [part_bwd_ref(part, targets, start, z, joined) for part, start in zip(parts, starts, strict=True)]
    for found, expected in ((loss, loss_ref), (lse, lse_ref), (torch.cat(dlogits, 1), dlogits_ref)):
        assert torch.allclose(found, expected, rtol=1e-13, atol=1e-15)


def test_far_from_zero(place: Place) -> None:
    """Logits about 1e4 whose exponentials overflow."""
    from fullstride.kernels.cross_entropy import cross_entropy

    logits = place.randn(2, 300, scale=2, dtype=torch.float32) + torch.tensor([[1e4], [-1e4]], device=place.device)
    logits = logits.to(place.dtype)
    targets, z = torch.tensor([3, 299], dtype=torch.int32), torch.zeros(1)
    loss_ref, lse_ref, dlogits_ref = cross_entropy_ref(high(logits), targets, z)
    loss, lse = (place.poisoned(2, dtype=torch.float32) for _ in range(2))
    cross_entropy(logits, place.put(targets), place.put(z), loss, lse, True)
    assert_close(lse, lse_ref)
    assert_close(loss, loss_ref, inside=INSIDE)
    assert_close(logits, dlogits_ref, inside=INSIDE)


def test_very_negative_rows(place: Place) -> None:
    """Whole rows at -2e38, of equal logits: the loss is log V and the gradient 1 / V, less one at the target."""
    from fullstride.kernels.cross_entropy import cross_entropy

    logits = torch.full((2, 64), -2e38, device=place.device).to(place.dtype)
    loss, lse = (place.poisoned(2, dtype=torch.float32) for _ in range(2))
    targets = torch.tensor([1, 63], dtype=torch.int32)
    cross_entropy(logits, place.put(targets), place.put(torch.zeros(1)), loss, lse, True)
    expected = torch.full((2, 64), 1 / 64, dtype=torch.float64)
    expected[[0, 1], [1, 63]] -= 1
    assert_close(loss, torch.full((2,), math.log(64), dtype=torch.float64), inside=INSIDE)
    assert_close(logits, expected, inside=INSIDE)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(gpu: torch.device) -> None:
    """A training size of 2.5e9 logits: the last row lies where an int32 offset would have wrapped."""
    from fullstride.kernels.cross_entropy import cross_entropy

    place = Place(gpu, torch.bfloat16)
    num_rows, vocab_size = 16384, 151936
    logits = torch.zeros(num_rows, vocab_size, dtype=torch.bfloat16, device=gpu)
    logits[-1] = place.randn(vocab_size)
    targets = torch.full((num_rows,), 7, dtype=torch.int32)
    z = torch.zeros(1)
    loss_ref, lse_ref, dlogits_ref = cross_entropy_ref(high(logits[-1:]), targets[-1:], z)
    loss, lse = (place.poisoned(num_rows, dtype=torch.float32) for _ in range(2))
    cross_entropy(logits, targets.to(gpu), z.to(gpu), loss, lse, True)
    assert_close(loss[-1:], loss_ref, inside=INSIDE)
    assert_close(lse[-1:], lse_ref)
    assert_close(logits[-1:], dlogits_ref, inside=INSIDE)
    torch.testing.assert_close(loss[0].item(), float(torch.tensor(vocab_size).log()), rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeats_bitwise(gpu: torch.device, dtype: torch.dtype) -> None:
    """Programs of a row come in any order, and several rows' programs at once: the same bits."""
    from fullstride.kernels.cross_entropy import cross_entropy

    place = Place(gpu, dtype)
    logits, targets, z = place.randn(1000, 151936), place.randint(151936, 1000), torch.zeros(1, device=gpu)
    results = []
    for _ in range(5):
        dlogits, loss, lse = logits.clone(), *(place.poisoned(1000, dtype=torch.float32) for _ in range(2))
        cross_entropy(dlogits, targets, z, loss, lse, True)
        results.append((dlogits, loss, lse))
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert_same_bits(x, y)
