"""The object that users hold: a model in training, behind plain calls."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullstride.config import LEAST_EPS, MOST_LR, Options
from fullstride.engine import checkpoint, weights_io
from fullstride.engine.batch import HostBatch
from fullstride.engine.limits import check_documents, check_sizes
from fullstride.engine.plan import LIBRARIES
from fullstride.engine.step import Engine
from fullstride.errors import ConfigError, OutOfMemory
from fullstride.memory.arena import capacity, free_memory, shortage
from fullstride.model.spec import ModelConfig, num_parameters
from fullstride.ops.cross_entropy import IGNORED
from fullstride.trainer.remedy import remedy
from fullstride.trainer.setting import DTYPES, Setting
from fullstride.trainer.telemetry import PeakMemory, device_info

Array = np.ndarray | torch.Tensor
# z_loss: its gradient is a multiple of the logits, which may be 1e4
MOST = {"lr": MOST_LR, "z_loss": 1e6, "beta1": 1.0, "beta2": 1.0}


class Trainer:
    """Trains one model on one device, in this process.

    config: the model's sizes. options: method, LoRA, precision, memory, device, seed. A micro-step has `batch_size`
    rows of `seq_len` tokens, an update at most `grad_accum` micro-steps.

    Raises ConfigError for options and sizes that do not work here. Where memory is short, here or in a later call, it
    raises OutOfMemory, which names the segment, the missing bytes, and settings that would fit. One from `step` or
    `update`, which may have written half of their work, stops the trainer.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: Options | None = None,
        *,
        gpus: int = 1,
        batch_size: int,
        seq_len: int,
        grad_accum: int = 1,
    ) -> None:
        if not isinstance(config, ModelConfig) or not isinstance(options, Options | None):
            raise ConfigError(
                f"Trainer takes a ModelConfig and Options, got {type(config).__name__} and {type(options).__name__}; "
                "for a path: Trainer.from_pretrained"
            )
        batch_size, seq_len, grad_accum = (
            _positive(name, value)
            for name, value in (("batch_size", batch_size), ("seq_len", seq_len), ("grad_accum", grad_accum))
        )
        if gpus != 1:
            raise ConfigError(f"gpus = {gpus}: training runs on one device now; set gpus = 1")
        self.config = config
        self.options = (options or Options()).resolved()
        self.batch_size, self.seq_len, self.grad_accum, self.world_size = batch_size, seq_len, grad_accum, 1
        self._source: Path | None = None  # where the weights came from
        self._has_weights = False
        device = torch.device(self.options.device)
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
        check_sizes(config, batch_size, seq_len, self.device.type)
        self._setting = Setting(self.options, batch_size, seq_len, grad_accum)
        self._engine: Engine | None = None
        self._room = free_memory(self.device, 0)  # bytes for us, before anything is ours
        self._places: set[int] = set()  # for documents, in the micro-steps so far: each number has graphs of its own
        engine = self._setting.engine(config)
        with torch.no_grad(), self._memory():
            self._engine = Engine(config, *engine, self.device)
            if self.options.method == "lora":
                weights_io.init_adapters(self._engine, self.options.seed)
        self.peak_memory = PeakMemory(self.device)

    @classmethod
    def from_pretrained(cls, path: str | Path, options: Options | None = None, **sizes: Any) -> Trainer:
        """A trainer of the model in a Hugging Face directory, with its weights. `sizes` as in the constructor."""
        trainer = cls(ModelConfig.from_pretrained(path), options, **sizes)
        trainer.import_weights(path)
        return trainer

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Free the model. Later calls raise ConfigError; a second stop does nothing."""
        self._engine = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def engine(self) -> Engine:
        """The engine behind this trainer."""
        if self._engine is None:
            raise ConfigError("the trainer is stopped; make a new one")
        return self._engine

    # ---- weights

    @torch.no_grad()
    def import_weights(self, path: str | Path) -> None:
        """Weights of a Hugging Face directory (one or several safetensors). Raises ConfigError if they do not fit."""
        with self._memory():
            weights_io.import_weights(self.engine, path)
        self._source, self._has_weights = Path(path), True

    @torch.no_grad()
    def init_weights(self, seed: int | None = None) -> None:
        """Random weights: N(0, initializer_range), norms 1, biases 0. seed: the options' by default."""
        with self._memory():
            weights_io.init_weights(self.engine, self.options.seed if seed is None else seed)
        self._has_weights = True

    @torch.no_grad()
    def import_adapter(self, directory: str | Path) -> None:
        """Adapters of a PEFT directory with the options' rank, alpha, targets and rslora."""
        weights_io.import_adapter(self.engine, directory)

    @torch.no_grad()
    def export_model(self, directory: str | Path, dtype: str = "", overwrite: bool = False) -> None:
        """A Hugging Face directory of the model, in training's precision or `dtype` (fp32, bf16).

        Tokenizer and generation settings are copied from where the weights came from. Under LoRA this is the base.
        """
        self._check_weights()
        if dtype and dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        number = DTYPES[dtype or self.options.dtype]
        weights_io.export_model(self.engine, directory, number, self._source, overwrite)

    @torch.no_grad()
    def export_adapter(self, directory: str | Path, overwrite: bool = False) -> None:
        """A PEFT directory: adapter_config.json, adapter_model.safetensors, and the base model's tokenizer."""
        weights_io.export_adapter(self.engine, directory, self._source, overwrite)

    @torch.no_grad()
    def save_checkpoint(self, directory: str | Path, step: int, extra: dict[str, Any] | None = None) -> None:
        """The training state after update `step`, below `directory`; `extra` (JSON's types) comes back on loading.

        Raises ConfigError between step and update: accumulated gradients are not part of a checkpoint.
        """
        if self.engine.micro_steps:
            raise ConfigError("save_checkpoint between step and update would lose the gradients; call update first")
        checkpoint.save_checkpoint(self.engine, directory, step, extra or {})

    @torch.no_grad()
    def load_checkpoint(self, directory: str | Path, step: int | str = checkpoint.LATEST) -> dict[str, Any]:
        """The training state of `step` (a number or "latest"); returns what was saved as `extra`.

        Under LoRA that is the adapters' state: the base comes from import_weights.
        """
        extra = checkpoint.load_checkpoint(self.engine, directory, step)
        self._has_weights |= self.options.method == "full"  # under LoRA a checkpoint holds the adapters only
        return extra

    # ---- training

    @torch.no_grad()
    def step(self, inputs: Array, targets: Array, documents: Array | None = None, z_loss: float = 0.0) -> None:
        """One micro-step: forward and backward of int32 [batch_size, seq_len] arrays.

        targets[:, t] is what inputs[:, t] should predict, -100 = ignored. documents numbers the documents of a row: a
        run of equal numbers is one, and documents do not see each other; None means one a row. z_loss adds
        z_loss * lse ** 2 per supervised token to what is minimised. Returns when the work is issued.

        Raises ConfigError for arrays of another shape or dtype, ids outside the vocabulary, and more than grad_accum
        micro-steps without an update.
        """
        _check_values(z_loss=z_loss)
        if self.engine.micro_steps >= self.grad_accum:
            raise ConfigError(f"{self.grad_accum} micro-steps (grad_accum) are done; call update before the next step")
        batch = self._batch(inputs, targets, documents)
        with self._memory(stops=True):
            self.engine.micro_step(batch, z_loss)
        self._places.add(self._documents())

    @torch.no_grad()
    def validate(self, inputs: Array, targets: Array, documents: Array | None = None) -> dict[str, float]:
        """{"loss", "loss_1k", "tokens"} of a forward without dropout; legal at any time, changes nothing."""
        batch = self._batch(inputs, targets, documents)
        with self._memory():
            return self.engine.validate(batch)

    @torch.no_grad()
    def update(
        self,
        lr: float,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        step: int | None = None,
        weight_decay: float = 0.0,
        grad_clip: float = 0.0,
    ) -> dict[str, float]:
        """Clip by the global norm (grad_clip 0: no clip) and one AdamW update; no decay on norms and biases.

        step counts updates from 1 (None: one more than the last). Returns loss and loss_1k (over the first 1024
        positions), grad_norm before the clip, lse_max and lse_mean (log-sum-exp of the logits), and tokens: means over
        the supervised tokens of all micro-steps since the last update.

        Raises ConfigError without a step before it, or when those steps had no supervised token.
        """
        engine = self.engine
        if not engine.micro_steps:
            raise ConfigError("update needs at least one step before it")
        if not engine.tokens:
            raise ConfigError(
                "no supervised token since the last update (all targets are -100): nothing to learn from; call discard"
            )
        _check_values(lr=lr, eps=eps, weight_decay=weight_decay, grad_clip=grad_clip, beta1=beta1, beta2=beta2)
        step = engine.updates + 1 if step is None else step
        step = _positive("step", step)
        with self._memory(stops=True):
            return engine.update(
                step=step, grad_clip=grad_clip, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay
            )

    def discard(self) -> None:
        """Forget the micro-steps since the last update, as if they had not been made."""
        self.engine.start_from(self.engine.updates)

    def _batch(self, inputs: Array, targets: Array, documents: Array | None) -> HostBatch:
        self._check_weights()
        ids = self._checked("inputs", inputs)
        labels = self._checked("targets", targets)
        batch = HostBatch.of(ids, labels, None if documents is None else self._checked("documents", documents))
        vocabulary = self.config.vocab_size
        for name, values, used in (("inputs", ids, batch.ids), ("targets", labels, batch.targets)):
            if used.view(np.uint32).max(initial=0) >= vocabulary:  # negative numbers are large ones there
                legal = (values >= 0) & (values < vocabulary) | ((name == "targets") & (values == IGNORED))
                row, column = np.argwhere(~legal)[0]
                raise ConfigError(
                    f"{name}[{row}, {column}] is {values[row, column]}: token ids must be below the embedding's "
                    f"{vocabulary} rows; is this the model's tokenizer?"
                )
        check_documents(len(batch.boundaries) - 1, self.device.type)
        return batch

    def _check_weights(self) -> None:
        if not self._has_weights:
            raise ConfigError("the model has no weights yet; call import_weights or init_weights first")

    def _checked(self, name: str, array: Array) -> np.ndarray:
        expected = (self.batch_size, self.seq_len)
        if isinstance(array, torch.Tensor):
            if array.device.type != "cpu" or array.layout != torch.strided:
                got = f"{str(array.layout).removeprefix('torch.')} tensor on {array.device}"
                raise ConfigError(f"{name} must be a NumPy array or a CPU tensor, got a {got}")
            array = array.numpy() if array.dtype == torch.int32 else array  # the message below names other dtypes
        # np.memmap and other kinds of arrays hold plain numbers; a masked one does not say what its holes are
        plain = np.asarray(array) if isinstance(array, np.ndarray) and not np.ma.isMaskedArray(array) else None
        if plain is None or plain.shape != expected or plain.dtype != np.int32:
            dtype, shape = getattr(array, "dtype", ""), list(getattr(array, "shape", ()))
            got = type(array).__name__ if plain is None and not isinstance(array, torch.Tensor) else ""
            told = " ".join(filter(None, (got, str(dtype).removeprefix("torch."), str(shape) if shape else "")))
            raise ConfigError(f"{name} must be int32 {list(expected)} (batch_size, seq_len), got {told}")
        return plain

    # ---- memory

    @contextmanager
    def _memory(self, stops: bool = False) -> Iterator[None]:
        """Tells what would fit when the work inside runs out of memory; with `stops` that is the trainer's end."""
        try:
            yield
        except (OutOfMemory, torch.OutOfMemoryError) as error:
            told = f"{self._shortage(error)}; {self._remedy()}"
            if stops:
                self.stop()
            raise OutOfMemory(told) from error

    def _shortage(self, error: Exception) -> str:
        """What was missing. The arena says it itself; torch's allocator, for everything else, in words of its own."""
        asked = re.search(r"(?:Tried to allocate|Requested\s*:) ([\d.]+) (bytes|[KMGT]iB)", str(error))
        if isinstance(error, OutOfMemory) or asked is None:
            return str(error)
        unit = 1024 ** ("bytes", "KiB", "MiB", "GiB", "TiB").index(asked[2])
        held = {} if self._engine is None else self._engine.arena.segments
        return shortage(self.device, LIBRARIES, int(float(asked[1]) * unit), held)

    def _remedy(self) -> str:
        places = self._places | (set() if self._engine is None else {self._documents()})
        room = min(self._room, capacity(self.device))
        return remedy(self.config, self._setting, self.device.type, room, max(places, default=0), max(1, len(places)))

    def _documents(self) -> int:
        """Places for documents in the micro-step that was loaded last; 0: a row is one."""
        documents = self.engine.batch.documents
        return len(documents.boundaries) - 1 if documents.packed else 0

    # ---- queries

    @property
    def num_parameters(self) -> tuple[int, int]:
        """(trainable, total) numbers of parameters; a tied head counts once."""
        state = self.engine.state
        total = num_parameters(state.units)
        return (num_parameters(state.adapters) if self.options.method == "lora" else total), total

    @torch.no_grad()
    def parameters_finite(self) -> bool:
        """Whether no trained parameter is infinite or NaN. The loss of an update is measured before it, so a checkpoint
        of a finite loss may hold spoilt weights; this looks at the weights."""
        values = (trained.param for trained in self.engine.state.trained.values())
        return all(torch.isfinite(value).all() for value in values)

    def gpu_info(self) -> list[dict[str, Any]]:
        """One record a GPU: clocks, power, temperature, fan, memory, utilisation, throttling, PCIe; None on a CPU."""
        return [device_info(self.device)]

    def allocations(self, rank: int = 0) -> dict[str, dict[str, int]]:
        """{segment: {"device", "managed", "pinned", "pageable": bytes}} of one rank."""
        self._check_rank(rank)
        return self.engine.arena.allocations()

    def stack_info(self, rank: int = 0) -> dict[str, int]:
        """{name: high-water bytes} of one rank's scratch."""
        self._check_rank(rank)
        return self.engine.scratch.high_water()

    @torch.no_grad()
    def gradients(self, rank: int = 0) -> dict[str, torch.Tensor]:
        """{Hugging Face or PEFT name: CPU tensor}: gradients of the loss *sum* since the last update, for debugging.

        Raises ConfigError unless called between step and update.
        """
        self._check_rank(rank)
        engine = self.engine
        if not engine.micro_steps:
            raise ConfigError("gradients exist between step and update; call step first")
        found = {}
        for unit in engine.state.units:
            if unit.name not in engine.state.trained:
                continue
            views = engine.state.gradient(unit)
            for spec in unit.tensors:
                grad = views[spec.name]
                found |= {part.hf_name: grad[part.start : part.stop] for part in spec.parts}
        return found

    def _check_rank(self, rank: int) -> None:
        if rank != 0:
            raise ConfigError(f"rank must be below world_size 1, got {rank}")


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not 1 <= value < 2**63:
        raise ConfigError(f"{name} must be a positive integer below 2**63, got {value!r}")
    return int(value)


def _check_values(**values: float) -> None:
    """Raise ConfigError for a value that would spoil the weights: eps 0 (in float32), for one, divides 0 by 0."""
    for name, value in values.items():
        if not isinstance(value, int | float | np.number):
            raise ConfigError(f"{name} must be a number, got {value!r}")
        least, most = LEAST_EPS if name == "eps" else 0.0, MOST.get(name, sys.float_info.max)
        if not (least <= value <= most) or (name.startswith("beta") and value == 1):
            rule = f"be at least {least} and finite" if name == "eps" else f"lie in [0, {MOST.get(name, math.inf)}"
            end = "" if name == "eps" else "]" if name in ("lr", "z_loss") else ")"
            raise ConfigError(f"{name} must {rule}{end}, got {value}")
