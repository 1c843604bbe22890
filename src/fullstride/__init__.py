"""fullstride trains dense Llama-family language models: LoRA, full fine-tuning and pre-training."""

from __future__ import annotations

from typing import Any

from fullstride.config import Options
from fullstride.errors import ConfigError, DataError, UsageError
from fullstride.model.spec import ModelConfig
from fullstride.trainer.trainer import Trainer
from fullstride.version import __version__


def finetune(**keys: Any) -> Any:
    """What the command `finetune` does, with the same keys (underscores for dashes); see run/finetune."""
    from fullstride.run.finetune import finetune

    return finetune(**keys)


__all__ = ["ConfigError", "DataError", "ModelConfig", "Options", "Trainer", "UsageError", "__version__", "finetune"]
