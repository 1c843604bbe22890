"""What ranks say to one another: collectives over flat buffers (NCCL on GPUs, Gloo on CPUs), and who is still there.

A collective is started and waited for apart, so that it overlaps what is computed in between:

    work = comm.reduce_scatter(whole, part)      it begins after what is issued so far
    ...
    work.wait()                                  what is issued from now on begins after it

NCCL runs on a stream of its own and `wait` makes the current stream wait for it, not the host, so both may be captured
in a CUDA graph. Gloo's threads begin at once, and there the host waits. Until then neither side's buffers may be
touched. Buffers are contiguous; `whole` is as long as all ranks' parts, and `part` may be this rank's piece of it.

The process groups are torch.distributed's, but not its default one: a notebook that has that keeps it, and two trainers
can live side by side. Hosts talk over Gloo also where devices do over NCCL, so they do not wait for what devices have
still to do. How ranks meet is in parallel/rendezvous, who of a launcher's processes is there in parallel/presence.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fullstride.errors import ConfigError

LOOK = 1.0  # seconds after which a host that waits looks whether that is still of use
PARTING = 20.0  # seconds in which all ranks come to an orderly end


class PeerLost(RuntimeError):
    """A wait for another rank that cannot end well: that one is gone. A consequence, never the cause."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Let what follows wait for it. Raises PeerLost where the host sees that it cannot end."""


class Waiting(Protocol):
    """Something of this rank's that waits for others."""

    def abort(self) -> None:
        """End these waits, from any thread."""


class Done:
    """Nothing is under way."""

    def wait(self) -> None:
        return None


