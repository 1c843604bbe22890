"""`fullstride import-gguf`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fullstride.config import DTYPES
from fullstride.config.keys import check_fields, key

SUMMARY = "GGUF file -> Hugging Face directory (Llama family)"
POSITIONAL = ("gguf", "out")


@dataclass(frozen=True)
class Config:
    """Keys of `import-gguf`."""

    gguf: str = key("", "the GGUF file", required=True)
    out: str = key("", "the directory to write", required=True)
    dtype: str = key("bf16", "precision of the weights written", choices=DTYPES)
    tokenizer: str = key("", "directory to copy the tokenizer from; automatic: the one inside the GGUF")

    def __post_init__(self) -> None:
        check_fields(self)


def run(config: Config) -> int:
    """Convert; nothing is left behind on failure."""
    from fullstride.run.gguf import import_gguf

    tokenizer = Path(config.tokenizer) if config.tokenizer else None
    import_gguf(Path(config.gguf), Path(config.out), config.dtype, tokenizer)
    print(f"written: {config.out}")
    return 0
