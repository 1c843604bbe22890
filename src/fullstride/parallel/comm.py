"""What ranks say to one another: four collectives over flat buffers, on torch.distributed (NCCL on GPUs, Gloo on CPUs).

A collective is started and waited for apart, so that it overlaps what is computed in between:

    work = comm.reduce_scatter(whole, part)      it begins after what is issued so far
    ...
    work.wait()                                  what is issued from now on begins after it

NCCL runs on a stream of its own and `wait` makes the current stream wait for it, not the host, so both may be captured
in a CUDA graph. Gloo's threads begin at once, and there the host waits. Until then neither side's buffers may be
touched. Buffers are contiguous; `whole` is as long as all ranks' parts, and `part` may be this rank's piece of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

# torch 2.13 renamed them, and warns of the old names
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Let what follows wait for it."""


class _Done:
    """Nothing was to be sent."""

    def wait(self) -> None:
        return None


@dataclass(frozen=True)
class Communicator:
    """Rank `rank` of the `size` processes of `group`. Every rank makes the same calls in the same order.

    One rank alone has no group: its collectives are moves.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Communicator:
        """The communicator of this process in `group`."""
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def reduce_scatter(self, whole: torch.Tensor, part: torch.Tensor) -> Work:
        """Overwrites part [n] with the sum over ranks of piece `rank` of their whole [size * n]."""
        if self.size == 1:
            return _move(whole, part)
        return _issued(_reduce_scatter(part, whole, group=self.group, async_op=True))

    def all_gather(self, part: torch.Tensor, whole: torch.Tensor) -> Work:
        """Overwrites whole [size * n] with all ranks' part [n], in order of rank."""
        if self.size == 1:
            return _move(part, whole)
        return _issued(_all_gather(whole, part, group=self.group, async_op=True))

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> Work:
        """Overwrites piece j of received [size * n] with piece `rank` of rank j's sent [size * n]."""
        if self.size == 1:
            return _move(sent, received)
        return _issued(dist.all_to_all_single(received, sent, group=self.group, async_op=True))

    def all_reduce(self, x: torch.Tensor, maximum: bool = False) -> Work:
        """Overwrites x with its sum, or maximum, over ranks: the same bits on every rank, since each element is reduced
        in one place and sent from there."""
        if self.size == 1:
            return _Done()
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        return _issued(dist.all_reduce(x, op, group=self.group, async_op=True))


def _issued(work: Work | None) -> Work:
    assert work is not None, "this process is not in the group"
    return work


def _move(source: torch.Tensor, target: torch.Tensor) -> Work:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
    return _Done()
