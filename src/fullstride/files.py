"""Directories and files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from fullstride.errors import ConfigError


@contextmanager
def whole_directory(directory: Path, overwrite: bool = False) -> Iterator[Path]:
    """A new directory beside `directory`, renamed to it at the end, or removed on any error.

    Raises ConfigError when `directory` is a file, or not empty and not to be overwritten.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; choose another directory")
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise ConfigError(f"{directory} is not empty; choose another directory or remove it first")
    new, old = partial(directory), replaced(directory)
    if new.exists():  # left by a process that was killed
        shutil.rmtree(new)
    new.mkdir(parents=True)
    try:
        yield new
        if directory.exists():
            if old.exists():
                shutil.rmtree(old)
            directory.rename(old)
        new.rename(directory)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not directory.exists():
            old.rename(directory)
        raise
    if old.exists():
        shutil.rmtree(old)


def partial(directory: Path) -> Path:
    """Where whole_directory makes the new contents of `directory`."""
    return directory.with_name(f".{directory.name}.partial")


def discard_partial(directory: Path) -> None:
    """Remove what a process that was killed in whole_directory left of `directory`, and keep the old contents."""
    shutil.rmtree(partial(directory), ignore_errors=True)
    if replaced(directory).exists() and not directory.exists():
        replaced(directory).rename(directory)


def replaced(directory: Path) -> Path:
    """Where the old contents of `directory` stand while whole_directory puts new ones in their place."""
    return directory.with_name(f".{directory.name}.replaced")


def replace_text(file: Path, text: str) -> None:
    """Write `text` beside `file`, then rename: a reader sees the old text or the new, never a part."""
    beside = file.with_name(f".{file.name}.partial")
    beside.write_text(text, encoding="utf-8")
    sync(beside)
    beside.replace(file)
    sync(file.parent)


def sync(path: Path) -> None:
    """Return when a file, or the list of names in a directory, is on the disk: it outlives a loss of power."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def save_tensors(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file of CPU tensors. Raises OSError, as other writing does, when the disk refuses it."""
    try:
        save_file(tensors, file, metadata)
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
    file.chmod(file.parent.stat().st_mode & 0o666)  # safetensors writes for the owner alone, whatever the umask


def write_json(file: Path, value: Any) -> None:
    """`value` as indented JSON in UTF-8."""
    file.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
