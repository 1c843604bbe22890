"""`fullstride bench`."""

from __future__ import annotations

from dataclasses import dataclass

from fullstride.config import Options
from fullstride.config.keys import key

SUMMARY = "measured training speed of a configuration on this machine, with random weights and data"
POSITIONAL = ("model",)


@dataclass(frozen=True)
class Config(Options):
    """Keys of `bench`: those of the measurement, then the Trainer's options."""

    model: str = key("", "built-in name, directory or config.json", required=True)
    seq_len: int = key(1024, "tokens per row", at_least=2)
    batch_size: int = key(4, "rows per micro-step", at_least=1)
    grad_accum: int = key(
        0, "micro-steps per update; automatic: at least 65,536 tokens an update on a GPU, 1 on a CPU", at_least=0
    )
    updates: int = key(5, "updates in each of five measurements", at_least=1)
    lr: float = key(0.0, "learning rate; automatic: 1e-3 for LoRA, 1e-4 for full", at_least=0)
    json: str = key("", "file to write the result to")


def run(config: Config) -> int:
    """Measure and print a table; raises ConfigError when the training does not train."""
    from fullstride.run.bench import run_bench

    run_bench(config)
    return 0
