"""The training step: micro-steps -> reduce -> clip -> update. This is the page to read first.

    engine.micro_step(batch)     forward and backward; gradients of the loss *sum* add up in the gradient manager
    engine.update(...)           global norm, one factor (1 / tokens, clip), AdamW

Inside a micro-step nothing waits for the device, every shape is static, and what changes from one to the next (tokens,
documents, seeds, z-loss) lives in device tensors, so that it can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from fullstride.engine.batch import FIRST_POSITIONS, DeviceBatch, HostBatch
from fullstride.engine.graphs import Graphs
from fullstride.engine.optimizer import Optimizer
from fullstride.engine.split import tensor_parallel
from fullstride.engine.state import Precision, Sharing, State
from fullstride.memory.arena import Arena, Scratch
from fullstride.memory.saved import Saved, SavedTensor, allocate_saved
from fullstride.model.block import (
    ATTENTION_DROPPED_BY,
    BlockContext,
    BlockWeights,
    block_dgrad,
    block_fwd,
    block_recompute,
    block_weights,
    block_wgrad,
    saved_table,
)
from fullstride.model.embedding import embed_bwd, embed_fwd
from fullstride.model.head import HeadContext, HeadWeights, head_begin, head_chunk, head_end
from fullstride.model.linear import LinearContext, fold
from fullstride.model.lora import LoraSettings, adapter_columns, adapters_of
from fullstride.model.spec import ModelConfig, Unit
from fullstride.model.tensor_parallel import split_config, vocabulary_of
from fullstride.ops.attention import attention_fwd
from fullstride.ops.cross_entropy import IGNORED
from fullstride.ops.matmul import WORKSPACE_BYTES, Matmul, fastest_matmul, matmul
from fullstride.ops.rope import Rope, rope_frequencies, rope_tables
from fullstride.parallel.comm import Communicator
from fullstride.parallel.grid import grid

GetUnit = Callable[[str], dict[str, torch.Tensor]]  # the tensors of a unit, or their gradients, by name

# elements of the statistics tensor: sums over micro-steps and ranks, and a maximum
LOSS, LOSS_1K, LSE_SUM, TOKENS, TOKENS_1K, LSE_MAX = range(6)


@dataclass(frozen=True)
class EngineSettings:
    """Sizes and switches of one engine. rows x seq_len tokens a micro-step and rank; head_chunks pieces of the LM head;
    at most grad_accum micro-steps an update."""

    rows: int
    seq_len: int
    precision: Precision
    head_chunks: int
    recompute: frozenset[str] = frozenset()
    deterministic: bool = False
    seed: int = 42
    graphs: bool = True  # on a GPU: micro-steps and updates as CUDA graphs
    flash4: bool = False  # on a GPU: FlashAttention-4 where it is faster
    grad_accum: int = 1
    sharing: Sharing = field(default_factory=Sharing)  # of state and gradients among ranks
    trains: bool = True  # False: no gradients, moments or saved activations, for generation
    sequence_parallel: bool = True  # with tensor parallelism: share the residual stream's rows, where they divide


class Engine:
    """One device's model, and the step over it; `comm` connects the ranks that train the same model on other rows, `tp`
    those that share its tensors out and train on the same rows. `share` has the sizes of one share."""

    def __init__(
        self,
        config: ModelConfig,
        lora: LoraSettings | None,
        settings: EngineSettings,
        device: torch.device,
        comm: Communicator | None = None,
        tp: Communicator | None = None,
    ) -> None:
        """Raises ConfigError where tp does not divide the model."""
        self.config, self.lora, self.settings, self.device = config, lora, settings, device
        self.comm, tp = comm or Communicator(), tp or Communicator()
        self.ranks = grid(self.comm, tp)
        num_tokens = settings.rows * settings.seq_len
        sequence = tp.size > 1 and settings.sequence_parallel and num_tokens % tp.size == 0
        self.share, self.tp = split_config(config, tp.size), tensor_parallel(tp, sequence)
        self.arena = Arena(device)
        self.scratch = Scratch(self.arena, grows=False)
        dtype = settings.precision.param
        self.dtype, stats = dtype, torch.float64 if dtype == torch.float64 else torch.float32
        attention = {"deterministic": settings.deterministic, "flash4": settings.flash4}
        self.batch = DeviceBatch(self.arena, settings.rows, settings.seq_len, settings.head_chunks, stats, **attention)
        shared = {"trains": settings.trains, "sharing": settings.sharing, "comm": self.comm}
        shared |= {"tp": tp, "sequence": sequence}
        self.state = State(config, lora, settings.precision, self.arena, self.batch.rng, **shared)
        self.optimizer = Optimizer(self.state, self.arena)
        self.adapted = {} if lora is None else adapter_columns(lora)
        rows = saved_table(self.share, self.adapted, self.tp.row_shares)
        self.saved_table = tuple(SavedTensor(*row) for row in rows)
        if lora is not None and lora.dropout and settings.trains:  # one buffer for linears of all widths
            widest = max(config.hidden_size, self.share.q_size, self.share.intermediate_size)
            self.scratch("dropped", (num_tokens, widest), dtype)
        num_saved = config.num_hidden_layers if settings.trains else 0
        self.saved = allocate_saved(self.saved_table, num_saved, num_tokens, settings.recompute, self.arena, dtype)
        self.rope = make_rope(config, settings.seq_len, self.arena, stats)
        self.matmul = make_matmul(settings, self.arena)
        self.graphs = Graphs(settings.graphs and device.type == "cuda")
        # of embedding and head
        self._shared = self.tp, vocabulary_of(config.vocab_size, self.tp), self.scratch
        self._stats = self.arena.zeros("batch", (LSE_MAX + 1,), torch.float64)
        self.updates = 0  # updates done, which with the micro-step's number keys the noise
        self._reset()

    def _reset(self) -> None:
        self.micro_steps = 0
        self._stats.zero_()
        self._stats[LSE_MAX].fill_(float("-inf"))

    # ---- weights of one unit, brought here and named

    def block(self, layer: int) -> BlockWeights:
        """The weights of one block, with its adapters."""
        w = self._assemble(layer, self.state.weights.get)
        if not self.state.weights.resident:  # what was gathered comes without the adapters' copies
            fold_block(w)
        return w

    def _assemble(self, layer: int, get: GetUnit) -> BlockWeights:
        adapters = {}
        if self.lora is not None:
            adapters = adapters_of(get(f"blocks.{layer}.adapter"), self.share, self.lora, layer, self.tp)
        return block_weights(get(f"blocks.{layer}"), adapters)

    def head(self) -> HeadWeights:
        """Final norm and LM head (the embedding where tied)."""
        return self._head(self.state.weights.get)

    def _head(self, get: GetUnit) -> HeadWeights:
        head = get("head")
        tied = self.config.tie_word_embeddings
        return HeadWeights(head.get("final_norm"), get("embedding").get("embedding") if tied else head.get("lm_head"))

    # ---- forward and backward of one micro-step

    def _context(self, training: bool) -> BlockContext:
        documents, first_row = self.batch.documents, self.comm.rank * self.settings.rows * self.settings.seq_len
        return BlockContext(
            self.share,
            LinearContext(self.matmul, self.scratch, self.batch.rng, training, first_row),
            self.rope,
            self.batch.positions,
            documents,
            lambda q, k, v: attention_fwd(q, k, v, documents),
            self.tp,
        )

    def _forward(self, ctx: BlockContext, saved: list[Saved]) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.state.weights
        residual, branch = saved[0]["x"], None
        weights.gather("embedding")
        embed_fwd(weights.get("embedding")["embedding"], self.batch.ids, residual, *self._shared)
        weights.release("embedding")
        drops_attention = not ctx.linear.training or self.settings.recompute & ATTENTION_DROPPED_BY
        for layer in self._gathered(range(len(saved))):
            residual, branch = block_fwd(self.block(layer), saved[layer], ctx, residual, branch)
            if drops_attention:
                saved[layer].attention = ()
        assert branch is not None
        for unit in self._head_units:
            weights.gather(unit)
        return residual, branch

    def _gathered(self, layers: range) -> Iterator[int]:
        """`layers` in order; each block's weights are gathered one block ahead and released after their use."""
        weights, ahead = self.state.weights, [*layers[1:], None]
        for unit in self._units(layers[0]):
            weights.gather(unit)
        for layer, following in zip(layers, ahead, strict=True):
            for unit in () if following is None else self._units(following):
                weights.gather(unit)
            yield layer
            for unit in self._units(layer):
                weights.release(unit)

    def _units(self, layer: int) -> tuple[str, ...]:
        """What makes up one block."""
        block = f"blocks.{layer}"
        return (block,) if self.lora is None else (block, f"{block}.adapter")

    @property
    def _head_units(self) -> tuple[str, ...]:
        """What the head reads: gathered by the forward, released by whoever is done with the head."""
        return ("head", "embedding") if self.config.tie_word_embeddings else ("head",)

    def _release_head(self) -> None:
        for unit in self._head_units:
            self.state.weights.release(unit)

    def micro_step(self, host: HostBatch, z_loss: float) -> None:
        """Forward and backward of one micro-batch; gradients add up until `update`.

        The host's part is one copy into the static buffers; the rest runs in pieces that graphs replay. What they
        depend on besides the buffers is in their keys.
        """
        assert self.comm.size == 1 or self.micro_steps < self.settings.grad_accum, "the last one was reduced"
        self.batch.load(host, (self.settings.seed, self.updates + 1, self.micro_steps), z_loss)
        gradients, run = self.state.gradients, self.graphs.run
        gradients.start_micro_step(self.micro_steps == 0, self.micro_steps + 1 == self.settings.grad_accum)
        if gradients.added_into():
            run(("zero", gradients.variant), gradients.zero)
        shape = self.batch.documents.packed, len(self.batch.documents.boundaries)
        attention = run(("forward", shape), self._forward_piece)
        for s, kept in zip(self.saved, attention, strict=True):
            s.attention = kept
        accumulates = gradients.accumulates("head")
        if not accumulates and not self.batch.head.num_chunks and self.lora is None:
            run("zero head", self._zero_head)  # no chunk overwrites what an earlier micro-step left
        for i in range(self.batch.head.num_chunks):
            accumulate = accumulates or i > 0
            run(("head", i, accumulate), lambda i=i, accumulate=accumulate: self._head_piece(i, accumulate))
        run(("backward", shape, gradients.variant), self._backward_piece)
        self.micro_steps += 1

    def _forward_piece(self) -> list[tuple[torch.Tensor, ...]]:
        """Embedding, blocks and final norm; returns what attention keeps, a layer each."""
        residual, branch = self._forward(self._context(training=True), self.saved)
        head_begin(self.head(), self._head_context(), residual, branch, self.batch.head)
        return [s.attention for s in self.saved]

    def _head_piece(self, i: int, accumulate: bool) -> None:
        """Loss and gradients of one chunk of supervised rows."""
        dhead = self._head(self.state.gradients.full)
        head_chunk(self.head(), dhead, self._head_context(), self.saved[0]["x"], self.batch.head, i, accumulate)

    def _zero_head(self) -> None:
        lm_head = self._head(self.state.gradients.full).lm_head
        assert lm_head is not None
        lm_head.zero_()

    def _head_context(self) -> HeadContext:
        return HeadContext(self.config.rms_norm_eps, self.batch.z_loss, self.matmul, *self._shared)

    def _backward_piece(self) -> None:
        """From the head down to the embedding (LoRA: to the lowest adapter)."""
        gradients, ctx = self.state.gradients, self._context(training=True)
        shape = tuple(self.saved[0]["x"].shape)
        dy = self.scratch("dy", shape, self.dtype, 0 if self.tp.sequence else self.adapted.get("down", 0))
        self._add_statistics()
        head_end(self.head(), self._head(gradients.full), self._head_context(), dy[:, : shape[1]])
        self._release_head()
        gradients.notify("head")
        for layer in self._gathered(range(self.config.num_hidden_layers)[::-1]):
            w, g, s = self.block(layer), self._assemble(layer, gradients.take), self.saved[layer]
            until = self.lora.lowest if self.lora is not None and layer == 0 else None
            block_recompute(w, s, ctx, self.settings.recompute)
            block_dgrad(w, g, s, ctx, dy, until)
            block_wgrad(w, g, s, ctx, dy, gradients.accumulates(self._units(layer)[-1]), until)
            s.attention = ()
            for unit in self._units(layer):
                gradients.notify(unit)
            dy = s.extended("x")
        if self.lora is None:
            embed_bwd(dy, self.batch.ids, gradients.full("embedding")["embedding"], *self._shared)
            gradients.notify("embedding")
        gradients.end_micro_step()

    def _add_statistics(self) -> None:
        head, stats = self.batch.head, self._stats
        stats[:LSE_MAX] += self._sums()
        supervised = head.targets_M != IGNORED
        stats[LSE_MAX] = torch.maximum(stats[LSE_MAX], torch.where(supervised, head.lse_M, float("-inf")).max())

    def _sums(self) -> torch.Tensor:
        """What the micro-step adds to the statistics, float64 [LSE_MAX]."""
        head = self.batch.head
        supervised = head.targets_M != IGNORED
        early = supervised & (head.index_M % self.settings.seq_len < FIRST_POSITIONS)
        loss_1k = torch.where(early, head.loss_M, 0)
        values = (head.loss_M, loss_1k, head.lse_M, supervised, early)
        return torch.stack([value.sum(dtype=torch.float64) for value in values])

    # ---- update and evaluation, which wait for the device

    def update(self, *, step: int, grad_clip: float, **hyper: float) -> dict[str, float]:
        """Divide by the supervised tokens, clip by the global norm, AdamW. Statistics of the update's micro-steps, all
        ranks'; there must have been a supervised token on one of them."""
        self.optimizer.load((self.settings.seed, step, 0), grad_clip, step=step, **hyper)
        self.graphs.run(("update", self.state.gradients.reduced), self._update_piece)
        loss, loss_1k, lse_sum, tokens, tokens_1k, lse_max = self._stats.tolist()
        result = {
            "loss": loss / tokens,
            "loss_1k": loss_1k / max(tokens_1k, 1),
            "grad_norm": self.optimizer.grad_norm.item(),
            "lse_max": lse_max,
            "lse_mean": lse_sum / tokens,
            "tokens": int(tokens),
        }
        self.updates = step
        self._reset()
        return result

    def _update_piece(self) -> None:
        self.state.gradients.finish()
        sums, most = self._stats[:LSE_MAX], self._stats[LSE_MAX:]
        for work in (self.comm.all_reduce(sums), self.comm.all_reduce(most, maximum=True)):
            work.wait()
        self.optimizer.step(self._stats[TOKENS])
        self.fold()

    def fold(self) -> None:
        """The adapters have changed: bring the copies beside their base weights up to date, where those stay here."""
        resident = self.lora is not None and self.state.weights.resident
        for layer in range(self.config.num_hidden_layers if resident else 0):
            fold_block(self.block(layer))

    def params_written(self, units: tuple[Unit, ...]) -> None:
        """The parameters of `units` were written from outside: bring what depends on them up to date."""
        self.state.params_written(units)
        self.fold()

    def values_written(self) -> None:
        """The trained units were written from outside in the most digits: bring what depends on those up to date."""
        self.state.values_written()
        self.fold()

    def parts_written(self) -> None:
        """This rank's parts of the trained units were written from outside: bring what depends on them up to date."""
        self.state.parts_written()
        self.fold()

    def start_from(self, updates: int) -> None:
        """Forget the micro-steps since the last update; the next one is number updates + 1."""
        self.updates = updates
        self._reset()

    def validate(self, host: HostBatch) -> dict[str, float]:
        """Forward only, dropout off: {"loss", "loss_1k", "tokens"} over all ranks. Gradients and statistics stay
        untouched."""
        self.batch.load(host, (self.settings.seed, 0, 0), 0.0)
        ctx, head_ctx = self._context(training=False), self._head_context()
        # nothing is kept, so all layers may write one layer's buffers
        s = Saved(self.saved[0].tensors, self.saved[0].with_spare)
        residual, branch = self._forward(ctx, [s] * self.config.num_hidden_layers)
        head_begin(self.head(), head_ctx, residual, branch, self.batch.head)
        for i in range(self.batch.head.num_chunks):
            head_chunk(self.head(), None, head_ctx, s["x"], self.batch.head, i, accumulate=False)
        self._release_head()
        sums = self._sums()
        self.comm.all_reduce(sums).wait()
        loss, loss_1k, _, tokens, tokens_1k = sums.tolist()
        return {"loss": loss / max(tokens, 1), "loss_1k": loss_1k / max(tokens_1k, 1), "tokens": int(tokens)}


