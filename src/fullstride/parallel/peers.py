"""Memory that other ranks of this machine write and read, and how ranks wait for one another there.

What is done to peers' memory belongs to one sequence: on a GPU that of a stream of its own, which copy engines work off
beside the kernels; on a CPU that of the host, at once.

    with peers.after_now():           after what is issued so far
        peers.meet(0)                 when all ranks have come here
        peers.push(source, 1, place)  over what rank 1 has where `place` is here
        peers.meet(1)                 when all ranks have come here
    work = peers.issued()             work.wait(): what is issued from now on comes after that

`meet` counts in turn, 0 and then 1, on every rank: a word that is set and taken back can be set again only when the
other has been seen by all, so the same two words serve again and again, in replayed CUDA graphs too.

Memory is reached by what every process of the machine may open: CUDA's inter-process handles (parallel/peers_cuda), or
on a CPU files without a name. So nothing is left behind, whatever ends a process.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fullstride.parallel.comm import Communicator, Done, PeerLost, Work
from fullstride.parallel.rendezvous import TIMEOUT

log = logging.getLogger(__name__)


class Unreachable(Exception):
    """This rank cannot reach the memory of another."""


class Peers(ABC):
    """The ranks of `comm` as this one reaches them. They make the same calls in the same order."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size, self._comm = comm.rank, comm.size, comm
        self._opened: dict[int, dict[int, Any]] = {}  # by address of this rank's memory and rank: theirs

    @property
    def others(self) -> list[int]:
        """The other ranks, the next one first, so that not all turn to the same at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def obstacle(self) -> str:
        """Make contact. Says why this rank cannot, "" if it can. A collective."""
        try:
            offer, obstacle = self._offer(), ""
        except (OSError, Unreachable) as error:
            offer, obstacle = None, str(error)
        offers = self._comm.gather((machine(), offer))
        if obstacle or any(offer is None for _, offer in offers):
            return obstacle
        if len({where for where, _ in offers}) > 1:
            return "the ranks are on several machines"
        try:
            self._accept([offer for _, offer in offers])
        except (OSError, Unreachable) as error:
            return str(error)
        return ""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zero-filled memory of this rank that the others reach while it is in use. A collective, of one size.

        Raises what torch raises for want of memory, and Unreachable.
        """
        tensor, handle = self._allocate(shape, dtype)
        try:
            handles = self._comm.gather(handle)
            opened = {rank: self._open(rank, handles[rank], tensor) for rank in self.others}
            self._comm.barrier()  # all have opened it
        finally:
            self._withdraw(handle)
        self._opened[tensor.untyped_storage().data_ptr()] = opened
        return tensor

    def _of(self, rank: int, place: torch.Tensor) -> Any:
        """Rank `rank`'s memory that `place` is a view of here."""
        return self._opened[place.untyped_storage().data_ptr()][rank]

    @abstractmethod
    def _offer(self) -> Any:
        """What the others have to know for contact."""

    @abstractmethod
    def _accept(self, offers: list[Any]) -> None:
        """Make contact, knowing all ranks' offers."""

    def contacted(self) -> None:
        """All ranks have made contact."""
        return None

    @abstractmethod
    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """Memory, and what the others have to know of it."""

    @abstractmethod
    def _open(self, rank: int, handle: Any, tensor: torch.Tensor) -> Any:
        """The memory that rank `rank` offers; as large as `tensor` here."""

    def _withdraw(self, handle: Any) -> None:
        """Nobody opens the memory of `handle` any more."""
        return None

    @abstractmethod
    def after_now(self) -> Any:
        """A context: what is done inside comes after what is issued so far."""

    @abstractmethod
    def issued(self) -> Work:
        """What has been done inside such contexts."""

    @abstractmethod
    def push(self, source: torch.Tensor, rank: int, place: torch.Tensor) -> None:
        """Copy `source` over what `rank` has where `place`, of `zeros`, is here."""

    @abstractmethod
    def pull(self, rank: int, place: torch.Tensor, target: torch.Tensor) -> None:
        """Overwrite `target` with what `rank` has where `place`, of `zeros`, is here."""

    @abstractmethod
    def meet(self, which: int) -> None:
        """What comes after this comes after what every rank had before it. which: 0 and 1 in turn."""


