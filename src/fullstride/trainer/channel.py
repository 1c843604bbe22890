"""From the Trainer to a worker in a process of its own, and what happens when that fails.

    channel.send(command, args)     the worker begins a command
    inbox.get() -> (rank, Outcome)  it has issued the command's work

Both ends speak in pickles, which say themselves where they end. A worker's last word is a Failure, or silence.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.errors import OutOfMemory
from fullstride.parallel.comm import PeerLost
from fullstride.parallel.presence import Failure
from fullstride.trainer.setting import Setting

Harmless = tuple[type[Exception], ...]
PATIENCE = 5.0  # seconds for a process to end by itself


@dataclass(frozen=True)
class Outcome:
    """A command that was done, or refused with nothing changed."""

    value: Any = None
    refusal: Exception | None = None


Inbox = queue.SimpleQueue[tuple[int, Outcome | None]]


def attempt(
    run: Callable[[str, tuple[Any, ...]], Any], command: str, args: tuple[Any, ...], harmless: Harmless
) -> Outcome:
    """The outcome of `run(command, args)`. `harmless` are the errors that come before anything changes."""
    try:
        return Outcome(run(command, args))
    except (OutOfMemory, PeerLost):
        raise
    except harmless as error:
        return Outcome(refusal=error)


class TokenMemory:
    """The tokens of one micro-step of all ranks, int32 [3, dp, B, T]: inputs, targets, documents.

    The caller writes before it sends a command, and workers have read when they answer it.
    """

    def __init__(self, setting: Setting, fd: int) -> None:
        """fd: of `shared_memory`."""
        shape = (3, setting.options.dp, setting.batch_size, setting.seq_len)
        self._array = np.frombuffer(mmap.mmap(fd, 0), np.int32).reshape(shape)

    @staticmethod
    def size(setting: Setting) -> int:
        """Bytes."""
        return 3 * setting.options.dp * setting.batch_size * setting.seq_len * 4

    def write(self, *arrays: np.ndarray | None) -> None:
        """Inputs, targets and, unless None, documents of all ranks, [ranks * B, T] each."""
        for place, array in zip(self._array, arrays, strict=True):
            if array is not None:
                place[:] = array.reshape(place.shape)

    def read(self, rank: int) -> list[np.ndarray | None]:
        """[B, T] each, of one data-parallel rank; documents that were None are what they were before."""
        return list(self._array[:, rank])


class OwnTokens:
    """As TokenMemory for the rank in this process, which reads the caller's own arrays."""

    def __init__(self, setting: Setting) -> None:
        self._rows = setting.batch_size
        self._arrays: tuple[np.ndarray | None, ...] = ()

    def write(self, *arrays: np.ndarray | None) -> None:
        """See TokenMemory."""
        self._arrays = arrays

    def read(self, rank: int) -> list[np.ndarray | None]:
        """See TokenMemory."""
        rows = slice(rank * self._rows, (rank + 1) * self._rows)
        return [None if array is None else array[rows] for array in self._arrays]


def shared_memory(size: int) -> int:
    """A file descriptor of `size` bytes of memory that has no name, and so is gone with its last user."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("fullstride")
    else:  # macOS
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    fd = _clear_of_standard(fd)
    os.ftruncate(fd, size)
    return fd


def _clear_of_standard(fd: int) -> int:
    """`fd`, or another in its place: where this process has no stdin, stdout or stderr, as daemons have not, their
    numbers are free, and what is written to them would get into it."""
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def _inherited(fd: int) -> int | None:
    """For Popen: the stdout or stderr of this process, or nothing where it has none."""
    try:
        return None if os.get_inheritable(fd) else subprocess.DEVNULL
    except OSError:
        return subprocess.DEVNULL


class SocketChannel:
    """The way to a rank in a process of its own, which this starts."""

    def __init__(self, rank: int, memory: int, inbox: Inbox, fail: Callable[[Failure], None]) -> None:
        """memory: of the tokens. Outcomes go into `inbox`, by rank, None for the end; `fail` is told when the rank
        fails. Both from a thread of this channel's."""
        self.rank, self._inbox, self._fail = rank, inbox, fail
        ends = (_clear_of_standard(end.detach()) for end in socket.socketpair())
        self._socket, theirs = [socket.socket(fileno=end) for end in ends]
        fds = (theirs.fileno(), memory)
        words = [sys.executable, "-P", "-m", "fullstride.trainer.worker", *map(str, (rank, *fds, os.getpid()))]
        # Python, too, passes over what is no str
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path if isinstance(entry, str))
        with theirs:
            # a process group of its own: Ctrl-C is the caller's to answer
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=_inherited(1),
                stderr=_inherited(2),
                pass_fds=fds,
                process_group=0,
                env={**os.environ, "PYTHONPATH": path},
            )
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, command: str, args: tuple[Any, ...], harmless: Harmless) -> None:
        self.post((command, args, harmless))

    def post(self, message: Any) -> None:
        """Send anything."""
        try:
            self._socket.sendall(pickle.dumps(message))
        except OSError as error:
            raise PeerLost(f"rank {self.rank} is gone") from error

    def _read(self) -> None:
        answer: Any = None
        try:
            with self._socket.makefile("rb") as stream:
                while isinstance(answer := pickle.load(stream), Outcome):
                    self._inbox.put((self.rank, answer))
        except (OSError, EOFError):
            answer = Failure(self.rank, self._death())
        except Exception as error:  # what this process cannot rebuild
            answer = Failure.of(self.rank, error)
        self._fail(answer)
        self._inbox.put((self.rank, None))

    def _death(self) -> str:
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        if code >= 0:
            return f"exited with status {code}; what it wrote to stderr may say why"
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (" (as when the machine runs out of memory)" if name == "SIGKILL" else "")

    def end(self) -> None:
        """Close the socket, upon which the process ends."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is closed at the other end

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        """Until the process is gone."""
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()