def fold_block(w: BlockWeights) -> None:
    """The copies of a block's adapters beside their base weights: see model/linear.fold."""
    for linear in (w.qkv, w.o, w.gate_up, w.down):
        fold(linear)


def make_matmul(settings: EngineSettings, arena: Arena) -> Matmul:
    """Products whose algorithms are chosen by timing, where that pays and the choice may differ from run to run."""
    timed = settings.trains and not settings.deterministic and settings.precision.param.itemsize == 2
    if arena.device.type != "cuda" or not timed:
        return matmul
    return fastest_matmul(arena.zeros("scratch", (WORKSPACE_BYTES,), torch.uint8))


def make_rope(config: ModelConfig, num_positions: int, arena: Arena, dtype: torch.dtype) -> Rope:
    """The rotary tables of a model for positions below `num_positions`, on the arena's device."""
    llama3 = None if config.rope_scaling is None else tuple(vars(config.rope_scaling).values())
    frequency = rope_frequencies(config.head_dim, config.rope_theta, llama3)  # type: ignore[arg-type]
    tables = []
    for values in rope_tables(frequency, num_positions):
        table = arena.zeros("rope", tuple(values.shape), dtype)
        tables.append(table.copy_(values))
    return Rope(tables[0], tables[1], config.rms_norm_eps)
