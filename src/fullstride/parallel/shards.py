"""Which rank owns what of a flat buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

STEP = 256  # elements: as tensors in flat buffers are aligned, so that parts are in every dtype


@dataclass(frozen=True)
class ShardMap:
    """A flat buffer of `size` elements (a multiple of STEP) shared out to `ranks` owners in equal parts.

    Parts are whole steps and the buffer is padded to `whole`, so that all are of one length; the padding holds zeros.
    Without it they are what torch.chunk makes of the buffer as rows of STEP elements.
    """

    size: int
    ranks: int = 1

    def __post_init__(self) -> None:
        assert self.size % STEP == 0 and self.ranks >= 1

    @property
    def part(self) -> int:
        """Elements of one part."""
        return -(-self.size // (STEP * self.ranks)) * STEP

    @property
    def whole(self) -> int:
        """Elements of the padded buffer."""
        return self.part * self.ranks

    def owned(self, rank: int) -> slice:
        """The elements of the padded buffer that `rank` owns."""
        return slice(rank * self.part, (rank + 1) * self.part)

    def unpadded(self, rank: int) -> slice:
        """Those of them that are no padding."""
        owned = self.owned(rank)
        return slice(min(owned.start, self.size), min(owned.stop, self.size))


@dataclass(frozen=True)
class Part:
    """A piece of a flat buffer of `size` elements, padding left out: `values` [n] are its elements from `first` on."""

    values: torch.Tensor
    first: int
    size: int
