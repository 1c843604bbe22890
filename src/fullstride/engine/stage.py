"""A stage: neighbouring layers of the model, and forward and backward of one micro-batch through them.

A model that one rank holds whole is one stage. In a pipeline each rank has one stage, or several that lie apart; the
first stage of all has the embedding before its layers, the last one final norm, head and loss behind them.

A micro-batch under way has a slot. The slot's `input` is what the stage reads, and after the backward the gradient of
that; its `output` is what the stage writes, and before the backward the gradient of that (in the last stage the head
puts it there). So what travels between stages travels between these two. Nothing here waits for the device; what a
piece of work depends on besides the slot's buffers is in the key of its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fullstride.engine.batch import FIRST_POSITIONS, DeviceBatch
from fullstride.engine.graphs import Graphs
from fullstride.engine.state import State
from fullstride.memory.arena import Arena, Scratch, spare_columns
from fullstride.memory.saved import Saved, SavedBuffers
from fullstride.model.block import (
    ATTENTION_DROPPED_BY,
    BlockContext,
    BlockWeights,
    block_dgrad,
    block_fwd,
    block_recompute,
    block_weights,
    block_wgrad,
)
from fullstride.model.embedding import embed_bwd, embed_fwd
from fullstride.model.head import HeadContext, HeadWeights, head_begin, head_chunk, head_end
from fullstride.model.linear import LinearContext, fold
from fullstride.model.lora import LoraSettings, adapters_of
from fullstride.model.spec import ModelConfig
from fullstride.model.tensor_parallel import TensorParallel
from fullstride.ops.attention import attention_fwd
from fullstride.ops.cross_entropy import IGNORED
from fullstride.ops.matmul import Matmul
from fullstride.ops.rope import Rope

GetUnit = Callable[[str], dict[str, torch.Tensor]]  # the tensors of a unit, or their gradients, by name

# elements of the statistics tensor: sums over micro-batches and ranks, and a maximum
LOSS, LOSS_1K, LSE_SUM, TOKENS, TOKENS_1K, LSE_MAX = range(6)


@dataclass
class Tools:
    """What all stages of a rank share."""

    config: ModelConfig  # the sizes of this rank's share of every layer
    tp: TensorParallel
    vocabulary: range | None  # of this rank's part of embedding and head; None: all
    lora: LoraSettings | None
    adapted: dict[str, int]  # columns of u and du of each linear that has an adapter
    state: State
    rope: Rope
    matmul: Matmul
    scratch: Scratch
    graphs: Graphs
    recompute: frozenset[str]
    stats: torch.Tensor  # float64 [LSE_MAX + 1]
    noise: torch.Tensor  # int64 [3], as ops/rounding has it, of gradients' sums: (seed, step, backwards in this update)

    # ---- weights of one unit, brought here and named

    def block(self, layer: int) -> BlockWeights:
        """The weights of one block, with its adapters."""
        w = self.assemble(layer, self.state.weights.get)
        if not self.state.weights.resident:  # what was gathered comes without the adapters' copies
            fold_block(w)
        return w

    def assemble(self, layer: int, get: GetUnit) -> BlockWeights:
        """A block's weights, or their gradients, as `get` gives them."""
        adapters = {}
        if self.lora is not None:
            adapters = adapters_of(get(f"blocks.{layer}.adapter"), self.config, self.lora, layer, self.tp)
        return block_weights(get(f"blocks.{layer}"), adapters)

    def head(self, get: GetUnit) -> HeadWeights:
        """Final norm and LM head (the embedding where tied), or their gradients."""
        head = get("head")
        tied = self.config.tie_word_embeddings
        return HeadWeights(head.get("final_norm"), get("embedding").get("embedding") if tied else head.get("lm_head"))

    def units(self, layer: int) -> tuple[str, ...]:
        """What makes up one block."""
        block = f"blocks.{layer}"
        return (block,) if self.lora is None else (block, f"{block}.adapter")

    @property
    def shared(self) -> tuple[TensorParallel, range | None, Scratch]:
        """What embedding and head take."""
        return self.tp, self.vocabulary, self.scratch

    @property
    def head_units(self) -> tuple[str, ...]:
        """What the head reads."""
        return ("head", "embedding") if self.config.tie_word_embeddings else ("head",)


