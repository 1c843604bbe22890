"""fullstride trains dense Llama-family language models, with LoRA or in full."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fullstride.errors import ConfigError, DataError, OutOfMemory, UsageError, WorkerError
from fullstride.version import __version__

if TYPE_CHECKING:
    from fullstride.config import Options
    from fullstride.model.spec import ModelConfig
    from fullstride.run.finetune import finetune
    from fullstride.run.plan import plan
    from fullstride.run.tokenize import tokenize
    from fullstride.run.train import train
    from fullstride.trainer.trainer import Trainer

__all__ = [
    "ConfigError",
    "DataError",
    "ModelConfig",
    "Options",
    "OutOfMemory",
    "Trainer",
    "UsageError",
    "WorkerError",
    "__version__",
    "finetune",
    "plan",
    "tokenize",
    "train",
]

# imported when first asked for: the command line's help should not wait for torch
_LAZY = {
    "ModelConfig": "fullstride.model.spec",
    "Options": "fullstride.config",
    "Trainer": "fullstride.trainer.trainer",
    "finetune": "fullstride.run.finetune",
    "plan": "fullstride.run.plan",
    "tokenize": "fullstride.run.tokenize",
    "train": "fullstride.run.train",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fullstride' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
