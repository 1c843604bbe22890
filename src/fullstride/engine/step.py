"""The training step: micro-steps -> reduce -> clip -> update. This is the page to read first.

    engine.micro_step(batch)     forward and backward; gradients of the loss *sum* add up in the gradient manager
    engine.update(...)           global norm, one factor (1 / tokens, clip), AdamW

Inside a micro-step nothing waits for the device, every shape is static, and what changes from one to the next (tokens,
documents, seeds, z-loss) lives in device tensors, so that it can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fullstride.engine.batch import DeviceBatch, HostBatch
from fullstride.engine.optimizer import Optimizer
from fullstride.engine.state import Precision, State
from fullstride.memory.arena import Arena, Scratch
from fullstride.memory.saved import Saved, SavedTensor, allocate_saved
from fullstride.model.block import (
    BlockContext,
    BlockWeights,
    block_dgrad,
    block_fwd,
    block_recompute,
    block_weights,
    block_wgrad,
    saved_table,
)
from fullstride.model.head import HeadContext, HeadWeights, head_fwd_bwd, head_loss
from fullstride.model.linear import LinearContext
from fullstride.model.lora import LINEARS, LoraSettings, adapters_of
from fullstride.model.spec import ModelConfig
from fullstride.ops.attention import attention_fwd
from fullstride.ops.cross_entropy import IGNORED
from fullstride.ops.embedding import embedding_bwd, embedding_fwd
from fullstride.ops.rope import Rope, rope_frequencies, rope_tables

GetUnit = Callable[[str], dict[str, torch.Tensor]]  # the tensors of a unit, or their gradients, by name

LOSS, LOSS_1K, LSE_SUM, LSE_MAX = range(4)  # elements of the statistics tensor


@dataclass(frozen=True)
class EngineSettings:
    """Sizes and switches of one engine. rows x seq_len tokens a micro-step; head_chunks pieces of the LM head."""

    rows: int
    seq_len: int
    precision: Precision
    head_chunks: int
    recompute: frozenset[str] = frozenset()
    deterministic: bool = False
    seed: int = 42
    trains: bool = True  # False: no gradients, moments or saved activations, for generation


class Engine:
    """One device's model, and the step over it."""

    def __init__(
        self, config: ModelConfig, lora: LoraSettings | None, settings: EngineSettings, device: torch.device
    ) -> None:
        self.config, self.lora, self.settings, self.device = config, lora, settings, device
        self.arena = Arena(device)
        self.scratch = Scratch(self.arena)
        dtype = settings.precision.param
        self.dtype, stats = dtype, torch.float64 if dtype == torch.float64 else torch.float32
        self.state = State(config, lora, settings.precision, self.arena, settings.trains)
        self.optimizer = Optimizer(self.state.trained.values(), self.arena)
        self.batch = DeviceBatch(
            self.arena, settings.rows, settings.seq_len, settings.head_chunks, stats, settings.deterministic
        )
        num_tokens = settings.rows * settings.seq_len
        rows = saved_table(config, self._adapter_ranks())
        self.saved_table = tuple(SavedTensor(n, c, frozenset(flags), wide) for n, c, flags, wide in rows)
        num_saved = config.num_hidden_layers if settings.trains else 0
        self.saved = allocate_saved(self.saved_table, num_saved, num_tokens, settings.recompute, self.arena, dtype)
        self.rope = make_rope(config, settings.seq_len, self.arena, stats)
        self._rng = self.arena.zeros("batch", (3,), torch.int64)
        self._z_loss = self.arena.zeros("batch", (1,), stats)
        self._stats = self.arena.zeros("batch", (4,), torch.float64)
        self.updates = 0  # updates done, which with the micro-step's number keys the noise
        self.micro_steps = self._tokens = self._tokens_1k = 0
        self._reset()

    def _adapter_ranks(self) -> dict[str, int]:
        if self.lora is None:
            return {}
        return {name: len(self.lora.adapted(name)) * self.lora.rank for name in LINEARS if self.lora.adapted(name)}

    def _reset(self) -> None:
        self.micro_steps = self._tokens = self._tokens_1k = 0
        self._stats.zero_()
        self._stats[LSE_MAX] = float("-inf")

    # ---- weights of one unit, brought here and named

    def block(self, layer: int) -> BlockWeights:
        """The weights of one block, with its adapters."""
        return self._assemble(layer, self.state.weights.get)

    def _assemble(self, layer: int, get: GetUnit) -> BlockWeights:
        adapters = {}
        if self.lora is not None:
            adapters = adapters_of(get(f"blocks.{layer}.adapter"), self.config, self.lora, layer)
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
        documents = self.batch.documents
        return BlockContext(
            self.config,
            LinearContext(self.scratch, self._rng, training),
            self.rope,
            self.batch.positions,
            documents,
            lambda q, k, v: attention_fwd(q, k, v, documents),
        )

    def _forward(self, ctx: BlockContext, saved: list[Saved]) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.state.weights
        x = saved[0]["x"]
        embedding_fwd(weights.get("embedding")["embedding"], self.batch.ids, x)
        residual, branch = x, None
        drops_attention = not ctx.linear.training or self.settings.recompute & {"att", "block"}
        for layer, s in enumerate(saved):
            weights.gather(f"blocks.{layer + 1}")
            residual, branch = block_fwd(self.block(layer), s, ctx, residual, branch)
            if drops_attention:
                s.attention = ()
            weights.release(f"blocks.{layer}")
        assert branch is not None
        return residual, branch

    def micro_step(self, host: HostBatch, z_loss: float) -> None:
        """Forward and backward of one micro-batch; gradients add up until `update`."""
        self.batch.load(host)
        self._z_loss.fill_(z_loss)
        self._set_rng(self.updates + 1, self.micro_steps)
        gradients = self.state.gradients
        gradients.start_micro_step(first=self.micro_steps == 0)
        ctx = self._context(training=True)
        residual, branch = self._forward(ctx, self.saved)
        dy, dx = (self.scratch(name, tuple(residual.shape), self.dtype) for name in ("dx_even", "dx_odd"))
        head, head_ctx = self.head(), HeadContext(self.config.rms_norm_eps, self._z_loss, self.scratch)
        dhead = self._head(gradients.full)
        head_fwd_bwd(head, dhead, head_ctx, residual, branch, self.batch.head, dy, gradients.accumulate)
        gradients.notify("head")
        self._add_statistics()
        self._backward(ctx, dy, dx)
        gradients.end_micro_step()
        self.micro_steps += 1
        self._tokens += host.tokens
        self._tokens_1k += host.tokens_1k

    def _backward(self, ctx: BlockContext, dy: torch.Tensor, dx: torch.Tensor) -> None:
        """From dy, the gradient of the last block's output, down to the embedding (LoRA: to the lowest adapter)."""
        weights, gradients = self.state.weights, self.state.gradients
        for layer in reversed(range(self.config.num_hidden_layers)):
            weights.gather(f"blocks.{layer - 1}")
            w, g, s = self.block(layer), self._assemble(layer, gradients.full), self.saved[layer]
            until = self.lora.lowest if self.lora is not None and layer == 0 else None
            block_recompute(w, s, ctx, self.settings.recompute)
            block_dgrad(w, g, s, ctx, dy, dx, until)
            block_wgrad(w, g, s, ctx, dy, gradients.accumulate, until)
            s.attention = ()
            gradients.notify(f"blocks.{layer}")
            weights.release(f"blocks.{layer}")
            dy, dx = dx, dy
        if self.lora is None:
            embedding_bwd(dy, self.batch.ids, gradients.full("embedding")["embedding"])
            gradients.notify("embedding")

    def _add_statistics(self) -> None:
        head, stats = self.batch.head, self._stats
        supervised = head.targets_M != IGNORED
        stats[LOSS] += head.loss_M.sum(dtype=torch.float64)
        stats[LOSS_1K] += torch.where(self.batch.first_1k, head.loss_M, 0).sum(dtype=torch.float64)
        stats[LSE_SUM] += head.lse_M.sum(dtype=torch.float64)
        stats[LSE_MAX] = torch.maximum(stats[LSE_MAX], torch.where(supervised, head.lse_M, float("-inf")).max())

    def _set_rng(self, step: int, micro_step: int) -> None:
        for i, value in enumerate((self.settings.seed, step, micro_step)):
            self._rng[i].fill_(value)

    # ---- update and evaluation, which wait for the device

    def update(self, *, step: int, grad_clip: float, **hyper: float) -> dict[str, float]:
        """Divide by the supervised tokens, clip by the global norm, AdamW. Statistics of the update's micro-steps."""
        self._set_rng(step, 0)
        self.optimizer.step(self._tokens, grad_clip, self._rng, step=step, **hyper)
        loss, loss_1k, lse_sum, lse_max = self._stats.tolist()
        result = {
            "loss": loss / self._tokens,
            "loss_1k": loss_1k / max(self._tokens_1k, 1),
            "grad_norm": self.optimizer.grad_norm.item(),
            "lse_max": lse_max,
            "lse_mean": lse_sum / self._tokens,
            "tokens": self._tokens,
        }
        self.updates = step
        self._reset()
        return result

    def start_from(self, updates: int) -> None:
        """Forget the micro-steps since the last update; the next one is number updates + 1."""
        self.updates = updates
        self._reset()

    @property
    def tokens(self) -> int:
        """Supervised tokens since the last update."""
        return self._tokens

    def validate(self, host: HostBatch) -> dict[str, float]:
        """Forward only, dropout off: {"loss", "loss_1k", "tokens"}. Gradients and statistics stay untouched."""
        self.batch.load(host)
        ctx = self._context(training=False)
        # nothing is kept, so all layers may write one layer's buffers
        residual, branch = self._forward(ctx, [self.saved[0]] * self.config.num_hidden_layers)
        head_ctx = HeadContext(self.config.rms_norm_eps, self._z_loss, self.scratch)
        head_loss(self.head(), head_ctx, residual, branch, self.batch.head)
        loss_M = self.batch.head.loss_M
        sums = torch.stack([loss_M.sum(dtype=torch.float64), torch.where(self.batch.first_1k, loss_M, 0).sum()])
        loss, loss_1k = sums.tolist()
        return {
            "loss": loss / max(host.tokens, 1),
            "loss_1k": loss_1k / max(host.tokens_1k, 1),
            "tokens": host.tokens,
        }


def make_rope(config: ModelConfig, num_positions: int, arena: Arena, dtype: torch.dtype) -> Rope:
    """The rotary tables of a model for positions below `num_positions`, on the arena's device."""
    llama3 = None if config.rope_scaling is None else tuple(vars(config.rope_scaling).values())
    frequency = rope_frequencies(config.head_dim, config.rope_theta, llama3)  # type: ignore[arg-type]
    tables = []
    for values in rope_tables(frequency, num_positions):
        table = arena.zeros("rope", tuple(values.shape), dtype)
        tables.append(table.copy_(values))
    return Rope(tables[0], tables[1], config.rms_norm_eps)
