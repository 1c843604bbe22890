"""The keys of the commands that do not train."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from fullstride.config import DTYPES, MOST_LR, CommandOptions
from fullstride.config.keys import check_fields, key
from fullstride.errors import UsageError


@dataclass(frozen=True)
class BenchConfig(CommandOptions):
    """Keys of `bench`: those of the measurement, then the Trainer's options."""

    model: str = key("", "built-in name, directory or config.json", required=True)
    seq_len: int = key(1024, "tokens per row", at_least=2)
    batch_size: int = key(4, "rows per rank and micro-step; with strategies, of all ranks together", at_least=1)
    grad_accum: int | None = key(
        None, "micro-steps per update; automatic: at least 65,536 tokens of a rank on a GPU, 1 on a CPU", at_least=1
    )
    updates: int = key(5, "updates in each of five measurements", at_least=1)
    lr: float | None = key(None, "learning rate; automatic: 1e-3 for LoRA, 1e-4 for full", above=0, at_most=MOST_LR)
    strategies: tuple[str, ...] = key(
        (), "splits of gpus to compare, of the same rows: single, dp2, zero3, pp2, dp2-pp2-zero3, ...; or all"
    )
    json: str = key("", "file to write the result to")


@dataclass(frozen=True)
class PlanConfig(CommandOptions):
    """Keys of `plan`: those of the micro-step and of what is shown, then the Trainer's options."""

    model: str = key("", "built-in name, directory or config.json; without one --show-schedule has stages all alike")
    seq_len: int = key(1024, "tokens per row", at_least=2)
    batch_size: int = key(0, "rows per rank and micro-step; automatic: microbatches, or 4", at_least=0)
    grad_accum: int = key(1, "micro-steps per update, which pass a pipeline without a drain between them", at_least=1)
    gpus: int = key(0, "GPUs, or with device = cpu workers; automatic: pp x dp x tp", at_least=0, may_change=True)
    device: str = key("cuda", "where it would run", choices=("cuda", "cpu"), may_change=True)
    gpu_memory: float = key(0.0, "GB (1e9 bytes) that must suffice; automatic: not compared", at_least=0)
    show_schedule: bool = key(False, "draw what every stage does when")
    json: str = key("", "file to write the result to")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model and not self.show_schedule:
            raise UsageError("model is missing; give --model, or --show-schedule for a schedule of stages all alike")
        if not self.model and self.gpu_memory:
            raise UsageError("gpu-memory needs a model to compare with; give --model, or leave gpu-memory out")

    def resolved(self) -> Self:
        """As Options.resolved for a machine that need not be this one, with torch's own attention if not told else."""
        return dataclasses.replace(
            self.decided(self.device),
            attention=self.attention or "torch",
            gpus=self._ranks(),
            batch_size=self.batch_size or self.microbatches or 4,
        )


@dataclass(frozen=True)
class GenerateConfig:
    """Keys of `generate`."""

    model: str = key("", "directory, or Hub id found in the local cache or downloaded", required=True)
    adapter: str = key("", "PEFT directory")
    prompt: str = key("", "what the user says")
    prompt_file: str = key("", "the same from a text file")
    system: str = key("", "system message; automatic: the chat template's own")
    thinking: str = key("off", "of models with think blocks: on prompts for thoughts", choices=("on", "off"))
    raw: bool = key(False, "continue the prompt as it is, without the chat template")
    max_new_tokens: int = key(200, "most tokens generated", at_least=1)
    temperature: float = key(0.0, "0: the likeliest token each time; else sampling", at_least=0)
    top_p: float = key(1.0, "sample among the likeliest tokens that together have this probability", above=0, at_most=1)
    seed: int = key(42, "seed of the sampling", at_least=0, below=2**63)
    dtype: str = key("", "precision; automatic: bf16 on a GPU, fp32 on a CPU", choices=DTYPES)
    device: str = key("auto", "where it runs", choices=("auto", "cuda", "cpu"))

    def __post_init__(self) -> None:
        check_fields(self)
        if bool(self.prompt) == bool(self.prompt_file):
            raise UsageError("give either prompt or prompt-file")
        if self.raw and self.system:
            raise UsageError("system contradicts raw: without a chat template there is no system message")


@dataclass(frozen=True)
class TokenizeConfig:
    """Keys of `tokenize`."""

    model: str = key("", "directory with the tokenizer, or Hub id", required=True)
    data: str = key(
        "",
        "text files (a document each) and JSONL files (a document a line: text, or a chat, whose answers are labels); "
        "comma-separated, with patterns such as 'texts/*.txt'",
        required=True,
    )
    out: str = key("", "the token file; automatic: tokens/NAME.tokens")
    overwrite: bool = key(False, "replace a token file that is there")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class MergeConfig:
    """Keys of `merge`."""

    model: str = key("", "the adapter's base: directory or Hub id", required=True)
    adapter: str = key("", "PEFT directory", required=True)
    out: str = key("", "the directory to write", required=True)
    dtype: str = key("", "precision of the weights written; automatic: the base's", choices=DTYPES)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class ExportConfig:
    """Keys of `export`."""

    run: str = key("", "run directory, or a directory of checkpoints", required=True)
    out: str = key("", "the directory to write", required=True)
    step: int | str = key("latest", "a step, latest, or best (of keep-best)")
    model: str = key("", "where the tokenizer is; automatic: what the run was started with")
    export_dtype: str = key("", "precision of the weights written; automatic: that of training", choices=DTYPES)

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.step, str) and self.step not in ("latest", "best"):
            raise UsageError(f"step must be a number, latest or best, got {self.step!r}")


@dataclass(frozen=True)
class PlotConfig:
    """Keys of `plot`."""

    runs: tuple[str, ...] = key((), "run directories, drawn over one another", required=True)
    out: str = key("", "the PNG to write; automatic: plot.png in the first run")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class DoctorConfig:
    """Keys of `doctor`."""

    json: str = key("", "file to write the findings to")

    def __post_init__(self) -> None:
        check_fields(self)
