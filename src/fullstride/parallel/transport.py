"""What carries weights and gradients from rank to rank: collectives (NCCL, Gloo), or copies between peers' memory.

The managers (parallel/weights, parallel/gradients) hold a transport that was chosen when they were made, and do not ask
which. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from fullstride.parallel.comm import Communicator, Done, Work
from fullstride.parallel.peers import Peers, connect

Zeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class Transport(Protocol):
    """Moves over flat buffers: `whole` [size * n] is as long as all ranks' `part` [n]. Each begins after what is issued
    so far, and until the wait for it neither side's buffers may be touched."""

    zeros: Zeros | None
    """Makes the memory that others read and write here; None: any memory will do. A collective."""

    def gather(self, part: torch.Tensor, whole: torch.Tensor) -> Work:
        """Overwrites whole with all ranks' part, in order of rank. Parts are of `zeros`, and change between fences."""
        ...

    def spread(self, part: torch.Tensor, whole: torch.Tensor) -> Work:
        """The same where part is this rank's piece of whole, which is of `zeros`: between fences, in which nobody reads
        the other pieces, and after the second of which they are there."""
        ...

    def exchange(self, sent: torch.Tensor, received: torch.Tensor) -> Work:
        """Overwrites piece j of received, which is of `zeros`, with piece `rank` of rank j's sent; what this rank would
        send itself may be left out."""
        ...

    def fence(self) -> Work:
        """What is issued after it, on any rank, begins after all that every rank has issued before it."""
        ...


class Collectives:
    """By the communicator's collectives, each of which waits for all ranks by itself."""

    zeros: Zeros | None = None

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.gather = self.spread = comm.all_gather
        self.exchange = comm.all_to_all

    def fence(self) -> Work:
        return Done()


class Copies:
    """By copies between peers.

    A gather pulls and needs no signal, since parts stay as they are between fences; so it waits for no rank that is
    behind. What has just been written is pushed. An exchange pushes too, when every rank's buffer is free: it was read
    by what that rank issued before.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.zeros: Zeros | None = peers.zeros

    def gather(self, part: torch.Tensor, whole: torch.Tensor) -> Work:
        peers, pieces = self._peers, whole.view(self._peers.size, -1)
        with peers.after_now():
            for rank in peers.others:
                peers.pull(rank, part, pieces[rank])
            pieces[peers.rank].copy_(part)
        return peers.issued()

    def spread(self, part: torch.Tensor, whole: torch.Tensor) -> Work:
        peers = self._peers
        with peers.after_now():
            for rank in peers.others:
                peers.push(part, rank, part)
        return peers.issued()

    def exchange(self, sent: torch.Tensor, received: torch.Tensor) -> Work:
        peers, place = self._peers, received.view(self._peers.size, -1)[self._peers.rank]
        pieces = sent.view(peers.size, -1)
        with peers.after_now():
            peers.meet(0)
            for rank in peers.others:
                peers.push(pieces[rank], rank, place)
            peers.meet(1)
        return peers.issued()

    def fence(self) -> Work:
        with self._peers.after_now():
            for which in (0, 1):
                self._peers.meet(which)
        return self._peers.issued()


def make_transport(comm: Communicator, by_copy: bool) -> Transport:
    """Copies where they are asked for and all ranks reach one another, else collectives. A collective itself.

    Each has a stream of its own, so what one waits for does not hold up another.
    """
    peers = connect(comm) if by_copy and comm.met else None
    return Collectives(comm) if peers is None else Copies(peers)
