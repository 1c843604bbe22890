"""Who owns what of a flat buffer."""

from __future__ import annotations

import pytest
import torch

from fullstride.memory.arena import ALIGNMENT, FlatLayout
from fullstride.parallel.shards import STEP, ShardMap

SIZES = [STEP * n for n in (0, 1, 2, 3, 7, 8, 1001)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", SIZES)
def test_every_element_has_one_owner_and_parts_are_equal(size: int, ranks: int) -> None:
    shards = ShardMap(size, ranks)
    owned = [shards.owned(rank) for rank in range(ranks)]
    assert [element for part in owned for element in range(shards.whole)[part]] == list(range(shards.whole))
    assert {part.stop - part.start for part in owned} == {shards.part} and shards.part % STEP == 0
    assert 0 <= shards.whole - size < STEP * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("size", SIZES[1:])
def test_parts_are_torchs_chunks_of_rows_of_a_step(size: int, ranks: int) -> None:
    """What a DTensor [size / STEP, STEP] in Shard(0) has on each rank: the owned elements without the padding."""
    shards = ShardMap(size, ranks)
    chunks = torch.arange(size).view(-1, STEP).chunk(ranks)
    for rank in range(ranks):
        owned = torch.arange(shards.whole)[shards.owned(rank)]
        expected = chunks[rank].flatten() if rank < len(chunks) else torch.arange(0)
        assert torch.equal(owned[owned < size], expected)


def test_tensors_and_parts_are_aligned_alike() -> None:
    assert STEP == ALIGNMENT and FlatLayout.of([("a", (3, 5), True), ("b", (7,), False)]).size % STEP == 0
