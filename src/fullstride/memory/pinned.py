"""Host memory that a GPU's copy engines read and write by themselves.

A mapping of its own for each buffer, registered with CUDA. torch's pinned allocator rounds sizes up to powers of two
and marks the use of its blocks with events, which a CUDA graph's capture does not allow.
"""

from __future__ import annotations

import math
import mmap
import sys
from typing import Any

import torch


class Pinned(mmap.mmap):
    """Zero-filled memory of this process, page-locked for as long as it exists. Linux only."""

    _address: int
    _unregister: Any

    def __new__(cls, size: int) -> Pinned:
        """Raises MemoryError for `size` bytes that cannot be had or locked."""
        try:
            # not shared: nothing of it is in /dev/shm, whose size may be limited
            self = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(str(error)) from error
        # after a fork, what this process writes would go to copies of its pages, while the GPU keeps the old ones
        self.madvise(mmap.MADV_DONTFORK)
        self._address, self._unregister = torch.frombuffer(self, dtype=torch.uint8).data_ptr(), None
        cudart: Any = torch.cuda.cudart()
        if code := int(cudart.cudaHostRegister(self._address, size, 0)):
            raise MemoryError(f"cudaHostRegister gave error {code}")
        self._unregister = cudart.cudaHostUnregister
        return self

    def __del__(self) -> None:
        """Before the base class gives the memory back."""
        if self._unregister is None or sys.is_finalizing():  # the process ends: so does the memory
            return
        try:
            torch.cuda.synchronize()  # copies to and from it may be under way
        finally:
            self._unregister(self._address)


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zero-filled tensor in pinned memory, which goes with its last view. Raises MemoryError."""
    return torch.frombuffer(Pinned(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
