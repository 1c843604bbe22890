"""How many ranks there are and where: what the user, the machine, and a launcher's variables say."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fullstride.errors import ConfigError


def find_ranks(gpus: int, device: str) -> tuple[int, torch.device]:
    """(number of ranks, the device of the one in this process) for a user's `gpus` and `device` (cuda, cpu).

    Raises ConfigError where there are not so many.
    """
    if not isinstance(gpus, int | np.integer) or isinstance(gpus, bool) or gpus < 0:
        raise ConfigError(f"gpus must be a number of GPUs, or 0 for all, got {gpus!r}")
    gpus = int(gpus)
    if found := launched():
        if gpus not in (0, found[0]):
            raise ConfigError(
                f"gpus = {gpus}, but the launcher started {found[0]} processes; set gpus = {found[0]} or 0"
            )
        return found[0], torch.device("cuda", found[1]) if device == "cuda" else torch.device(device)
    if device != "cuda":
        return gpus or 1, torch.device(device)
    there = torch.cuda.device_count()
    if gpus > there:
        raise ConfigError(f"gpus = {gpus}, but this machine has {there}; set gpus to at most {there}, or to 0 for all")
    gpus = gpus or there
    return gpus, torch.device("cuda", 0 if gpus > 1 else torch.cuda.current_device())


def leads() -> bool:
    """Whether this process writes and prints for all: the only one, or the first that torchrun started."""
    return launched() is None or os.environ["RANK"] == "0"


def launched() -> tuple[int, int] | None:
    """(ranks, this process's GPU) where torchrun, or a launcher that sets the same variables, started this process."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(name in os.environ for name in names):
        return None
    values = {name: os.environ.get(name, "0") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    told = " ".join(f"{name}={value}" for name, value in values.items())
    if not all(re.fullmatch("[0-9]{1,9}", value) for value in values.values()):
        raise ConfigError(f"a launcher's variables must be whole numbers, got {told}; unset them, or use torchrun")
    rank, size, gpu, _ = map(int, values.values())
    if rank >= size:
        raise ConfigError(f"RANK must be below WORLD_SIZE, got {told}; unset them, or use torchrun")
    return None if size == 1 else (size, gpu)


@contextmanager
def open_files(ranks: int) -> Iterator[None]:
    """Tells what to do where this process, or a worker, may not open as many files as `ranks` need."""
    limit, need = (
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        24 + 8 * ranks,
    )  # what a worker's groups were seen to use
    remedy = f"raise the limit of open files (ulimit -n {max(1024, 2 * need)}), or use fewer ranks"
    if limit != resource.RLIM_INFINITY and limit < need:
        raise ConfigError(f"{ranks} ranks need {need} open files in a process, but it may have {limit}; {remedy}")
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise ConfigError(
            f"this process has as many open files as it may, {limit} ({error.strerror}); {remedy}"
        ) from None
