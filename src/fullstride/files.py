"""Directories and files that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import re
import secrets
import shutil
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from fullstride.errors import ConfigError

PARTIAL, REPLACED = "partial", "replaced"  # endings of names beside what they become, or were
MACHINE = f"{zlib.crc32(socket.gethostname().encode()):08x}"


@contextmanager
def whole_directory(directory: Path, overwrite: bool = False) -> Iterator[Path]:
    """A new directory beside `directory`, renamed to it at the end, or removed on any error.

    Its name is this call's alone: of several that write one directory at a time, each is whole, and the last stays.
    Raises ConfigError when `directory` is a file, or not empty and not to be overwritten.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; choose another directory")
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise ConfigError(f"{directory} is not empty; choose another directory or remove it first")
    for left in _left_behind(directory, PARTIAL):
        _remove(left)
    new = _beside(directory, PARTIAL)
    new.mkdir(parents=True)
    try:
        yield new
        _put(new, directory, overwrite)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _put(new: Path, directory: Path, overwrite: bool) -> None:
    """Rename `new` to `directory`; what stands there, perhaps since a moment, is moved aside, and then removed."""
    aside: list[Path] = []
    try:
        while True:
            try:
                new.rename(directory)
                break
            except OSError as error:  # ENOTDIR: a symbolic link, which is replaced, not what it points to
                taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST) or directory.is_symlink()
                if not (taken and overwrite):
                    raise
            with suppress(FileNotFoundError):  # another process has moved it
                aside.append(directory.rename(_beside(directory, REPLACED)))
    except BaseException:
        if aside and not directory.exists():
            aside[-1].rename(directory)
        raise
    for old in (*aside, *_left_behind(directory, REPLACED)):
        _remove(old)


def discard_partial(directory: Path) -> None:
    """Remove what processes that were killed in whole_directory left of `directory`, and keep the old contents."""
    for left in _left_behind(directory, PARTIAL):
        _remove(left)
    for old in _left_behind(directory, REPLACED):
        if directory.exists():
            _remove(old)
        else:
            with suppress(OSError):  # another process does the same
                old.rename(directory)


@contextmanager
def locked(lock: Path, busy: str, kept: Path) -> Iterator[None]:
    """Hold the file `lock`, which is made, for this process; the kernel lets go of it however the process ends.

    Raises ConfigError: with the words `busy` when another process holds it, and where nothing can be locked; `kept` is
    what it protects.
    """
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(busy) from None
        except OSError as error:
            raise ConfigError(
                f"out: {kept} cannot be locked against other processes ({error.strerror}); choose a place on "
                "another file system"
            ) from error
        yield


def replaced(directory: Path) -> list[Path]:
    """Where old contents of `directory` stand while whole_directory puts new ones in their place."""
    return sorted(directory.parent.glob(f".{glob.escape(directory.name)}.*{REPLACED}"))


def _beside(path: Path, ending: str) -> Path:
    """A hidden name that nobody else has, and that says whose it is: machine and process."""
    return path.with_name(f".{path.name}.{MACHINE}-{os.getpid()}-{secrets.token_hex(4)}.{ending}")


def _left_behind(path: Path, ending: str) -> list[Path]:
    """What has such a name, or one without an owner, and no process any more that would rename or remove it."""
    found = path.parent.glob(f".{glob.escape(path.name)}.*{ending}")
    return [file for file in found if not _has_owner(file.name)]


def _has_owner(name: str) -> bool:
    owner = re.search(r"\.([0-9a-f]{8})-([0-9]+)-[0-9a-f]{8}\.[a-z]+$", name)
    if owner is None:
        return False
    try:
        if owner[1] == MACHINE:  # another machine's processes cannot be seen
            os.kill(int(owner[2]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _remove(path: Path) -> None:
    """Others may do the same at this moment."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def replace_text(file: Path, text: str) -> None:
    """`replace_bytes` of `text` in UTF-8."""
    replace_bytes(file, text.encode())


def replace_bytes(file: Path, content: bytes) -> None:
    """Write `content` beside `file`, then rename: a reader sees the old content or the new, never a part."""
    for left in _left_behind(file, PARTIAL):
        _remove(left)
    beside = _beside(file, PARTIAL)
    try:
        beside.write_bytes(content)
        sync(beside)
        beside.replace(file)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
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
