"""Where long-lived buffers come from: flat buffers with named views, scratch, and the account of both."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fullstride.errors import OutOfMemory

ALIGNMENT = 256  # bytes at least; cuBLAS picks its algorithms by alignment


@dataclass(frozen=True)
class FlatLayout:
    """Where the tensors of a group lie in one flat buffer, in elements: decayed tensors first, then the others.

    Every tensor starts at a multiple of 256 elements. The gaps belong to the buffer; they hold zeros and stay zero, so
    an operation over the whole buffer needs no list of tensors.
    """

    offsets: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    decayed: int  # elements before this one belong to tensors with weight decay
    size: int

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, tuple[int, ...], bool]]) -> FlatLayout:
        """Layout of (name, shape, decay) records; decayed ones must come first.

        Offsets are multiples of 256 elements, so that copies of the buffer in every dtype share the layout.
        """
        step = ALIGNMENT
        offsets: dict[str, int] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        position = decayed = 0
        for name, shape, decay in tensors:
            assert not decay or decayed == position, "decayed tensors come first"
            offsets[name], shapes[name] = position, shape
            position += -(-math.prod(shape) // step) * step
            decayed = position if decay else decayed
        return cls(offsets, shapes, decayed, position)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The named tensors inside `flat` [size]."""
        return {
            name: flat[start : start + math.prod(self.shapes[name])].view(self.shapes[name])
            for name, start in self.offsets.items()
        }


class Arena:
    """Allocates long-lived buffers on one device and counts them by named segment."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.segments: dict[str, int] = {}

    def zeros(self, segment: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zero-filled buffer, counted under `segment`.

        Raises OutOfMemory with the segment and the missing bytes when the device cannot hold it.
        """
        size = math.prod(shape) * dtype.itemsize
        try:
            if self.device.type == "cpu" and size + sum(self.segments.values()) > _physical_memory():
                raise MemoryError  # the kernel would promise it, and kill the process once it is used
            buffer = torch.zeros(shape, dtype=dtype, device=self.device)
        except (RuntimeError, MemoryError) as error:  # a GPU's OutOfMemoryError is a RuntimeError; a CPU's is plain
            if self.device.type == "cuda" and not isinstance(error, torch.OutOfMemoryError):
                raise
            held = sum(self.segments.values())
            raise OutOfMemory(
                f"out of memory on {self.device}: segment {segment!r} asks for {size / 1e9:.2f} GB beside the "
                f"{held / 1e9:.2f} GB held ({', '.join(f'{k} {v / 1e9:.2f}' for k, v in self.segments.items())}); "
                "a smaller batch-size or seq-len, more recompute, or method lora needs less"
            ) from error
        self.segments[segment] = self.segments.get(segment, 0) + size
        return buffer

    def free(self, segment: str, buffer: torch.Tensor) -> None:
        """Take `buffer`, which its holder drops, off the account."""
        self.segments[segment] -= buffer.numel() * buffer.itemsize

    def allocations(self) -> dict[str, dict[str, int]]:
        """{segment: {"device", "managed", "pinned", "pageable": bytes}}; a CPU's memory is pageable."""
        kind = "device" if self.device.type == "cuda" else "pageable"
        empty = {"device": 0, "managed": 0, "pinned": 0, "pageable": 0}
        return {name: empty | {kind: size} for name, size in self.segments.items()}


def _physical_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Scratch:
    """Named buffers that live for one block's forward or backward; the same name gives the same memory every time.

    A name has one user at a time; who reads it last is said where it is taken.
    """

    def __init__(self, arena: Arena, grows: bool = True) -> None:
        """`grows` False: a name is never taken larger than the first time, since captured graphs know its address."""
        self._arena, self._grows = arena, grows
        self._buffers: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The buffer `name`, uninitialised, as a contiguous tensor of `shape`."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype:
            if buffer is not None:
                assert self._grows, f"scratch {name!r} was taken smaller first"
                self._arena.free("scratch", self._buffers.pop(name))
            buffer = self._buffers[name] = self._arena.zeros("scratch", (size,), dtype)
        return buffer[:size].view(shape)

    def high_water(self) -> dict[str, int]:
        """{name: bytes}."""
        return {name: buffer.numel() * buffer.itemsize for name, buffer in self._buffers.items()}
