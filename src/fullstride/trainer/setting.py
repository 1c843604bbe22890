"""What the Trainer's arguments mean for the engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullstride.config import Options
from fullstride.engine.state import Precision, Sharing
from fullstride.engine.step import EngineSettings
from fullstride.errors import ConfigError
from fullstride.model.lora import LoraSettings
from fullstride.model.spec import ModelConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# automatic head_chunks: logits never exist for all rows, and one chunk's stay under this many bytes
LEAST_CHUNKS, LOGITS_BYTES = 4, 1.25e9


@dataclass(frozen=True)
class Setting:
    """What decides over a run's memory: resolved options, and the sizes of micro-step and update."""

    options: Options
    batch_size: int
    seq_len: int
    grad_accum: int

    @property
    def microbatches(self) -> int:
        """Of a micro-step: what a pipeline takes one after another."""
        return (self.options.microbatches or self.batch_size) if self.options.pp > 1 else 1

    @property
    def rows(self) -> int:
        """Rows of a micro-batch. Raises ConfigError where they are no whole number."""
        if self.batch_size % self.microbatches:
            nearest = max(n for n in range(1, self.microbatches) if self.batch_size % n == 0)
            raise ConfigError(
                f"batch-size {self.batch_size} does not divide into {self.microbatches} micro-batches; "
                f"set microbatches to {nearest}"
            )
        return self.batch_size // self.microbatches

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.rows * self.seq_len

    def engine(self, config: ModelConfig) -> tuple[LoraSettings | None, EngineSettings]:
        """The engine's arguments. Raises ConfigError for more head_chunks than tokens."""
        o = self.options
        param, master = DTYPES[o.dtype], DTYPES[o.master_dtype]
        precision = Precision(
            param,
            None if master == param else master,
            DTYPES[o.m_dtype],
            DTYPES[o.v_dtype],
            DTYPES[o.grad_dtype or o.dtype],
        )
        chunks = self.head_chunks(config)
        if chunks > self.tokens:
            raise ConfigError(
                f"head-chunks {chunks} exceeds the {self.tokens} tokens of a micro-step; set at most {self.tokens}"
            )
        lora = None
        if o.method == "lora":
            lora = LoraSettings(o.lora_rank, o.lora_alpha, o.lora_dropout, o.lora_targets, o.rslora)
        switches = {"deterministic": o.deterministic, "seed": o.seed, "graphs": o.graphs}
        return lora, EngineSettings(
            self.rows,
            self.seq_len,
            precision,
            chunks,
            frozenset(o.recompute),
            pp=o.pp,
            tp=o.tp,
            microbatches=self.microbatches,
            schedule=o.pp_schedule,
            chunks=max(1, o.pp_chunks),
            grad_accum=self.grad_accum,
            sharing=Sharing(
                o.zero, o.grad_reduce == "all-to-all", o.gather_by == "copy", o.send_by == "copy", "grads" in o.offload
            ),
            flash4=o.attention == "flash4",
            **switches,
        )

    def head_chunks(self, config: ModelConfig) -> int:
        """What the options say, or automatic: the smallest power of two of chunks, four at least, whose logits fit
        LOGITS_BYTES (at most one chunk a token)."""
        if self.options.head_chunks:
            return self.options.head_chunks
        row_bytes = config.vocab_size * DTYPES[self.options.dtype].itemsize
        chunks = LEAST_CHUNKS
        while chunks < self.tokens and -(-self.tokens // chunks) * row_bytes > LOGITS_BYTES:
            chunks *= 2
        return min(chunks, self.tokens)

    def flags(self, before: Setting) -> str:
        """The keys in which this differs from `before`, as the command line takes them."""
        o, old = self.options, before.options
        pairs = (
            ("method", o.method, old.method),
            ("batch-size", self.batch_size, before.batch_size),
            ("grad-accum", self.grad_accum, before.grad_accum),
            ("head-chunks", o.head_chunks, old.head_chunks),
            ("recompute", ",".join(o.recompute), ",".join(old.recompute)),
            ("zero", o.zero, old.zero),
            ("offload", ",".join(o.offload) or "''", ",".join(old.offload) or "''"),
            ("seq-len", self.seq_len, before.seq_len),
        )
        return " ".join(f"--{name} {value}" for name, value, was in pairs if value != was)