def connect(comm: Communicator) -> Peers | None:
    """The ranks of `comm` as peers; None, and a line in the log, where not all of them reach one another.

    A collective.
    """
    if comm.device is not None and comm.device.type == "cuda":
        from fullstride.parallel.peers_cuda import CudaPeers

        peers: Peers = CudaPeers(comm, comm.device)
    else:
        peers = HostPeers(comm)
    obstacles = comm.gather(peers.obstacle())
    for rank, obstacle in enumerate(obstacles):
        if obstacle:
            if comm.rank == 0:
                log.warning(
                    "ranks cannot copy between their memories here, NCCL (on CPUs Gloo) serves instead; rank %d: %s",
                    rank,
                    obstacle,
                )
            return None
    peers.contacted()
    return peers


def machine() -> str:
    """What tells this machine from others, and this boot of it from earlier ones."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text() if boot.is_file() else "")


class HostPeers(Peers):
    """Processes on a CPU: memory without a name, which Linux lets others open below /proc, and a pipe for each pair of
    ranks and direction, in whose order signals come, and which ends with its writer: so no wait outlives its end."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self._from: dict[int, int] = {}  # by rank: a pipe's end
        self._to: dict[int, int] = {}
        self._fds: list[int] = []  # all that are open
        weakref.finalize(self, _close, self._fds)

    def _offer(self) -> Any:
        ends = {}
        for rank in self.others:
            self._from[rank], ends[rank] = os.pipe()
            self._fds += self._from[rank], ends[rank]
        self._offered = ends
        return os.getpid(), {rank: (fd, _identity(f"/proc/self/fd/{fd}")) for rank, fd in ends.items()}

    def _accept(self, offers: list[Any]) -> None:
        for rank in self.others:
            pid, ends = offers[rank]
            self._to[rank] = os.open(_path(pid, *ends[self.rank]), os.O_WRONLY)
            self._fds.append(self._to[rank])

    def contacted(self) -> None:
        # the others have theirs, and a pipe of which no writer is left says so
        for fd in self._offered.values():
            os.close(fd)
            self._fds.remove(fd)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        fd = os.memfd_create("fullstride")
        os.ftruncate(fd, math.prod(shape) * dtype.itemsize)
        path = f"/proc/self/fd/{fd}"
        tensor = torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(shape)
        return tensor, (os.getpid(), fd, _identity(path))

    def _open(self, rank: int, handle: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.from_file(_path(*handle), shared=True, size=tensor.numel() * tensor.itemsize, dtype=torch.uint8)

    def _withdraw(self, handle: Any) -> None:
        os.close(handle[1])  # the memory lives as long as it is mapped

    @contextmanager
    def after_now(self) -> Iterator[None]:
        yield

    def issued(self) -> Work:
        return Done()

    def push(self, source: torch.Tensor, rank: int, place: torch.Tensor) -> None:
        self._view(rank, place).copy_(source)

    def pull(self, rank: int, place: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(self._view(rank, place))

    def _view(self, rank: int, place: torch.Tensor) -> torch.Tensor:
        start = place.storage_offset() * place.itemsize
        return self._of(rank, place)[start : start + place.numel() * place.itemsize].view(place.dtype)

    def meet(self, which: int) -> None:
        for rank in self.others:
            try:
                os.write(self._to[rank], bytes([which]))
            except BrokenPipeError as error:
                raise PeerLost(f"rank {rank} is gone") from error
        for rank in self.others:
            self._receive(rank, which)

    def _receive(self, rank: int, which: int) -> None:
        """Wait for the signal of `rank`. Raises PeerLost when it cannot come any more."""
        pipe, until = select.poll(), time.monotonic() + TIMEOUT.total_seconds()
        pipe.register(self._from[rank], select.POLLIN)
        while not pipe.poll(100):  # milliseconds
            self._comm.check()
            if time.monotonic() > until:
                raise PeerLost(f"rank {rank} has not come for {TIMEOUT}")
        signal = os.read(self._from[rank], 1)
        if not signal:
            raise PeerLost(f"rank {rank} is gone")
        assert signal == bytes([which]), "ranks do not make the same calls"


def _path(pid: int, fd: int, identity: tuple[int, int]) -> str:
    """Where to open what process `pid` has as `fd`. Raises Unreachable where that is something else."""
    path = f"/proc/{pid}/fd/{fd}"
    if _identity(path) != identity:
        raise Unreachable(f"process {pid} is not to be seen from here")
    return path


def _identity(path: str) -> tuple[int, int]:
    found = Path(path).stat()
    return found.st_dev, found.st_ino


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
