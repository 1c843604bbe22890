"""`fullstride demo`."""

from __future__ import annotations

from dataclasses import dataclass

from fullstride.config.keys import check_fields, key

SUMMARY = "fine-tune a small real model on meetings: an unseen summary before and after"
POSITIONAL = ()


@dataclass(frozen=True)
class Config:
    """Keys of `demo`."""

    out: str = key("runs", "directory for the model and the run")
    device: str = key("auto", "where it runs", choices=("auto", "cuda", "cpu"))

    def __post_init__(self) -> None:
        check_fields(self)


def run(config: Config) -> int:
    """Run the demonstration."""
    from fullstride.run.demo import demo

    demo(config.out, config.device)
    return 0
