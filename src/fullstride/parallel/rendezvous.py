"""How ranks meet and become one Communicator: at a store of this machine, or at torchrun's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fullstride.parallel.comm import Communicator, PeerLost

LOOPBACK = "127.0.0.1"
# a rank that is gone is noticed in other ways, at once; this only ends a wait for one that hangs
TIMEOUT = timedelta(minutes=30)


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


def join_launched(device: torch.device) -> Communicator:
    """The same for a process that torchrun started, perhaps on several machines: its environment says where and who.

    Every call of a process meets the same call of the others.
    """
    global _launched
    with _meeting():
        store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        _launched += 1
        store = dist.PrefixStore(f"fullstride/{_launched}", store)
        comm = _group(store, rank, size, device, dist.ProcessGroupGloo.create_default_device())
    comm.watch(store)
    return comm


_launched = 0  # groups so far


def _group(store: dist.Store, rank: int, size: int, device: torch.device, gloo_device: Any) -> Communicator:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL connects the devices that are current
        group = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    else:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._devices = TIMEOUT, [gloo_device]
        group = dist.ProcessGroupGloo(store, rank, size, options)
    comm = Communicator(rank, size, group, device)

    def meet(name: str, members: Sequence[int]) -> Communicator:
        place = list(members).index(rank)
        with _meeting():
            return _group(dist.PrefixStore(name, store), place, len(members), device, gloo_device)

    comm.meets_by(meet)
    return comm


@contextmanager
def _meeting() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one
        raise PeerLost(f"the ranks did not meet: {error}") from error
