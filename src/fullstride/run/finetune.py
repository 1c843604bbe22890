"""Supervised fine-tuning: configuration -> rows -> a run."""

from __future__ import annotations

from typing import Any

from fullstride.config.keys import build
from fullstride.config.training import FinetuneConfig
from fullstride.run.prepare import prepare
from fullstride.run.preview import preview
from fullstride.run.training import RunResult, run_prepared


def finetune(**keys: Any) -> RunResult:
    """Fine-tune as `fullstride finetune --key value ...` does; keys as keyword arguments, with underscores.

    Raises ConfigError (with its kinds UsageError and DataError) for what cannot be run, KeyboardInterrupt when stopped
    by a signal (the state is saved).
    """
    return run_finetune(build(FinetuneConfig, keys))


def run_finetune(config: FinetuneConfig) -> RunResult:
    """See `finetune`."""
    return run_prepared(lambda: prepare(config), preview)
