"""`fullstride generate`."""

from __future__ import annotations

from dataclasses import dataclass

from fullstride.config import DTYPES
from fullstride.config.keys import check_fields, key
from fullstride.errors import UsageError

SUMMARY = "text from a model directory, with an adapter if given"
POSITIONAL = ()


@dataclass(frozen=True)
class Config:
    """Keys of `generate`."""

    model: str = key("", "directory, or Hub id found in the local cache or downloaded", required=True)
    adapter: str = key("", "PEFT directory")
    prompt: str = key("", "what the user says")
    prompt_file: str = key("", "the same from a text file")
    system: str = key("", "system message; automatic: the chat template's own")
    raw: bool = key(False, "continue the prompt as it is, without the chat template")
    max_new_tokens: int = key(200, "most tokens generated", at_least=1)
    temperature: float = key(0.0, "0: the likeliest token each time; else sampling", at_least=0)
    top_p: float = key(1.0, "sample among the likeliest tokens that together have this probability", at_least=0)
    seed: int = key(42, "seed of the sampling", at_least=0, below=2**63)
    dtype: str = key("", "precision; automatic: bf16 on a GPU, fp32 on a CPU", choices=DTYPES)
    device: str = key("auto", "where it runs", choices=("auto", "cuda", "cpu"))

    def __post_init__(self) -> None:
        check_fields(self)
        if bool(self.prompt) == bool(self.prompt_file):
            raise UsageError("give either prompt or prompt-file")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p must be above 0 and at most 1, got {self.top_p}")
        if self.raw and self.system:
            raise UsageError("system contradicts raw: without a chat template there is no system message")


def run(config: Config) -> int:
    """Generate to standard output; the rate goes to standard error."""
    from fullstride.run.generate import generate

    generate(**vars(config))
    return 0
