from __future__ import annotations

import pytest
import torch

from fullstride.ops.embedding import embedding_bwd_ref
from tests.kernels.place import Place, assert_close, assert_same_bits, high


@pytest.mark.parametrize("width", [7, 131])
@pytest.mark.parametrize("ids", ["all different", "all equal", "mixed"])
def test_backward(place: Place, ids: str, width: int) -> None:
    """Equal ids of which there are more than a program sums abreast; rows that do not occur keep their bits."""
    from fullstride.kernels.embedding import embedding_bwd

    num_tokens, num_rows = 53, 60
    token_ids = {
        "all different": torch.randperm(num_rows)[:num_tokens].int(),
        "all equal": torch.full((num_tokens,), 17, dtype=torch.int32),
        "mixed": torch.cat([torch.full((37,), 3), torch.tensor([0, 59, 0]), torch.arange(13)]).int(),
    }[ids]
    dout, dtable = place.spaced(place.randn(num_tokens, width)), place.randn(num_rows, width)
    before = dtable.clone()
    embedding_bwd(dout, place.put(token_ids), dtable)
    assert_close(dtable, high(before) + embedding_bwd_ref(high(dout), token_ids, num_rows))
    absent = torch.tensor(sorted(set(range(num_rows)) - set(token_ids.tolist())))
    assert_same_bits(dtable[place.put(absent)], before[place.put(absent)])


@pytest.mark.parametrize(
    "lengths",
    [
        [32],  # a piece is 32 places
        [33],
        [5, 27, 32, 64, 1],  # runs that end where a piece does
        [1, 62, 1, 100, 31],  # and such as end beside it
        [7, 700, 3],  # more pieces than are summed at once
    ],
)
def test_runs_over_several_pieces(place: Place, lengths: list[int]) -> None:
    from fullstride.kernels.embedding import embedding_bwd

    token_ids = torch.repeat_interleave(torch.arange(len(lengths)) * 2 + 1, torch.tensor(lengths)).int()
    token_ids = token_ids[torch.randperm(len(token_ids), generator=place.generator)]
    num_rows = 2 * len(lengths) + 1
    dout, dtable = place.randn(len(token_ids), 37), place.randn(num_rows, 37)
    before = dtable.clone()
    embedding_bwd(dout, place.put(token_ids), dtable)
    assert_close(dtable, high(before) + embedding_bwd_ref(high(dout), token_ids, num_rows))
    absent = torch.arange(0, num_rows, 2)
    assert_same_bits(dtable[place.put(absent)], before[place.put(absent)])


@pytest.mark.parametrize("elsewhere", [3, 40, 90])
def test_ids_that_are_elsewhere_add_nothing(place: Place, elsewhere: int) -> None:
    """Id -1, which is sorted to the front: some of a piece, more than one, nearly all."""
    from fullstride.kernels.embedding import embedding_bwd

    token_ids = torch.cat([torch.full((elsewhere,), -1), torch.arange(100 - elsewhere) // 2]).int()
    token_ids = token_ids[torch.randperm(100, generator=place.generator)]
    dout, dtable = place.randn(100, 37), place.randn(60, 37)
    before, here = dtable.clone(), token_ids >= 0
    embedding_bwd(dout, place.put(token_ids), dtable)
    expected = torch.zeros(60, 37, dtype=torch.float64).index_add_(0, token_ids[here], high(dout)[here])
    assert torch.equal(embedding_bwd_ref(high(dout), token_ids, 60), expected)
    assert_close(dtable, high(before) + expected)
    absent = torch.tensor(sorted(set(range(60)) - set(token_ids.tolist())))
    assert_same_bits(dtable[place.put(absent)], before[place.put(absent)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_repeats_bitwise(gpu: torch.device, dtype: torch.dtype) -> None:
    from fullstride.kernels.embedding import embedding_bwd

    place = Place(gpu, dtype)
    # ids as skewed as words are: a few very common, most rare
    ids = (torch.rand(16384, generator=place.generator) ** 4 * 5000).int().to(gpu)
    dout = place.randn(16384, 896)
    results = []
    for _ in range(20):
        dtable = torch.zeros(5000, 896, dtype=dtype, device=gpu)
        embedding_bwd(dout, ids, dtable)
        results.append(dtable)
    for dtable in results[1:]:
        assert_same_bits(dtable, results[0])
    # the longest run has about 2,000 terms: 8 roundings one after the other in a piece, then 4 over its 63 pieces
    assert_close(results[0], embedding_bwd_ref(high(dout), ids.cpu(), 5000), inside=1e-5)
