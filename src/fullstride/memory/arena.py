"""Where long-lived buffers come from: flat buffers with named views, scratch, and the account of both."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fullstride.errors import OutOfMemory
from fullstride.memory.pinned import pinned

ALIGNMENT = 256  # bytes at least; cuBLAS picks its algorithms by alignment
ROW_STEP = 64  # elements to which rows with spare columns are rounded up: a row of 16-bit numbers begins a cache line


@dataclass(frozen=True)
class FlatLayout:
    """Where the tensors of a group lie in one flat buffer, in elements: decayed tensors first, then the others.

    Every tensor starts at a multiple of 256 elements. The gaps belong to the buffer; they hold zeros and stay zero, so
    an operation over the whole buffer needs no list of tensors. A matrix with a margin has that many spare rows below
    it and spare columns beside it.
    """

    offsets: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    decayed: int  # elements before this one belong to tensors with weight decay
    size: int
    margins: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tensors: Iterable[tuple[str, tuple[int, ...], bool]], margins: Mapping[str, int] | None = None
    ) -> FlatLayout:
        """Layout of (name, shape, decay) records; decayed ones must come first. `margins`: of matrices, by name.

        Offsets are multiples of 256 elements, so that copies of the buffer in every dtype share the layout.
        """
        step, margins = ALIGNMENT, margins or {}
        offsets: dict[str, int] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        position = decayed = 0
        for name, shape, decay in tensors:
            assert not decay or decayed == position, "decayed tensors come first"
            offsets[name], shapes[name] = position, shape
            position += -(-math.prod(_with_margin(shape, margins.get(name, 0))) // step) * step
            decayed = position if decay else decayed
        return cls(offsets, shapes, decayed, position, margins)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The named tensors inside `flat` [size]."""
        return {name: self._view(flat, name, 0) for name in self.offsets}

    def extended_views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The matrices that have a margin, with it: [rows + margin, columns + margin]."""
        return {name: self._view(flat, name, margin) for name, margin in self.margins.items()}

    def _view(self, flat: torch.Tensor, name: str, margin: int) -> torch.Tensor:
        start, shape = self.offsets[name], self.shapes[name]
        held = _with_margin(shape, self.margins.get(name, 0))
        whole = flat[start : start + math.prod(held)].view(held)
        return whole[: shape[0] + margin, : shape[1] + margin] if name in self.margins else whole


def spare_columns(width: int, spare: int) -> int:
    """Elements from one row to the next of a matrix of `width` columns with `spare` more beside them."""
    return -(-(width + spare) // ROW_STEP) * ROW_STEP if spare else width


def _with_margin(shape: tuple[int, ...], margin: int) -> tuple[int, ...]:
    """What a tensor of `shape` occupies with its margin."""
    return (shape[0] + margin, spare_columns(shape[1], margin)) if margin else shape


class Arena:
    """Allocates long-lived buffers on one device and counts them by named segment."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.segments: dict[str, int] = {}  # bytes on the device
        self.pinned: dict[str, int] = {}  # bytes in host memory, where that is not the device's

    def zeros(
        self,
        segment: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """A zero-filled buffer, counted under `segment`. make: what allocates it, where that is not torch alone.

        Raises OutOfMemory with the segment and the missing bytes when the device cannot hold it. On torch's device
        `meta`, which holds shapes and no bytes, everything fits and is counted all the same: a plan.
        """
        size = math.prod(shape) * dtype.itemsize
        try:
            if self.device.type == "cpu" and size > free_memory(self.device, sum(self.segments.values())):
                raise MemoryError  # the kernel would promise it, and kill the process once it is used
            buffer = make(shape, dtype) if make else torch.zeros(shape, dtype=dtype, device=self.device)
        except (RuntimeError, MemoryError) as error:  # a GPU's OutOfMemoryError is a RuntimeError; a CPU's is plain
            plain = self.device.type != "cuda" and make is None
            if not plain and not isinstance(error, torch.OutOfMemoryError | MemoryError):
                raise
            raise OutOfMemory(shortage(self.device, segment, size, self.segments)) from error
        self.segments[segment] = self.segments.get(segment, 0) + size
        return buffer

    def host(self, segment: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zero-filled host buffer for copies to and from the device, which for a GPU is pinned and counted so.

        Raises OutOfMemory as `zeros` does, of the host.
        """
        host = torch.device("cpu")
        if self.device == host:
            return self.zeros(segment, shape, dtype)
        size = math.prod(shape) * dtype.itemsize
        try:
            if self.device.type == "meta":
                buffer = torch.zeros(shape, dtype=dtype, device=self.device)
            elif size > free_memory(host, sum(self.pinned.values())):
                raise MemoryError
            else:
                buffer = pinned(shape, dtype)
        except MemoryError as error:
            raise OutOfMemory(shortage(host, segment, size, self.pinned)) from error
        self.pinned[segment] = self.pinned.get(segment, 0) + size
        return buffer

    def free(self, segment: str, buffer: torch.Tensor) -> None:
        """Take `buffer`, which its holder drops, off the account."""
        self.segments[segment] -= buffer.numel() * buffer.itemsize

    def allocations(self) -> dict[str, dict[str, int]]:
        """{segment: {"device", "managed", "pinned", "pageable": bytes}}; a CPU's memory is pageable."""
        kind = "device" if self.device.type == "cuda" else "pageable"
        empty = {"device": 0, "managed": 0, "pinned": 0, "pageable": 0}
        names, pinned = {**self.segments, **self.pinned}, self.pinned
        return {n: empty | {kind: self.segments.get(n, 0), "pinned": pinned.get(n, 0)} for n in names}


def capacity(device: torch.device) -> int:
    """Bytes that tensors on `device` may take in all, those that are there included.

    On a GPU: what the driver has free and what torch has reserved, at most torch's limit for this process
    (torch.cuda.set_per_process_memory_fraction). On a CPU: this machine's memory.
    """
    if device.type != "cuda":
        return _physical_memory()
    free, total = torch.cuda.mem_get_info(device)
    limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free + torch.cuda.memory_reserved(device), limit)


def free_memory(device: torch.device, held: int) -> int:
    """Bytes that tensors on `device` may still take; on a CPU, where `held` are ours, what other programs leave."""
    if device.type == "cuda":
        return capacity(device) - torch.cuda.memory_allocated(device)
    return min(capacity(device) - held, _available_memory())


def shortage(device: torch.device, segment: str, asked: int, segments: dict[str, int]) -> str:
    """What an OutOfMemory says: `segment` asked for `asked` bytes beside what `segments` hold, and what was missing."""
    held = sum(segments.values())
    free = free_memory(device, held)
    missing = f"{in_bytes(asked - free)} are missing" if asked > free else "but not in one piece"
    by_segment = ", ".join(f"{name} {in_bytes(size)}" for name, size in segments.items()) or "nothing"
    return (
        f"out of memory on {device}: segment {segment!r} asks for {in_bytes(asked)}, {in_bytes(max(free, 0))} are "
        f"free, {missing}; held are {in_bytes(held)} ({by_segment})"
    )


def in_bytes(size: float) -> str:
    """`size` bytes as a person reads them: 1.23 GB (10^9 bytes), 45.60 MB, 7.89 kB."""
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if size >= 0.1 * u), (1e3, "kB"))
    return f"{size / unit:,.2f} {name}"


def _physical_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _available_memory() -> int:
    """Bytes that the kernel would still give this process, within its control group's limit, where Linux tells."""
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if not meminfo.is_file():
        return _physical_memory()
    kilobytes = next(line.split()[1] for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
    available = int(kilobytes) * 1024
    limit = group / "memory.max"
    if limit.is_file() and (most := limit.read_text().strip()) != "max":
        available = min(available, int(most) - int((group / "memory.current").read_text()))
    return available


class Scratch:
    """Named buffers that live for one block's forward or backward; the same name gives the same memory every time.

    A name has one user at a time; who reads it last is said where it is taken.
    """

    def __init__(self, arena: Arena, grows: bool = True) -> None:
        """`grows` False: a name is never taken larger than the first time, since captured graphs know its address."""
        self._arena, self._grows = arena, grows
        self._buffers: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, spare: int = 0) -> torch.Tensor:
        """The buffer `name`, uninitialised, as a contiguous tensor of `shape`.

        With `spare`, of a matrix: as [rows, columns + spare], whose rows may lie further apart.
        """
        if spare:
            rows, columns = shape
            whole = self(name, (rows, spare_columns(columns, spare)), dtype)
            return whole[:, : columns + spare]
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
