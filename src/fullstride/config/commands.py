"""The keys of `bench` and `generate`."""

from __future__ import annotations

from dataclasses import dataclass

from fullstride.config import DTYPES, MOST_LR, CommandOptions
from fullstride.config.keys import check_fields, key
from fullstride.errors import UsageError


@dataclass(frozen=True)
class BenchConfig(CommandOptions):
    """Keys of `bench`: those of the measurement, then the Trainer's options."""

    model: str = key("", "built-in name, directory or config.json", required=True)
    seq_len: int = key(1024, "tokens per row", at_least=2)
    batch_size: int = key(4, "rows per rank and micro-step", at_least=1)
    grad_accum: int | None = key(
        None, "micro-steps per update; automatic: at least 65,536 tokens of a rank on a GPU, 1 on a CPU", at_least=1
    )
    updates: int = key(5, "updates in each of five measurements", at_least=1)
    lr: float | None = key(None, "learning rate; automatic: 1e-3 for LoRA, 1e-4 for full", above=0, at_most=MOST_LR)
    json: str = key("", "file to write the result to")


@dataclass(frozen=True)
class GenerateConfig:
    """Keys of `generate`."""

    model: str = key("", "directory, or Hub id found in the local cache or downloaded", required=True)
    adapter: str = key("", "PEFT directory")
    prompt: str = key("", "what the user says")
    prompt_file: str = key("", "the same from a text file")
    system: str = key("", "system message; automatic: the chat template's own")
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
