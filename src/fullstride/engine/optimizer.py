"""The update: global norm, one factor for token count and clip, AdamW on every trained unit."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from fullstride.engine.batch import to_device
from fullstride.engine.state import TrainedUnit
from fullstride.memory.arena import Arena
from fullstride.ops.adamw import GRAD_SCALE, AdamWBuffers, adamw, hyper_values
from fullstride.ops.norm import sum_of_squares


class Optimizer:
    """AdamW over `units`. All values that change between updates live in device tensors; nothing waits for the device.

    After `step`, `grad_norm` (float64 scalar on the device) holds the norm of the mean-loss gradient before the clip.
    """

    def __init__(self, units: Iterable[TrainedUnit], arena: Arena) -> None:
        self._units = tuple(units)
        self._squares = arena.zeros("optimizer", (len(self._units),), torch.float64)
        self._hyper = arena.zeros("optimizer", (GRAD_SCALE + 1,), torch.float64)
        self.grad_norm = arena.zeros("optimizer", (), torch.float64)

    def step(
        self,
        tokens: int,
        grad_clip: float,
        rng: torch.Tensor,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """One update from gradients of the loss sum over `tokens` supervised tokens.

        The gradient is divided by `tokens` and, when its global norm exceeds `grad_clip` (0: never), scaled to that
        norm (Pascanu et al. 2013, arXiv 1211.5063): both in one factor, which AdamW applies as it reads.
        """
        for i, unit in enumerate(self._units):
            sum_of_squares(unit.grad, self._squares[i : i + 1])
        torch.div(self._squares.sum().sqrt(), tokens, out=self.grad_norm)
        values = hyper_values(lr, beta1, beta2, eps, weight_decay, step)
        to_device(np.array(values), self._hyper[:GRAD_SCALE])
        scale = torch.full_like(self.grad_norm, 1.0)
        if grad_clip:
            scale = torch.clamp(grad_clip / self.grad_norm, max=1.0)
        torch.div(scale, tokens, out=self._hyper[GRAD_SCALE])
        for unit in self._units:
            for decay, part in ((True, slice(0, unit.layout.decayed)), (False, slice(unit.layout.decayed, None))):
                if unit.param[part].numel():
                    adamw(_buffers(unit, part, decay), self._hyper, decay, rng)


def _buffers(unit: TrainedUnit, part: slice, decay: bool) -> AdamWBuffers:
    return AdamWBuffers(
        param=unit.param[part],
        master=None if unit.master is None else unit.master[part],
        grad=unit.grad[part],
        m=unit.m[part],
        v=unit.v[part],
        tensor=2 * unit.index + decay,
    )
