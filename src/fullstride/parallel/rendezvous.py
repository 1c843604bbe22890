"""How ranks meet and become one Communicator: at a store of this machine, or at torchrun's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from fullstride.parallel.comm import Communicator, PeerLost
from fullstride.parallel.presence import Presence

LOOPBACK = "127.0.0.1"
# a rank that is gone is noticed in other ways, at once; this only ends a wait for one that hangs
TIMEOUT = timedelta(minutes=30)
ANSWER = timedelta(seconds=20)


def serve() -> dist.TCPStore:
    """The store through which the ranks of one machine find each other, on a free port of the loopback."""
    with _meeting():
        return dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def join(port: int, rank: int, size: int, device: torch.device) -> Communicator:
    """Meet the other ranks of this machine at the store on `port` and form a group. Raises PeerLost."""
    with _meeting():
        # a store that does not answer at once is gone, and connecting cannot be interrupted
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=3))
        store.set_timeout(TIMEOUT)
        # what the ranks of one machine say is nobody else's business
        return _group(store, rank, size, device, dist.ProcessGroupGloo.create_device(hostname=LOOPBACK))


@cache
def presence() -> Presence:
    """Of this process among those that torchrun started, perhaps on several machines: its environment says where and
    who. Raises PeerLost."""
    with _meeting():
        return Presence(*_launcher())


def join_launched(device: torch.device) -> Communicator:
    """`join` for such a process. Every call of a process meets the same call of the others."""
    here = presence()
    meeting = here.meet()
    with _meeting():
        store, rank, size = _launcher()
        gloo_device = dist.ProcessGroupGloo.create_default_device()
        # they are all there: who does not answer soon has ended in between
        comm = _group(dist.PrefixStore(f"{meeting}", store), rank, size, device, gloo_device, ANSWER)
    here.guard(comm)
    return comm


def _launcher() -> tuple[dist.Store, int, int]:
    """A connection to the launcher's store, this process's rank, and the number of ranks."""
    store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    return dist.PrefixStore("fullstride", store), rank, size


def _group(
    store: dist.Store, rank: int, size: int, device: torch.device, gloo_device: Any, within: timedelta = TIMEOUT
) -> Communicator:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._devices = within, [gloo_device]
    group = hosts = dist.ProcessGroupGloo(dist.PrefixStore("hosts", store), rank, size, options)
    hosts._set_default_timeout(TIMEOUT)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL connects the devices that are current
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = TIMEOUT
        group = dist.ProcessGroupNCCL(store, rank, size, nccl_options)
    comm = Communicator(rank, size, group, device, hosts)

    def meet(name: str, members: Sequence[int]) -> Communicator:
        place = list(members).index(rank)
        with _meeting():
            return _group(dist.PrefixStore(name, store), place, len(members), device, gloo_device, within)

    comm.meets_by(meet)
    return comm


@contextmanager
def _meeting() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one
        raise PeerLost(f"the ranks did not meet: {error}") from error