def fold_block(w: BlockWeights) -> None:
    """The copies of a block's adapters beside their base weights: see model/linear.fold."""
    for linear in (w.qkv, w.o, w.gate_up, w.down):
        fold(linear)


@dataclass
class Slot:
    """The buffers of one micro-batch under way: tokens, what the layers keep, and the stage's output [N, D] (with the
    columns for du that the top layer's gradient has)."""

    index: int
    batch: DeviceBatch
    saved: list[Saved]
    output: torch.Tensor

    @property
    def input(self) -> torch.Tensor:
        return self.saved[0].extended("x")

    @property
    def shape(self) -> tuple[bool, int]:
        """What of the micro-batch chooses a graph."""
        return self.batch.documents.packed, len(self.batch.documents.boundaries)


class Stage:
    """Layers `layers` of the model, for `num_slots` micro-batches at once."""

    def __init__(
        self,
        tools: Tools,
        layers: range,
        num_slots: int,
        make_batch: Callable[[], DeviceBatch],
        buffers: SavedBuffers,
        arena: Arena,
    ) -> None:
        self._tools, self.layers = tools, layers
        self.first, self.last = layers.start == 0, layers.stop == tools.config.num_hidden_layers
        self._units = {unit for layer in layers for unit in tools.units(layer)}
        self._units |= ({"embedding"} if self.first else set()) | ({*tools.head_units} if self.last else set())
        self._width, spare = tools.config.hidden_size, 0 if tools.tp.sequence else tools.adapted.get("down", 0)
        self.slots: list[Slot] = []
        for index in range(num_slots):
            batch, saved = make_batch(), [buffers.layer() for _ in layers]
            shape = batch.rows * batch.seq_len // tools.tp.row_shares, spare_columns(self._width, spare)
            output = arena.zeros("activations", shape, saved[0]["x"].dtype)[:, : self._width + spare]
            self.slots.append(Slot(index, batch, saved, output))

    # ---- forward

    def forward(self, slot: Slot) -> None:
        """From the slot's input, or tokens, to its output."""
        # nothing else runs in this pool until the backward has read what attention keeps
        kept = self._run("forward", slot, lambda: self._forward_piece(slot), pool=(self.layers, slot.index))
        for s, attention in zip(slot.saved, kept, strict=True):
            s.attention = attention

    def _run(self, name: str, slot: Slot, work: Callable[[], Any], *variant: object, pool: Hashable = None) -> Any:
        return self._tools.graphs.run((name, self.layers, slot.index, *variant, slot.shape), work, pool)

    def _forward_piece(self, slot: Slot) -> list[tuple[torch.Tensor, ...]]:
        """Returns what attention keeps, a layer each."""
        self._layers_forward(slot, slot.saved, self._context(slot, training=True))
        return [s.attention for s in slot.saved]

    def _layers_forward(self, slot: Slot, saved: list[Saved], ctx: BlockContext) -> None:
        weights, (residual, branch) = self._tools.state.weights, (saved[0]["x"], None)
        if self.first:
            weights.gather("embedding")
            embed_fwd(weights.get("embedding")["embedding"], slot.batch.ids, residual, *self._tools.shared)
            weights.release("embedding")
        drops_attention = not ctx.linear.training or self._tools.recompute & ATTENTION_DROPPED_BY
        for layer, s in zip(self._gathered(self.layers), saved, strict=True):
            residual, branch = block_fwd(self._tools.block(layer), s, ctx, residual, branch)
            if drops_attention:
                s.attention = ()
        assert branch is not None
        torch.add(residual, branch, out=slot.output[:, : self._width])

    def _context(self, slot: Slot, training: bool) -> BlockContext:
        tools, documents = self._tools, slot.batch.documents
        return BlockContext(
            tools.config,
            LinearContext(tools.matmul, tools.scratch, slot.batch.rng, training),
            tools.rope,
            slot.batch.positions,
            documents,
            lambda q, k, v: attention_fwd(q, k, v, documents),
            tools.tp,
        )

    def _gathered(self, layers: range) -> Iterator[int]:
        """`layers` in order; each block's weights are gathered one block ahead and released after their use."""
        weights, ahead = self._tools.state.weights, [*layers[1:], None]
        for unit in self._tools.units(layers[0]):
            weights.gather(unit)
        for layer, following in zip(layers, ahead, strict=True):
            for unit in () if following is None else self._tools.units(following):
                weights.gather(unit)
            yield layer
            for unit in self._tools.units(layer):
                weights.release(unit)

    # ---- backward

    def backward(self, slot: Slot, first: bool, last: bool, weights_later: bool = False) -> None:
        """From the gradient of the slot's output (in the last stage: from the loss) to that of its input. first, last:
        of the update's. weights_later: `backward_weights` follows."""
        gradients = self._tools.state.gradients
        gradients.start_micro_step(first, last)
        if gradients.added_into(self._units):
            self._tools.graphs.run(
                ("zero", self.layers, gradients.variant), lambda: self._tools.state.gradients.zero(self._units)
            )
        if self.last:
            self._head_backward(slot)
        self._run("backward", slot, lambda: self._backward_piece(slot, weights_later), gradients.variant, weights_later)

    def backward_weights(self, slot: Slot, first: bool, last: bool) -> None:
        """The gradients of the layers' matrices, which need no gradient of another stage."""
        gradients = self._tools.state.gradients
        gradients.start_micro_step(first, last)
        self._run("weights", slot, lambda: self._weights_piece(slot), gradients.variant)

    def _head_backward(self, slot: Slot) -> None:
        """Loss, and its gradients down to the final norm's output, chunk by chunk of supervised rows."""
        tools, head = self._tools, slot.batch.head
        accumulates = tools.state.gradients.accumulates("head")
        self._run("head begin", slot, lambda: self._head_begin_piece(slot))
        if not accumulates and not head.num_chunks and tools.lora is None:
            tools.graphs.run("zero head", self._zero_head)  # no chunk overwrites what an earlier update left
        for i in range(head.num_chunks):
            accumulate = accumulates or i > 0

            def work(i: int = i, accumulate: bool = accumulate) -> None:
                self._chunk(slot, i, accumulate)

            tools.graphs.run(("head", slot.index, i, accumulate), work)

    def _head_begin_piece(self, slot: Slot) -> None:
        weights = self._tools.state.weights
        for unit in self._tools.head_units:
            weights.gather(unit)
        head_begin(self._head_weights(), self._head_context(slot), slot.output[:, : self._width], slot.batch.head)

    def _chunk(self, slot: Slot, i: int, accumulate: bool) -> None:
        head, x = slot.batch.head, slot.output[:, : self._width]
        head_chunk(self._head_weights(), self._head_grads(), self._head_context(slot), x, head, i, accumulate)

    def _head_weights(self) -> HeadWeights:
        return self._tools.head(self._tools.state.weights.get)

    def _head_grads(self) -> HeadWeights:
        return self._tools.head(self._tools.state.gradients.full)

    def _zero_head(self) -> None:
        lm_head = self._head_grads().lm_head
        assert lm_head is not None
        lm_head.zero_()

    def _head_context(self, slot: Slot) -> HeadContext:
        tools = self._tools
        return HeadContext(tools.config.rms_norm_eps, slot.batch.z_loss, tools.matmul, *tools.shared)

    def _backward_piece(self, slot: Slot, weights_later: bool) -> None:
        """From the head's chunks down to the embedding (LoRA: to the lowest adapter)."""
        tools, gradients = self._tools, self._tools.state.gradients
        ctx = self._context(slot, training=True)
        if self.last:
            self._head_end(slot)
        for layer, s, dy in self._downwards(slot, gathered=True):
            w, g = tools.block(layer), tools.assemble(layer, gradients.take)
            until = self._until(layer)
            block_recompute(w, s, ctx, tools.recompute)
            block_dgrad(w, g, s, ctx, dy, until)
            if not weights_later:
                self._block_weights(w, g, layer, s, dy, ctx)
        if self.first and tools.lora is None:
            embed_bwd(slot.input, slot.batch.ids, gradients.full("embedding")["embedding"], *tools.shared)
            gradients.notify("embedding")
        gradients.end_micro_step()
        tools.noise[2:] += 1

    def _weights_piece(self, slot: Slot) -> None:
        tools, gradients = self._tools, self._tools.state.gradients
        ctx = self._context(slot, training=True)
        for layer, s, dy in self._downwards(slot, gathered=False):
            w, g = tools.block(layer), tools.assemble(layer, gradients.take)
            self._block_weights(w, g, layer, s, dy, ctx)
        gradients.end_micro_step()

    def _downwards(self, slot: Slot, gathered: bool) -> Iterator[tuple[int, Saved, torch.Tensor]]:
        """(layer, what it kept, the gradient of its output), from the top."""
        layers, dy = self.layers[::-1], slot.output
        for layer, s in zip(self._gathered(layers) if gathered else layers, reversed(slot.saved), strict=True):
            yield layer, s, dy
            dy = s.extended("x")

    def _until(self, layer: int) -> str | None:
        return self._tools.lora.lowest if self._tools.lora is not None and layer == 0 else None

    def _block_weights(
        self, w: BlockWeights, g: BlockWeights, layer: int, s: Saved, dy: torch.Tensor, ctx: BlockContext
    ) -> None:
        gradients, units = self._tools.state.gradients, self._tools.units(layer)
        block_wgrad(w, g, s, ctx, dy, gradients.accumulates(units[-1]), self._until(layer))
        s.attention = ()
        for unit in units:
            gradients.notify(unit)

    def _head_end(self, slot: Slot) -> None:
        tools, gradients = self._tools, self._tools.state.gradients
        self._add_statistics(slot.batch)
        head_end(self._head_weights(), self._head_grads(), self._head_context(slot), slot.output[:, : self._width])
        self._release_head()
        for unit in tools.head_units:
            if unit == "head" or not self.first:  # the embedding's own backward is still to come
                gradients.notify(unit)

    def _release_head(self) -> None:
        for unit in self._tools.head_units:
            self._tools.state.weights.release(unit)

    # ---- statistics and evaluation

    def _add_statistics(self, batch: DeviceBatch) -> None:
        head, stats = batch.head, self._tools.stats
        if not self._tools.tp.rank:  # the others know the same
            stats[:LSE_MAX] += sums(batch)
        supervised = head.targets_M != IGNORED
        stats[LSE_MAX] = torch.maximum(stats[LSE_MAX], torch.where(supervised, head.lse_M, float("-inf")).max())

    def evaluate(self, slot: Slot) -> torch.Tensor | None:
        """Forward only, dropout off. In the last stage, on the first of the ranks that share it: what the micro-batch
        adds to the statistics."""
        # nothing is kept, so all layers may write one layer's buffers
        kept = Saved(slot.saved[0].tensors, slot.saved[0].with_spare)
        self._layers_forward(slot, [kept] * len(self.layers), self._context(slot, training=False))
        if not self.last:
            return None
        self._head_begin_piece(slot)
        w, ctx, head = self._head_weights(), self._head_context(slot), slot.batch.head
        for i in range(head.num_chunks):
            head_chunk(w, None, ctx, slot.output[:, : self._width], head, i, accumulate=False)
        self._release_head()
        return None if self._tools.tp.rank else sums(slot.batch)


def sums(batch: DeviceBatch) -> torch.Tensor:
    """What a micro-batch adds to the statistics, float64 [LSE_MAX]."""
    head = batch.head
    supervised = head.targets_M != IGNORED
    early = supervised & (head.index_M % batch.seq_len < FIRST_POSITIONS)
    loss_1k = torch.where(early, head.loss_M, 0)
    values = (head.loss_M, loss_1k, head.lse_M, supervised, early)
    return torch.stack([value.sum(dtype=torch.float64) for value in values])
