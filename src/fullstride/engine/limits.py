"""Sizes that would overflow an index or a kernel's launch: refused before anything is allocated.

All other sizes are taken as they are. Kernels mask what sticks out of their tiles, offsets are 64-bit, and cuBLAS takes
any size (multiples of 8 are faster in bf16); attention's head size is checked by its own rule (ops/attention).
"""

from __future__ import annotations

from fullstride.engine.batch import MOST_PLACES
from fullstride.errors import ConfigError
from fullstride.model.spec import ModelConfig
from fullstride.ops.attention import check_head_dim

MOST_TOKENS = 2**31 - 1  # token numbers are int32, on every device
MOST_WIDTH = 2**16  # the norms keep a whole row in one program


def check_sizes(config: ModelConfig, rows: int, seq_len: int, device: str) -> None:
    """Raise ConfigError for a model or micro-step (rows x seq_len tokens) that kernels on `device` (cuda, cpu) lack."""
    if rows * seq_len > MOST_TOKENS:
        key, most = ("batch-size", MOST_TOKENS // seq_len) if seq_len <= MOST_TOKENS else ("seq-len", MOST_TOKENS)
        raise ConfigError(
            f"a micro-step has at most {MOST_TOKENS:,} tokens (they are numbered in int32), got {rows:,} rows of "
            f"{seq_len:,}; set {key} to at most {most:,}"
        )
    if device != "cuda":
        return
    check_head_dim(config.head_dim)
    if rows > MOST_PLACES:
        raise ConfigError(
            f"attention on a GPU takes at most {MOST_PLACES:,} rows a micro-step, got {rows:,}; "
            f"set batch-size to at most {MOST_PLACES:,}, and raise grad-accum instead"
        )
    if config.hidden_size > MOST_WIDTH:
        raise ConfigError(
            f"norms on a GPU take at most {MOST_WIDTH:,} columns, this model has hidden_size {config.hidden_size:,}; "
            "train it on the CPU"
        )


def check_documents(documents: int, device: str) -> None:
    """Raise ConfigError for more documents in one packed micro-step than attention on `device` takes."""
    if device == "cuda" and documents > MOST_PLACES:
        raise ConfigError(
            f"attention on a GPU takes at most {MOST_PLACES:,} documents a packed micro-step, got {documents:,}; "
            "lower batch-size, or join short documents"
        )
