"""Dealing layers to stages."""

from __future__ import annotations

import itertools

import pytest

from fullstride.errors import ConfigError
from fullstride.parallel.schedule import split_layers


@pytest.mark.parametrize(("layers", "stages"), [(7, 2), (30, 4), (36, 2), (5, 5), (1, 1)])
def test_every_layer_is_there_once(layers: int, stages: int) -> None:
    parts = split_layers(layers, stages)
    assert list(itertools.chain(*parts)) == list(range(layers))
    sizes = [len(part) for part in parts]
    assert len(sizes) == stages and max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


def test_more_stages_than_layers() -> None:
    with pytest.raises(ConfigError, match=r"3 layers .* 4 pipeline stages; set pp to at most 3"):
        split_layers(3, 4)
