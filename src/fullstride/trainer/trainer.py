"""The object that users hold: a model in training, behind plain calls."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullstride.config import Options, resolve_device
from fullstride.config.rules import check_rules
from fullstride.engine import checkpoint
from fullstride.engine.limits import check_documents, check_sizes
from fullstride.engine.step import Engine, split_stages
from fullstride.errors import ConfigError, OutOfMemory
from fullstride.model.lora import adapter_unit
from fullstride.model.spec import ModelConfig, num_parameters, parameter_table
from fullstride.model.tensor_parallel import split_config
from fullstride.ops.cross_entropy import IGNORED
from fullstride.trainer.arguments import Array, Batch, check_ids, check_values, place, plain, whole
from fullstride.trainer.profiling import ProfileRow
from fullstride.trainer.ranks import find_ranks, leads
from fullstride.trainer.setting import DTYPES, Setting
from fullstride.trainer.team import make_team


class Trainer:
    """Trains one model on `gpus` devices, driven from this thread. With device = cpu, `gpus` counts CPU workers.

    config: the model's sizes. options: method, LoRA, precision, memory, device, seed. gpus: 0 is all there are. A
    micro-step has `batch_size` rows of `seq_len` tokens for each of the `dp` data-parallel ranks, an update at most
    `grad_accum` micro-steps. One rank lives in this process, and its crash is this process's; several have processes of
    their own, ended by `stop` and by the end of this one. Under torchrun this is one rank, and all processes make the
    same calls.

    Raises ConfigError for options and sizes that do not work here, and for arguments of calls; those leave the trainer
    as it was. Where memory is short, here or in a later call, it raises OutOfMemory, which names the segment, the
    missing bytes, and settings that would fit. One from `step` or `update`, which may have written half of their work,
    stops the trainer, and so does Ctrl-C in any call. With several ranks, whatever else goes wrong in one of them stops
    all, and raises WorkerError (or OutOfMemory) with the rank and its traceback, or the signal that killed it.
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
            whole(name, value, 1)
            for name, value in (("batch_size", batch_size), ("seq_len", seq_len), ("grad_accum", grad_accum))
        )
        self.config = config
        options = options or Options()
        self.world_size, self.device = find_ranks(gpus, resolve_device(options.device))
        check_rules(options, self.world_size)
        self.options = dataclasses.replace(options, dp=self.world_size // (options.pp * options.tp)).resolved()
        self.batch_size, self.seq_len, self.grad_accum = batch_size, seq_len, grad_accum
        self._source: Path | None = None  # where the weights came from
        self._saving: Path | None = None  # the checkpoint that is written in the background
        self._has_weights = False
        self._updates = self._micro_steps = 0  # done; since the last update
        self._supervised = False  # whether there was such a token, of any rank, since the last update
        check_sizes(config, batch_size, seq_len, self.device.type)
        self._setting = setting = Setting(self.options, batch_size, seq_len, grad_accum)
        self._lora, settings = setting.engine(config)  # raises what is wrong with it here
        split_stages(config, self._lora, settings)  # and these too
        split_config(config, settings.tp)
        self._team = make_team(config, setting, self.world_size, self.device)
        weakref.finalize(self, self._team.end)  # when it is dropped without `stop`

    @classmethod
    def from_pretrained(cls, path: str | Path, options: Options | None = None, **sizes: Any) -> Trainer:
        """A trainer of the model in a Hugging Face directory, with its weights. `sizes` as in the constructor."""
        trainer = cls(ModelConfig.from_pretrained(place("path", path)), options, **sizes)
        trainer.import_weights(path)
        return trainer

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._team.abandon(error)
        self.stop()

    def stop(self) -> None:
        """End the workers and free the model. Later calls raise ConfigError; a second stop does nothing.

        A checkpoint that is being written is finished first; OSError tells that it could not be.
        """
        try:
            self._team.end()
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    @property
    def engine(self) -> Engine:
        """The engine of the rank in this process; there is none where ranks have processes of their own."""
        self._check_running()
        engine = self._team.worker.engine
        assert engine is not None
        return engine

    def agree(self, value: Any) -> list[Any]:
        """Under torchrun the (pickled) `value` of every process, on each of them, which all make this call; else
        [value]."""
        return self._team.agree(value)

    @property
    def leads(self) -> bool:
        """Whether this process is the one that prints and writes for all: under torchrun the first, else the only
        one."""
        return leads()

    def _call(self, command: str, *args: Any, rank: int | None = None) -> list[Any]:
        """The answers of all ranks, or of one."""
        return self._team.call(command, *args, rank=rank)

    def _write(self, target: Path, command: str, *args: Any) -> None:
        """What all ranks write as the directory `target`, or hand over to the first one, which speaks for them."""
        self._check_running()
        self._team.unfinished.add(target)  # where it is left, the team's end finds nothing, or what was cut short
        self._team.call(command, *args, writes=True)
        self._team.unfinished.discard(target)

    def _check_running(self) -> None:
        self._team.check_running()

    # ---- weights

    def import_weights(self, path: str | Path, tokenizer: str | Path | None = None) -> None:
        """Weights of a Hugging Face directory (one or several safetensors). Raises ConfigError if they do not fit.

        tokenizer: the directory whose tokenizer and generation settings exports copy; None: `path`.
        """
        source = place("path", path)
        copied = source if tokenizer is None else place("tokenizer", tokenizer)
        self._call("import_weights", source)
        self.discard()  # gradients of other weights
        self._source, self._has_weights = copied, True

    def init_weights(self, seed: int | None = None, tokenizer: str | Path | None = None) -> None:
        """Random weights: N(0, initializer_range), norms 1, biases 0. seed: the options' by default. tokenizer: a
        directory whose tokenizer and generation settings exports copy."""
        source = None if tokenizer is None else place("tokenizer", tokenizer)
        self._call("init_weights", self.options.seed if seed is None else whole("seed", seed))
        self.discard()
        self._source, self._has_weights = source, True

    def import_adapter(self, directory: str | Path) -> None:
        """Adapters of a PEFT directory with the options' rank, alpha, targets and rslora."""
        self._call("import_adapter", place("directory", directory))
        self.discard()

    def export_model(self, directory: str | Path, dtype: str = "", overwrite: bool = False) -> None:
        """A Hugging Face directory of the model, in training's precision or `dtype` (fp32, bf16).

        Tokenizer and generation settings are copied from where the weights came from. Under LoRA this is the base.
        """
        self._check_weights()
        if dtype and dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        target = place("directory", directory)
        self._write(target, "export_model", target, dtype or self.options.dtype, self._source, overwrite)

    def export_adapter(self, directory: str | Path, overwrite: bool = False) -> None:
        """A PEFT directory: adapter_config.json, adapter_model.safetensors, and the base model's tokenizer."""
        target = place("directory", directory)
        self._write(target, "export_adapter", target, self._source, overwrite)

    def save_checkpoint(self, directory: str | Path, step: int, extra: dict[str, Any] | None = None) -> None:
        """The training state after update `step`, below `directory`; `extra` (JSON's types) comes back on loading.

        With the option async_save this returns when every rank has copied its part to host memory, and threads write;
        until that is done, `latest` in `directory` names the checkpoint before. See `finish_saving`.

        Raises ConfigError between step and update: accumulated gradients are not part of a checkpoint; and OSError when
        it cannot be written, for any rank.
        """
        plain_extra = checkpoint.plain_extra({} if extra is None else extra)
        step = whole("step", step, bits=checkpoint.STEP_BITS)
        within = place("directory", directory)
        self._check_running()
        if self._micro_steps:
            raise ConfigError("save_checkpoint between step and update would lose the gradients; call update first")
        target = within / checkpoint.checkpoint_name(step)
        self.finish_saving()
        self._write(target, "save_checkpoint", within, step, plain_extra)
        if self.options.async_save:
            self._saving, self._team.saving = target, True
            self._team.unfinished.add(target)

    def finish_saving(self) -> None:
        """Return when the checkpoint that is being written, if any, is whole; OSError tells why it could not be.

        The next save, a load and `stop` do the same first.
        """
        if self._saving is not None:
            target, self._saving, self._team.saving = self._saving, None, False
            self._write(target, "finish_saving")

    def load_checkpoint(self, directory: str | Path, step: int | str = checkpoint.LATEST) -> dict[str, Any]:
        """The training state of `step` (a number or "latest"); returns what was saved as `extra`.

        Under LoRA that is the adapters' state: the base comes from import_weights.
        """
        if not isinstance(step, str) or step != checkpoint.LATEST:
            step = whole(f'step must be "{checkpoint.LATEST}" or a number, which', step, bits=checkpoint.STEP_BITS)
        within = place("directory", directory)
        self.finish_saving()
        extra, self._updates = self._call("load_checkpoint", within, step)[0]
        self._micro_steps, self._supervised = 0, False
        self._has_weights |= self.options.method == "full"  # under LoRA a checkpoint holds the adapters only
        return extra

    # ---- training

    def step(self, inputs: Array, targets: Array, documents: Array | None = None, z_loss: float = 0.0) -> None:
        """One micro-step: forward and backward of int32 [dp * batch_size, seq_len] arrays; data-parallel rank i
        trains on rows [i * batch_size, (i + 1) * batch_size).

        targets[:, t] is what inputs[:, t] should predict, -100 = ignored. documents numbers the documents of a row: a
        run of equal numbers is one, and documents do not see each other; None means one a row. z_loss adds
        z_loss * lse ** 2 per supervised token to what is minimised. Returns when the work is issued.

        Raises ConfigError for arrays of another shape or dtype, ids outside the vocabulary, and more than grad_accum
        micro-steps without an update.
        """
        z_loss = check_values(z_loss=z_loss)["z_loss"]
        self._check_running()
        if self._micro_steps >= self.grad_accum:
            raise ConfigError(f"{self.grad_accum} micro-steps (grad_accum) are done; call update before the next step")
        batch = self._batch(inputs, targets, documents)
        self._or_stop(self._team.call_on, batch, "step", z_loss)
        self._micro_steps += 1
        self._supervised = self._supervised or bool((batch.targets != IGNORED).any())

    def validate(self, inputs: Array, targets: Array, documents: Array | None = None) -> dict[str, float]:
        """{"loss", "loss_1k", "tokens"} of a forward without dropout; legal at any time, changes nothing."""
        return self._team.call_on(self._batch(inputs, targets, documents), "validate")[0]

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
        self._check_running()
        if not self._micro_steps:
            raise ConfigError("update needs at least one step before it")
        if not self._supervised:
            raise ConfigError(
                "no supervised token since the last update (all targets are -100): nothing to learn from; call discard"
            )
        rates = check_values(lr=lr, eps=eps, weight_decay=weight_decay, grad_clip=grad_clip, beta1=beta1, beta2=beta2)
        step = whole("step", self._updates + 1 if step is None else step, 1, checkpoint.STEP_BITS)
        told = self._or_stop(self._call, "update", {"step": step, **rates})[0]
        self._updates, self._micro_steps, self._supervised = step, 0, False
        return told

    def discard(self) -> None:
        """Forget the micro-steps since the last update, as if they had not been made."""
        self._call("discard")
        self._micro_steps, self._supervised = 0, False

    def _or_stop(self, call: Callable[..., Any], *args: Any) -> Any:
        """`call(*args)`; when that runs out of memory, half of its work may be done, and the trainer is stopped."""
        try:
            return call(*args)
        except OutOfMemory:
            self.stop()
            raise

    def _batch(self, inputs: Array, targets: Array, documents: Array | None) -> Batch:
        """The arguments, checked."""
        self._check_running()
        self._check_weights()
        shape = (
            self.options.dp * self.batch_size,
            self.seq_len,
            "batch_size" if self.options.dp == 1 else "dp * batch_size",
        )
        ids, labels = plain("inputs", inputs, *shape), plain("targets", targets, *shape)
        numbers = None if documents is None else plain("documents", documents, *shape)
        most = 0
        for name, values in (("inputs", ids), ("targets", labels)):
            check_ids(name, values, self.config.vocab_size)
        if numbers is not None:
            ends = np.count_nonzero(numbers[:, 1:] != numbers[:, :-1], axis=1).reshape(-1, self._setting.rows)
            most = self._setting.rows + int(ends.sum(1).max())
            check_documents(most, self.device.type)
        return Batch(ids, labels, numbers, most)

    def _check_weights(self) -> None:
        if not self._has_weights:
            raise ConfigError("the model has no weights yet; call import_weights or init_weights first")

    # ---- queries

    @property
    def num_parameters(self) -> tuple[int, int]:
        """(trainable, total) numbers of parameters; a tied head counts once."""
        total, lora = num_parameters(parameter_table(self.config)), self._lora
        if lora is None:
            return total, total
        layers = range(self.config.num_hidden_layers)
        adapters = num_parameters(tuple(adapter_unit(self.config, lora, layer) for layer in layers))
        return adapters, total + adapters

    def parameters_finite(self) -> bool:
        """Whether no trained parameter is infinite or NaN. The loss of an update is measured before it, so a checkpoint
        of a finite loss may hold spoilt weights; this looks at the weights."""
        return all(self._call("parameters_finite"))

    def start_profile(self) -> None:
        """Record what every rank does from now on, at some cost: see `stop_profile`."""
        self._call("start_profile")

    def stop_profile(self, directory: str | Path) -> list[ProfileRow]:
        """Write a trace of every rank (rank0.json.gz, ...; chrome://tracing and Perfetto read them) into `directory`,
        which is there; returns the first rank's kernels (on a CPU: operations), the longest first."""
        return self._call("stop_profile", place("directory", directory))[0]

    def gpu_info(self) -> list[dict[str, Any]]:
        """One record a GPU: clocks, power, temperature, fan, memory, utilisation, throttling, PCIe; None on a CPU."""
        return self._call("gpu_info")

    def time_actions(self) -> None:
        """Measure the forward and backward passes of micro-batches from now on, at some cost: see `action_times`."""
        self._call("time_actions")

    def action_times(self) -> list[tuple[float, float]]:
        """By rank since `time_actions`, which must come first and between updates: seconds in which its device was at
        work on micro-batches (or waited within that: for gathered weights), and seconds from the first one's begin to
        the last one's end. The difference is what it waited for other stages, and for the host."""
        return self._call("action_times")

    def peak_memory(self) -> int:
        """Bytes at the peak since the last call, the maximum over ranks: of a GPU's allocator, or on a CPU of the
        process."""
        return max(self._call("peak_memory"))

    def allocations(self, rank: int = 0) -> dict[str, dict[str, int]]:
        """{segment: {"device", "managed", "pinned", "pageable": bytes}} of one rank."""
        return self._call("allocations", rank=self._check_rank(rank))[0]

    def stack_info(self, rank: int = 0) -> dict[str, int]:
        """{name: high-water bytes} of one rank's scratch."""
        return self._call("stack_info", rank=self._check_rank(rank))[0]

    def gradients(self, rank: int = 0) -> dict[str, torch.Tensor]:
        """{Hugging Face or PEFT name: CPU tensor}: one rank's gradients of the loss *sum* since the last update, for
        debugging.

        Raises ConfigError unless called between step and update.
        """
        rank = self._check_rank(rank)
        if not self._micro_steps:
            raise ConfigError("gradients exist between step and update; call step first")
        return self._call("gradients", rank)[rank]

    def _check_rank(self, rank: int) -> int:
        if (rank := whole("rank", rank)) >= self.world_size:
            raise ConfigError(f"rank must be below world_size {self.world_size}, got {rank}")
        return rank