class _Issued:
    """Of NCCL: the current stream waits."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        with _loses_peers():
            self._work.wait()


class _HostIssued:
    """Of Gloo: the host waits, and while it does looks whether ranks are gone whose connections are still open (but in
    a reduce-scatter, where torch's wait heeds no time)."""

    def __init__(self, work: dist.Work, comm: Communicator) -> None:
        self._work, self._comm = work, comm

    def wait(self, within: float = float("inf")) -> None:
        """Raises PeerLost also after `within` seconds."""
        until = time.monotonic() + within
        while not self._ends(min(LOOK, until - time.monotonic())):
            if self._comm.lost or time.monotonic() >= until:
                self._comm.stuck = True
                raise PeerLost("another rank is gone")

    def _ends(self, within: float) -> bool:
        with _loses_peers():
            try:
                self._work.wait(timedelta(seconds=max(within, 0.001)))
            except RuntimeError:
                if not self._work.is_completed():  # so this was our time
                    return False
                self._work.wait()
            return True


class Communicator:
    """Rank `rank` of the `size` processes of `group`. Every rank makes the same calls in the same order.

    One rank alone has no group: its collectives are moves. All methods raise PeerLost when another rank is known to be
    gone.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, group: Any = None, device: torch.device | None = None, hosts: Any = None
    ) -> None:
        """group: a backend of torch.distributed (ProcessGroupNCCL, ProcessGroupGloo), whose tensors are on `device`;
        hosts: one for tensors of the hosts, where that is another."""
        self.rank, self.size, self.lost, self.device = rank, size, False, device
        self.stuck = False  # a wait was given up, and its collective is still under way
        self._group, self._hosts = group, hosts or group
        if group is not None:
            _WITH_GROUPS.add(self)
        self._others_wait: weakref.WeakSet[Waiting] = weakref.WeakSet()
        self._meet: Callable[[str, Sequence[int]], Communicator] | None = None
        self._subsets: list[Communicator] = []
        self._divisions = 0

    def divide(self) -> int:
        """The number of a division into subsets, whose names it belongs into. A collective."""
        self._divisions += 1
        return self._divisions

    def meets_by(self, meet: Callable[[str, Sequence[int]], Communicator]) -> None:
        """How some of these ranks make a group of their own: `subset`."""
        self._meet = meet

    # ---- collectives over flat buffers

    def reduce_scatter(self, whole: torch.Tensor, part: torch.Tensor) -> Work:
        """Overwrites part [n] with the sum over ranks of piece `rank` of their whole [size * n]."""
        if self.size == 1:
            return _move(whole, part)
        return self._issue(lambda group: group._reduce_scatter_base(part, whole))

    def all_gather(self, part: torch.Tensor, whole: torch.Tensor) -> Work:
        """Overwrites whole [size * n] with all ranks' part [n], in order of rank."""
        if self.size == 1:
            return _move(part, whole)
        return self._issue(lambda group: group._allgather_base(whole, part))

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> Work:
        """Overwrites piece j of received [size * n] with piece `rank` of rank j's sent [size * n]."""
        if self.size == 1:
            return _move(sent, received)
        return self._issue(lambda group: group.alltoall_base(received, sent, [], []))

    def all_reduce(self, x: torch.Tensor, maximum: bool = False) -> Work:
        """Overwrites x with its sum, or maximum, over ranks: the same bits on every rank, since each element is reduced
        in one place and sent from there."""
        if self.size == 1:
            return Done()
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM  # type: ignore[assignment]
        return self._issue(lambda group: group.allreduce([x], options))

    def _issue(self, start: Callable[[Any], dist.Work]) -> Work:
        if self._group is self._hosts:
            return self._issue_on_hosts(start)
        self.check()
        with _loses_peers():
            return _Issued(start(self._group))

    def _issue_on_hosts(self, start: Callable[[Any], dist.Work]) -> _HostIssued:
        self.check()
        assert self._hosts is not None, "these ranks have not met"
        with _loses_peers():
            return _HostIssued(start(self._hosts), self)

    # ---- messages between two

    def send(self, x: torch.Tensor) -> Work:
        """To the other one of two ranks, which receives as many; x is contiguous. On a CPU it is copied first, so that
        its reader need not have come."""
        held = x.clone() if x.device.type == "cpu" else x
        return self._message(lambda group: group.send([held], 1 - self.rank, 0))

    def receive(self, x: torch.Tensor) -> Work:
        """Overwrites x, contiguous, with what the other one of two ranks sends: messages arrive in order."""
        return self._message(lambda group: group.recv([x], 1 - self.rank, 0))

    def _message(self, start: Callable[[Any], dist.Work]) -> Work:
        self.check()
        with _loses_peers():  # Gloo would take a wait that is given up for the end of the connection
            return _Issued(start(self._group))

    def hand_out(self, x: torch.Tensor, source: int) -> None:
        """Overwrites x, on the host and contiguous, with that of rank `source`."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        if self.size > 1:
            self._issue_on_hosts(lambda group: group.broadcast([x], options)).wait()

    # ---- fewer ranks

    def subset(self, name: str, members: Sequence[int], own: bool = False) -> Communicator:
        """Of some of these ranks, this one among them, in the order given; the same for a name on all of them. It ends
        with this one. A collective of its members. own: a group of its own also where all are members."""
        if len(members) == 1:
            return Communicator(device=self.device)
        if list(members) == list(range(self.size)) and not own:
            return self
        if self._meet is None:  # these ranks have not met: sizes only, for a plan
            return Communicator(members.index(self.rank), len(members), device=self.device)
        subset = self._meet(name, members)
        self._subsets.append(subset)
        return subset

    # ---- between hosts

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (pickled), by rank, on every rank."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        self._issue_on_hosts(lambda group: group.allreduce([sizes], dist.AllreduceOptions())).wait()
        longest = int(sizes.max())
        part, whole = (torch.zeros(n * longest, dtype=torch.uint8) for n in (1, self.size))
        part[: len(data)] = data
        self._issue_on_hosts(lambda group: group._allgather_base(whole, part)).wait()
        pieces = zip(whole.view(self.size, longest), sizes.tolist(), strict=True)
        return [pickle.loads(piece[:n].numpy().tobytes()) for piece, n in pieces]

    def barrier(self) -> None:
        """Return when every rank's host has come here."""
        self.gather(None)

    # ---- errors that not all ranks may meet

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """For checks that come before collectives: it ends when all ranks have made theirs. Where one's checks raise,
        that one raises the same (ConfigError for a file that cannot be read), and those that found nothing raise
        RuntimeError, and do not go on alone."""
        try:
            yield
        except Exception as error:
            self.gather(str(error))
            if isinstance(error, OSError | RecursionError):  # JSON may be nested without end
                raise ConfigError(f"cannot be read: {error}; mend it, or choose another") from error
            raise
        told = [f"rank {rank}: {error}" for rank, error in enumerate(self.gather(None)) if error is not None]
        if told:
            raise RuntimeError(f"only some ranks could go on; {told[0]}")

    @contextmanager
    def committed(self) -> Iterator[None]:
        """For what follows: the others go on, so an error of the user's, which leaves all as it was, is none any more.
        It is raised as RuntimeError, unless this rank is alone."""
        try:
            yield
        except ConfigError as error:
            if self.size == 1:
                raise
            raise RuntimeError("the ranks are not equal any more") from error

    # ---- who is still there

    def check(self) -> None:
        """Raise PeerLost when a rank is known to be gone; for long work between collectives."""
        if self.lost:
            raise PeerLost("another rank is gone")

    def abort(self) -> None:
        """End this rank's waits, from any thread: another rank is gone.

        Waits on hosts notice by themselves. NCCL's kernels would wait for ever; aborting them returns when all graphs
        that captured its collectives are gone.
        """
        group, self.lost = self._group, True
        for waiting in (*self._others_wait, *self._subsets):
            waiting.abort()
        self._end(group)

    def aborts(self, waiting: Waiting) -> None:
        """Let `abort` end the waits of `waiting` too, as long as that is in use."""
        self._others_wait.add(waiting)

    @property
    def met(self) -> bool:
        """Whether there are others, with whom there is contact."""
        return self._group is not None

    def part(self, within: float = PARTING) -> None:
        """Return when all ranks have come to their end, so that nobody misses what this one takes with it; or when
        another is gone or has not come after so many seconds, since this one ends all the same."""
        if self.met and not self.lost:
            with suppress(PeerLost):
                self._issue_on_hosts(lambda group: group.barrier(dist.BarrierOptions())).wait(within)

    def close(self) -> None:
        """Leave the groups and free their ports; for this rank the others are gone then. Graphs that captured its
        collectives must be gone."""
        for subset in self._subsets:
            subset.close()
        group, hosts, self._group, self._hosts = self._group, self._hosts, None, None
        if self.stuck:  # destroying a Gloo group waits for what is under way: this one stays for the process's life
            _keep(hosts)
        if not self.lost:
            self._end(group)
        self.lost = True

    def keep_groups(self) -> None:
        """In a process that was forked: destroying them would wait for threads that are not there."""
        for group in (self._group, self._hosts):
            _keep(group)

    def _end(self, group: Any) -> None:
        if group is not None and self.device is not None and self.device.type == "cuda":
            group.abort()


def _keep(thing: Any) -> None:
    """For the process's life."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


_WITH_GROUPS: weakref.WeakSet[Communicator] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [comm.keep_groups() for comm in _WITH_GROUPS])


@contextmanager
def _loses_peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one
        raise PeerLost(str(error)) from error


def _move(source: torch.Tensor, target: torch.Tensor) -> Work:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
    return Done()
