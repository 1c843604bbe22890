"""The update: global norm, one factor for token count and clip, AdamW on every trained unit."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fullstride.engine.batch import Staging
from fullstride.engine.state import TrainedUnit
from fullstride.memory.arena import Arena
from fullstride.ops.adamw import GRAD_SCALE, AdamWBuffers, adamw, hyper_values
from fullstride.ops.norm import sum_of_squares

# elements of the float64 tensor `values`: AdamW's eight, then these, then the noise's key (int64 [3]) in its bits
INV_TOKENS, GRAD_CLIP, RNG = GRAD_SCALE + 1, GRAD_SCALE + 2, GRAD_SCALE + 3


class Optimizer:
    """AdamW over `units`, with the gradients that `shard(unit name)` gives.

    What changes between updates lives in one device tensor; nothing waits for the device. After `step`, `grad_norm`
    (float64 scalar on the device) holds the norm of the mean-loss gradient before the clip.
    """

    def __init__(self, units: dict[str, TrainedUnit], shard: Callable[[str], torch.Tensor], arena: Arena) -> None:
        self._units, self._shard = units, shard
        self._squares = arena.zeros("optimizer", (len(self._units),), torch.float64)
        self._values = arena.zeros("optimizer", (RNG + 3,), torch.float64)
        self._staging = Staging(self._values, "optimizer", arena)
        self.grad_norm = arena.zeros("optimizer", (), torch.float64)

    def load(self, rng: tuple[int, int, int], tokens: int, grad_clip: float, **hyper: float) -> None:
        """Set the values of the next `step`: noise key, supervised tokens, clip (0: none), and hyper_values'."""
        values = self._staging.buffers[self._staging.next()]
        values[:GRAD_SCALE] = torch.tensor(hyper_values(**hyper), dtype=torch.float64)  # type: ignore[arg-type]
        values[INV_TOKENS], values[GRAD_CLIP] = 1 / tokens, grad_clip or float("inf")
        values[RNG:].view(torch.int64).copy_(torch.tensor(rng))
        self._staging.send()

    def step(self) -> None:
        """One update from gradients of the loss sum.

        The gradient is divided by the number of supervised tokens and, when its global norm exceeds the clip, scaled to
        that norm (Pascanu et al. 2013, arXiv 1211.5063): both in one factor, which AdamW applies as it reads.
        """
        values, rng = self._values, self._values[RNG:].view(torch.int64)
        for i, name in enumerate(self._units):
            sum_of_squares(self._shard(name), self._squares[i : i + 1])
        torch.mul(self._squares.sum().sqrt(), values[INV_TOKENS], out=self.grad_norm)
        clip = (values[GRAD_CLIP] / self.grad_norm).clamp(max=1.0)
        torch.mul(clip, values[INV_TOKENS], out=values[GRAD_SCALE])
        hyper = values[: GRAD_SCALE + 1]
        for name, unit in self._units.items():
            for decay, part in ((True, slice(0, unit.layout.decayed)), (False, slice(unit.layout.decayed, None))):
                if unit.param[part].numel():
                    adamw(_buffers(unit, self._shard(name), part, decay), hyper, decay, rng)


def _buffers(unit: TrainedUnit, grad: torch.Tensor, part: slice, decay: bool) -> AdamWBuffers:
    return AdamWBuffers(
        param=unit.param[part],
        master=None if unit.master is None else unit.master[part],
        grad=grad[part],
        m=unit.m[part],
        v=unit.v[part],
        tensor=2 * unit.index + decay,
    )
