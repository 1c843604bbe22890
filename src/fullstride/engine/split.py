"""A state whose tensors are shared out by tensor parallelism (model/tensor_parallel), beside the same one unsplit.

Every rank's flat buffers have one layout, whatever part of the tensors they hold. What leaves the engine (exported
models, adapters, gradients, checkpoints) has the layout of the unsplit model, and so has what comes in.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fullstride.memory.arena import FlatLayout
from fullstride.model.lora import LoraSettings, adapter_unit
from fullstride.model.spec import ModelConfig, Unit, parameter_table
from fullstride.model.tensor_parallel import Share, TensorParallel, shares
from fullstride.parallel.comm import Communicator

# norms of the residual stream: their gradients are whole on every rank that has all its rows
STREAM_NORMS = frozenset({"attn_norm", "mlp_norm", "final_norm"})


def tensor_parallel(comm: Communicator, sequence: bool) -> TensorParallel:
    """`comm` as the model takes it."""

    def all_reduce(x: torch.Tensor) -> None:
        comm.all_reduce(x.view(-1)).wait()

    def all_gather(part: torch.Tensor, whole: torch.Tensor) -> None:
        comm.all_gather(part.view(-1), whole.view(-1)).wait()

    def reduce_scatter(whole: torch.Tensor, part: torch.Tensor) -> None:
        comm.reduce_scatter(whole.view(-1), part.view(-1)).wait()

    return TensorParallel(comm.rank, comm.size, all_reduce, all_gather, reduce_scatter, sequence)


def tables(config: ModelConfig, lora: LoraSettings | None) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
    """(the base model's units, the adapters')."""
    layers = range(0 if lora is None else config.num_hidden_layers)
    return parameter_table(config), tuple(adapter_unit(config, lora, layer) for layer in layers if lora)


class UnitSplit:
    """One unit: this rank's tensors `own`, in a flat buffer of `layout`, and the unsplit ones, `whole`."""

    def __init__(self, own: Unit, whole: Unit, layout: FlatLayout, comm: Communicator, sequence: bool) -> None:
        """comm: the ranks that share the tensors out; sequence: whether they share the residual stream's rows too."""
        self._own, self._whole, self._layout, self._comm, self._sequence = own, whole, layout, comm, sequence
        self.whole_layout = FlatLayout.of((t.name, t.shape, t.decay) for t in whole.tensors)

    def shares(self, rank: int) -> Iterator[tuple[str, Share]]:
        """(our tensor, what of a checkpoint's tensor is in it) of one rank."""
        for own, whole in zip(self._own.tensors, self._whole.tensors, strict=True):
            for share in shares(own, whole, rank):
                yield own.name, share

    def gather(self, flat: torch.Tensor) -> torch.Tensor:
        """The unsplit flat buffer, of which `flat` (padding may follow) is this rank's share. A collective."""
        if self._comm.size == 1:
            return flat[: self._layout.size]
        every = flat.new_empty(self._comm.size, self._layout.size)
        self._comm.all_gather(flat[: self._layout.size], every.view(-1)).wait()
        whole = flat.new_zeros(self.whole_layout.size)
        views = self.whole_layout.views(whole)
        for rank, buffer in enumerate(every):
            own = self._layout.views(buffer)
            for name, share in self.shares(rank):
                views[name][share.whole] = own[name][share.own]
        return whole

    def cut(self, whole: torch.Tensor, flat: torch.Tensor) -> None:
        """Overwrites this rank's tensors in `flat` with their share of the unsplit flat buffer; what is between them
        stays. The inverse of `gather`, without communication."""
        views, own = self.whole_layout.views(whole), self._layout.views(flat)
        for name, share in self.shares(self._comm.rank):
            own[name][share.own] = views[name][share.whole].to(flat.device)

    @property
    def num_stretches(self) -> int:
        """Of the whole flat buffer; a part has no more."""
        return len(list(self.stretches(slice(0, self._layout.size))))

    def stretches(self, part: slice) -> Iterator[tuple[slice, bool, bool]]:
        """`part` of the flat buffer in stretches: (elements of the part, whether they are split among ranks, whether
        each rank's gradient of them is a term of a sum)."""
        kinds: list[tuple[int, bool, bool]] = []
        for spec in self._own.tensors:
            split = spec.split is not None and self._comm.size > 1
            term = self._comm.size > 1 and not split and (self._sequence or spec.name not in STREAM_NORMS)
            if not kinds or kinds[-1][1:] != (split, term):
                kinds.append((self._layout.offsets[spec.name], split, term))
        for (start, split, term), end in zip(kinds, [*(k[0] for k in kinds[1:]), part.stop], strict=True):
            start, stop = max(start, part.start), min(end, part.stop)
            if start < stop:
                yield slice(start - part.start, stop - part.start), split, term
