"""Models and tokenizers by name: a directory, or a Hub id found in the local cache or downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from fullstride.errors import ConfigError
from fullstride.model.spec import ModelConfig

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model"]


def find_model(name: str) -> Path:
    """The absolute directory that `name` means; downloads a Hub id that is not in the local cache.

    Raises ConfigError when it is neither a directory nor an id that the Hub gives.
    """
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # ~somebody who is not known here
        path = Path(name)
    if path.is_dir():
        return path.resolve()
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise ConfigError(f"model: no such directory: {name}; give a directory in Hugging Face's format, or a Hub id")
    try:
        import huggingface_hub as hub
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(
            f"model: no such directory: {name}; as a Hub id it needs huggingface_hub: pip install 'fullstride[hub]'"
        ) from None
    try:
        return Path(hub.snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        pass  # not in the local cache: the Hub is asked next, and its answer is the one that counts
    try:
        return Path(hub.snapshot_download(name, allow_patterns=HUB_FILES, token=os.environ.get("HF_TOKEN")))
    except Exception as error:  # a whole family of HTTP and network errors, which differ between its releases
        raise ConfigError(
            f"model: no such directory: {name}, and the Hub did not give it "
            f"({type(error).__name__}: {' '.join(str(error).split())}); check name and network"
        ) from error


def has_tokenizer(directory: Path) -> bool:
    """Whether a tokenizer's files are there."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return any((directory / name).is_file() for name in names)


def check_tokenizer_there(directory: Path) -> None:
    """Raise ConfigError when `directory` holds no tokenizer."""
    if not has_tokenizer(directory):
        raise ConfigError(f"{directory}: no tokenizer there (tokenizer.json); copy the one that belongs to the model")


def load_tokenizer(directory: Path, config: ModelConfig | None = None) -> Any:
    """The tokenizer in `directory`. Raises ConfigError when there is none, or it has more tokens than the model."""
    check_tokenizer_there(directory)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises nothing more special for a file that it cannot use
        reason = " ".join(str(error).split())
        raise ConfigError(f"{directory}: the tokenizer does not load ({type(error).__name__}: {reason})") from error
    if config is not None and len(tokenizer) > config.vocab_size:
        raise ConfigError(
            f"{directory}: the tokenizer has {len(tokenizer)} tokens, the model only {config.vocab_size} "
            "embedding rows; use the tokenizer that belongs to the model"
        )
    return tokenizer


def padding_id(tokenizer: Any) -> int:
    """The id that fills rows up (the loss never looks at it)."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0
