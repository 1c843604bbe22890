"""Buffers that live in host memory, and come to the device by turns.

    fetch(name) -> get(name) ... -> put(name)      to read and to write
    fetch(name) -> get(name) ...                   to read
    get(name) ... -> put(name)                     to overwrite whole
    settle()                                       at the end of a piece of work that is captured

`fetch` starts a copy to the device, ahead of its use; `put` starts one back, after what is issued so far. On a GPU copy
engines do both, on streams of their own, and the host waits for nothing. All that forks off the current stream joins it
again (in `get`, or in `settle`), as the capture of a CUDA graph demands.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Lane:
    """The copies to and from one device buffer: in their order, beside what is computed."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._stream = torch.cuda.Stream(buffer.device) if buffer.is_cuda else None
        self._under_way = False

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Overwrite target; begins after what is issued so far."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._under_way = True

    def wait(self) -> None:
        """What is issued from now on begins after the copies."""
        # a capture may wait only for what forked off in it, so not for a stream that has nothing to do
        if self._under_way and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._under_way = False


class Offloaded:
    """Flat buffers by name, all of them used on the device; some live there, the others in host memory."""

    def __init__(self, buffers: Mapping[str, torch.Tensor], hosts: Mapping[str, torch.Tensor]) -> None:
        """buffers: on the device; those of the names in `hosts`, which are of the same shape and dtype (and pinned
        where the device is a GPU), may share memory: whoever is fetched, or gotten to be overwritten, has it."""
        self._buffers, self._hosts = buffers, hosts
        # two buffers have two streams: one may come while the other goes back, since a link carries both ways at once
        lanes = {buffers[name].data_ptr(): Lane(buffers[name]) for name in hosts}
        self._lanes = {name: lanes[buffers[name].data_ptr()] for name in hosts}

    def __contains__(self, name: str) -> bool:
        return name in self._buffers

    def fetch(self, name: str) -> None:
        """Start to bring what `put` has put, unless it lives on the device."""
        if name in self._hosts:
            self._lanes[name].copy(self._hosts[name], self._buffers[name])

    def get(self, name: str) -> torch.Tensor:
        """The buffer on the device: what was fetched, or to be overwritten whole."""
        if name in self._hosts:
            self._lanes[name].wait()
        return self._buffers[name]

    def put(self, name: str) -> None:
        """The last writer of `get(name)` has been issued: start to copy it to where it lives."""
        if name in self._hosts:
            self._lanes[name].copy(self._buffers[name], self._hosts[name])

    def settle(self) -> None:
        """What is issued from now on begins after all copies."""
        for lane in self._lanes.values():
            lane.wait()
