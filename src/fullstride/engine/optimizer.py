"""The update: global norm, one factor for token count and clip, AdamW on this rank's part of every trained unit."""

from __future__ import annotations

import torch

from fullstride.engine.batch import Staging
from fullstride.engine.state import State, TrainedUnit
from fullstride.memory.arena import Arena
from fullstride.ops.adamw import GRAD_SCALE, AdamWBuffers, adamw, hyper_values
from fullstride.ops.norm import sum_of_squares
from fullstride.parallel.comm import Communicator
from fullstride.parallel.mesh import Mesh

# elements of the float64 tensor `values`: AdamW's eight, then these, then the noise's key (int64 [3]) in its bits
GRAD_CLIP, RNG = GRAD_SCALE + 1, GRAD_SCALE + 2


class Optimizer:
    """AdamW over the trained units of `state`, with its gradients.

    What changes between updates lives in device tensors; nothing waits for the device. After `step`, `grad_norm`
    (float64 scalar on the device) holds the norm of the mean-loss gradient before the clip.
    """

    def __init__(self, state: State, mesh: Mesh, arena: Arena) -> None:
        self._state, self._units, self._mesh = state, state.trained, mesh
        # a tied embedding may be in two stages: its gradient is the sum over both, and counted in the first
        self._twice = {"embedding"} & self._units.keys() if state.tied and mesh.ends.size > 1 else set()
        self._counted = [name for name in self._units if not (name in self._twice and mesh.ends.rank)]
        number = sum(state.splits[name].num_stretches for name in self._counted)
        self._squares = arena.zeros("optimizer", (number,), torch.float64)
        self._values = arena.zeros("optimizer", (RNG + 3,), torch.float64)
        self._staging = Staging(self._values, "optimizer", arena)
        self.grad_norm = arena.zeros("optimizer", (), torch.float64)

    @property
    def _norm_ranks(self) -> Communicator:
        """Those that hold the gradient once between them."""
        return self._mesh.model if self._state.owners.size < self._mesh.dp.size else self._mesh.world

    def load(self, rng: tuple[int, int, int], grad_clip: float, **hyper: float) -> None:
        """Set the values of the next `step`: noise key, clip (0: none), and hyper_values'."""
        values = self._staging.buffers[self._staging.next()]
        values[:GRAD_SCALE] = torch.tensor(hyper_values(**hyper), dtype=torch.float64)  # type: ignore[arg-type]
        values[GRAD_CLIP] = grad_clip or float("inf")
        values[RNG:].view(torch.int64).copy_(torch.tensor(rng))
        self._staging.send()

    def step(self, tokens: torch.Tensor) -> None:
        """One update from gradients of the loss sum over `tokens` supervised tokens (float64 scalar), all ranks' both.

        The gradient is divided by their number and, when its global norm exceeds the clip, scaled to that norm (Pascanu
        et al. 2013, arXiv 1211.5063): both in one factor, which AdamW applies as it reads.
        """
        values, rng = self._values, self._values[RNG:].view(torch.int64)
        shards, weights = self._state.gradients.shards, self._state.weights
        squares = iter(self._squares.split(1))
        for name, grad in shards(self._units):
            self._complete(name, grad)
            for stretch, split, _ in self._units[name].stretches if name in self._counted else ():
                square = next(squares)
                if split or not self._mesh.tp.rank:  # what all ranks have counts once
                    sum_of_squares(grad[stretch], square)
        torch.sum(self._squares, 0, out=self.grad_norm)
        self._norm_ranks.all_reduce(self.grad_norm).wait()
        self.grad_norm.sqrt_().div_(tokens)
        clip = (values[GRAD_CLIP] / self.grad_norm).clamp(max=1.0)
        torch.div(clip, tokens, out=values[GRAD_SCALE])
        hyper = values[: GRAD_SCALE + 1]
        weights.start_writing()
        for name, grad in shards(self._units):
            unit = self._units[name]
            decayed = min(max(unit.layout.decayed - unit.part.start, 0), len(unit.param))
            for stretch, split, _ in unit.stretches:
                middle = min(max(decayed, stretch.start), stretch.stop)
                for decay, part in ((True, slice(stretch.start, middle)), (False, slice(middle, stretch.stop))):
                    if part.start < part.stop:
                        adamw(_buffers(unit, grad, part, self._noise(unit, split)), hyper, decay, rng)
            weights.written(name)
        weights.settle()

    def _complete(self, name: str, grad: torch.Tensor) -> None:
        """Sum over ranks what is a term on each, in place."""
        terms = [(self._mesh.tp, grad[stretch]) for stretch, _, term in self._units[name].stretches if term]
        if name in self._twice:
            terms.append((self._mesh.ends, grad))
        for work in [comm.all_reduce(term) for comm, term in terms]:
            work.wait()
        if terms:
            self._state.gradients.written(name)

    def _noise(self, unit: TrainedUnit, split: bool) -> int:
        """The number of the tensor for its noise: of split ones each rank's share has its own, of others all agree."""
        return unit.index + (self._mesh.tp.rank * len(self._state.splits) if split else 0)


def _buffers(unit: TrainedUnit, grad: torch.Tensor, part: slice, tensor: int) -> AdamWBuffers:
    return AdamWBuffers(
        param=unit.param[part],
        master=None if unit.master is None else unit.master[part],
        grad=grad[part],
        m=unit.m[part],
        v=unit.v[part],
        tensor=tensor,
        first=unit.part.start + part.start,
    )
