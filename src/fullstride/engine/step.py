"""The training step: micro-steps -> reduce -> clip -> update. This is the page to read first.

    engine.micro_step(batches)   forward and backward; gradients of the loss *sum* add up in the gradient manager
    engine.update(...)           global norm, one factor (1 / tokens, clip), AdamW

A micro-step is one micro-batch, or in a pipeline several; what this rank does with them is in engine/stage, in which
order in parallel/schedule. Inside a micro-step nothing waits for the device, every shape is static, and what changes
from one to the next (tokens, documents, seeds, z-loss) lives in device tensors, so that it can be captured as a CUDA
graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fullstride.engine.batch import DeviceBatch, HostBatch
from fullstride.engine.graphs import Graphs
from fullstride.engine.optimizer import Optimizer
from fullstride.engine.pipeline_plan import Work, deal_layers
from fullstride.engine.split import tensor_parallel
from fullstride.engine.stage import LSE_MAX, TOKENS, Slot, Stage, Tools, fold_block
from fullstride.engine.state import Precision, Sharing, State
from fullstride.memory.arena import Arena, Scratch
from fullstride.memory.saved import SavedBuffers, SavedTensor
from fullstride.model.block import saved_table
from fullstride.model.flops import lora_parameters
from fullstride.model.lora import LoraSettings, adapter_columns
from fullstride.model.spec import ModelConfig, Unit
from fullstride.model.tensor_parallel import split_config, vocabulary_of
from fullstride.ops.attention import Documents
from fullstride.ops.matmul import WORKSPACE_BYTES, Matmul, fastest_matmul, matmul
from fullstride.ops.rope import Rope, rope_frequencies, rope_tables
from fullstride.parallel.comm import Communicator
from fullstride.parallel.mesh import Mesh
from fullstride.parallel.pipeline import Pipeline
from fullstride.parallel.schedule import Action, forward_only, make_schedule, peak_live


@dataclass(frozen=True)
class EngineSettings:
    """Sizes and switches of one engine. rows x seq_len tokens a micro-batch and data-parallel rank; `microbatches` of
    them a micro-step; at most grad_accum micro-steps an update; head_chunks pieces of the LM head."""

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
    pp: int = 1  # pipeline stages' ranks
    tp: int = 1  # ranks that share out every layer
    sequence_parallel: bool = True  # where tp does: the rows of the residual stream too, if they divide
    microbatches: int = 1
    schedule: str = "1f1b"  # of pipelines (parallel/schedule)
    chunks: int = 1  # stages a rank, in an interleaved pipeline

    @property
    def window(self) -> int:
        """Micro-batches of a full update."""
        return self.grad_accum * self.microbatches


class Supplied(NamedTuple):
    """A micro-batch of the current update, with its noise key (ops/dropout)."""

    host: HostBatch
    rng: tuple[int, int, int, int]
    z_loss: float


class Engine:
    """One rank's part of the model, and the step over it; `mesh` connects it to the others."""

    def __init__(
        self,
        config: ModelConfig,
        lora: LoraSettings | None,
        settings: EngineSettings,
        device: torch.device,
        comm: Communicator | None = None,
    ) -> None:
        """comm: all ranks. A collective of theirs. Raises ConfigError where pp or tp does not divide the model."""
        self.config, self.lora, self.settings, self.device = config, lora, settings, device
        self.mesh = Mesh(comm, settings.pp, settings.tp, wraps=settings.chunks > 1)
        self.comm = self.mesh.world
        rows_divide = settings.rows * settings.seq_len % settings.tp == 0
        sequence = settings.tp > 1 and settings.sequence_parallel and rows_divide
        self.share, tp = split_config(config, settings.tp), tensor_parallel(self.mesh.tp, sequence)
        self.arena = Arena(device)
        scratch = Scratch(self.arena, grows=False)
        self.dtype = dtype = settings.precision.param
        stats = torch.float64 if dtype == torch.float64 else torch.float32
        adapted = {} if lora is None else adapter_columns(lora)
        self.layers = split_stages(config, lora, settings)
        self.schedule = make_schedule(settings.schedule, self.mesh.pp.size, settings.window, settings.chunks)
        held = [self.layers[number] for number in self.schedule.stages(self.mesh.pp.rank)]
        noise = self.arena.zeros("batch", (3,), torch.int64)
        shared = {"trains": settings.trains, "sharing": settings.sharing, "comm": self.mesh.dp, "held": held}
        shared |= {"tp": self.mesh.tp, "sequence": sequence}
        self.state = State(config, lora, settings.precision, self.arena, noise, **shared)
        self.optimizer = Optimizer(self.state, self.mesh, self.arena)
        self.saved_table = tuple(SavedTensor(*row) for row in saved_table(self.share, adapted, tp.row_shares))
        if lora is not None and lora.dropout and settings.trains:  # one buffer for linears of all widths
            widest = max(config.hidden_size, self.share.q_size, self.share.intermediate_size)
            scratch("dropped", (settings.rows * settings.seq_len, widest), dtype)
        self.graphs = Graphs(settings.graphs and device.type == "cuda")
        self.tools = Tools(
            self.share,
            tp,
            vocabulary_of(config.vocab_size, tp),
            lora,
            adapted,
            self.state,
            make_rope(config, settings.seq_len, self.arena, stats),
            make_matmul(settings, self.arena),
            scratch,
            self.graphs,
            settings.recompute,
            stats=self.arena.zeros("batch", (LSE_MAX + 1,), torch.float64),
            noise=noise,
        )
        self.documents = Documents(noise, settings.rows, settings.seq_len, packed=False)  # of the newest micro-batch
        self.stages: dict[int, Stage] = {}
        if settings.trains:
            self._make_stages(stats)
        # not a cycle: an engine that is dropped must give its memory back at once, not when garbage is collected
        self.pipeline = Pipeline(self.schedule, self.mesh, weakref.proxy(self))
        self.updates = 0  # updates done, which with the micro-step's number keys the noise
        self.trained = False  # by an update of this engine whose rate was not zero
        self._reset()

    def _make_stages(self, stats: torch.dtype) -> None:
        s = self.settings
        attention = {"deterministic": s.deterministic, "flash4": s.flash4}

        def make_batch() -> DeviceBatch:
            return DeviceBatch(self.arena, s.rows, s.seq_len, s.head_chunks, stats, **attention)

        buffers = SavedBuffers(self.saved_table, s.rows * s.seq_len, s.recompute, self.arena, self.dtype)
        for number, slots in peak_live(self.schedule, self.mesh.pp.rank).items():
            self.stages[number] = Stage(self.tools, self.layers[number], slots, make_batch, buffers, self.arena)

    def holder(self, unit: str) -> int:
        """The first rank of `mesh.pp` that holds a unit."""
        top = self.config.num_hidden_layers - 1
        layer = {"embedding": 0, "head": top}.get(unit) if "." not in unit else int(unit.split(".")[1])
        return self.schedule.rank_of(next(i for i, layers in enumerate(self.layers) if layer in layers))

    def _reset(self) -> None:
        self.micro_steps = 0
        self._supplied: list[Supplied] = []
        self._keyed = False
        self.pipeline.restart()
        self.tools.stats.zero_()
        self.tools.stats[LSE_MAX].fill_(float("-inf"))

    # ---- forward and backward

    def micro_step(self, batches: Sequence[HostBatch], z_loss: float) -> None:
        """Forward and backward of one micro-step's micro-batches, which are `settings.microbatches`; gradients add up
        until `update`. In a pipeline what would wait for later micro-batches is done with them, or by `update`."""
        s = self.settings
        assert len(batches) == s.microbatches
        assert self.micro_steps < s.grad_accum, "call update first"
        self._supply(batches, z_loss, self.updates + 1, self.micro_steps)
        self.micro_steps += 1
        self.pipeline.run(len(self._supplied))

    def _supply(self, batches: Sequence[HostBatch], z_loss: float, step: int, micro_step: int) -> None:
        tokens = self.settings.rows * self.settings.seq_len
        first = self.mesh.dp.rank * len(batches)
        for i, host in enumerate(batches):
            key = self.settings.seed, step, micro_step, (first + i) * tokens
            self._supplied.append(Supplied(host, key, z_loss))

    def slot(self, stage: int, microbatch: int) -> Slot:
        """Where a micro-batch is in one of this rank's stages."""
        slots = self.stages[stage].slots
        return slots[microbatch % len(slots)]

    def act(self, action: Action) -> None:
        """One of this rank's actions; what it receives is there."""
        stage, slot = self.stages[action.stage], self.slot(action.stage, action.microbatch)
        first, last = action.microbatch == 0, action.microbatch + 1 == self.settings.window
        if action.kind == "F":
            slot.batch.load(*self._supplied[action.microbatch])
            self.documents = slot.batch.documents
            self._key_noise(slot)
            stage.forward(slot)
        elif action.kind == "B":
            stage.backward(slot, first, last, weights_later=self.schedule.splits_backward)
        else:
            stage.backward_weights(slot, first, last)

    def _key_noise(self, slot: Slot) -> None:
        """The noise of gradients' sums: by the update's first micro-batch, and then counted on."""
        if not self._keyed:
            self._keyed = True
            self.tools.noise.copy_(slot.batch.rng[:3])

    # ---- update and evaluation, which wait for the device

    def update(self, *, step: int, grad_clip: float, **hyper: float) -> dict[str, float]:
        """Divide by the supervised tokens, clip by the global norm, AdamW. Statistics of the update's micro-steps, all
        ranks'; there must have been a supervised token on one of them."""
        self.pipeline.drain(len(self._supplied))
        self.optimizer.load((self.settings.seed, step, 0), grad_clip, step=step, **hyper)
        self.graphs.run(("update", self.state.gradients.reduced), self._update_piece)
        loss, loss_1k, lse_sum, tokens, tokens_1k, lse_max = self.tools.stats.tolist()
        result = {
            "loss": loss / tokens,
            "loss_1k": loss_1k / max(tokens_1k, 1),
            "grad_norm": self.optimizer.grad_norm.item(),
            "lse_max": lse_max,
            "lse_mean": lse_sum / tokens,
            "tokens": int(tokens),
        }
        self.updates, self.trained = step, self.trained or hyper["lr"] > 0
        self._reset()
        return result

    def _update_piece(self) -> None:
        self.state.gradients.finish()
        sums, most = self.tools.stats[:LSE_MAX], self.tools.stats[LSE_MAX:]
        for work in (self.comm.all_reduce(sums), self.comm.all_reduce(most, maximum=True)):
            work.wait()
        self.optimizer.step(self.tools.stats[TOKENS])
        self.fold()

    def fold(self) -> None:
        """The adapters have changed: bring the copies beside their base weights up to date, where those stay here."""
        if self.lora is not None and self.state.weights.resident:
            for layer in self.state.layers:
                fold_block(self.tools.block(layer))

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
        self.pipeline.drain(len(self._supplied))  # what other ranks have sent
        self.updates = updates
        self._reset()

    def validate(self, batches: Sequence[HostBatch]) -> dict[str, float]:
        """Forward only, dropout off: {"loss", "loss_1k", "tokens"} over all ranks. Gradients and statistics stay
        untouched."""
        self.pipeline.drain(len(self._supplied))  # which frees the slots
        evaluation = Evaluation(self, batches)
        schedule = forward_only(self.mesh.pp.size, len(batches), self.settings.chunks)
        Pipeline(schedule, self.mesh, evaluation).drain(len(batches))
        self.comm.all_reduce(evaluation.sums).wait()
        loss, loss_1k, _, tokens, tokens_1k = evaluation.sums.tolist()
        return {"loss": loss / max(tokens, 1), "loss_1k": loss_1k / max(tokens_1k, 1), "tokens": int(tokens)}


class Evaluation:
    """Forward passes only, through the first slot of every stage."""

    def __init__(self, engine: Engine, batches: Sequence[HostBatch]) -> None:
        self._engine, self._batches = engine, batches
        self.sums = torch.zeros(LSE_MAX, dtype=torch.float64, device=engine.device)

    def slot(self, stage: int, microbatch: int) -> Slot:
        return self._engine.stages[stage].slots[0]

    def act(self, action: Action) -> None:
        slot = self.slot(action.stage, action.microbatch)
        slot.batch.load(self._batches[action.microbatch], (self._engine.settings.seed, 0, 0, 0), 0.0)
        self._engine.documents = slot.batch.documents
        sums = self._engine.stages[action.stage].evaluate(slot)
        if sums is not None:
            self.sums += sums


def split_stages(config: ModelConfig, lora: LoraSettings | None, settings: EngineSettings) -> list[range]:
    """The layers of every stage, balanced by their FLOPs in rows that are one document."""
    tokens = settings.rows * settings.seq_len
    adapters = None if lora is None else lora_parameters(config, lora.rank, lora.targets)
    work = Work(config, adapters, tokens, tokens * settings.seq_len)
    return deal_layers(work, settings.pp, settings.chunks)


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
