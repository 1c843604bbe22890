"""The peers of a GPU: other processes' memory, mapped here by CUDA's inter-process handles.

Copies between GPUs run on their copy engines (cuMemcpyAsync on mapped addresses). Signals are words in this rank's
memory, which peers write and this stream waits for by stream memory operations: these need no multiprocessor, order
what precedes them system-wide, and are captured in CUDA graphs, all of which NCCL's collectives by copy engines rely on
too. It is the driver's documented interface, called through ctypes: torch's symmetric memory would bring a registered
process group, sockets in /tmp, and NVLink multicast, which must not be used here.

https://docs.nvidia.com/cuda/cuda-driver-api: sections on memory management and stream memory operations.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from fullstride.parallel.comm import Communicator, Work
from fullstride.parallel.peers import Peers, Unreachable

WAIT, WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that opening takes
PATIENCE = 30.0  # seconds for a stream to come to its end


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class _MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams, of an operation on 32 bits: waitValue and writeValue have one layout."""

    _fields_ = (
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),  # a union of 32 and 64 bits; the machine is little-endian
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


_POINTER, _SIZE, _STREAM = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (ctypes.POINTER(ctypes.c_void_p),),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuIpcCloseMemHandle": (_POINTER,),
    "cuIpcGetMemHandle": (ctypes.POINTER(_IpcHandle), _POINTER),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_POINTER), _IpcHandle, ctypes.c_uint),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(_POINTER), ctypes.POINTER(_SIZE), _POINTER),
    "cuMemcpyAsync": (_POINTER, _POINTER, _SIZE, _STREAM),
    "cuMemsetD32Async": (_POINTER, ctypes.c_uint, _SIZE, _STREAM),
    "cuStreamBatchMemOp_v2": (_STREAM, ctypes.c_uint, ctypes.POINTER(_MemoryOperation), ctypes.c_uint),
}


def meeting(rank: int, size: int, which: int) -> list[tuple[int, int, tuple[int, int], int]]:
    """What `rank` does to meet the others: (WRITE or WAIT, whose memory, word [which, by whom], value), in order."""
    others = [other for other in range(size) if other != rank]
    told = [(WRITE, other, (which, rank), 1) for other in others]
    seen = [(WAIT, rank, (which, other), 1) for other in others]
    return told + seen + [(WRITE, rank, (which, other), 0) for other in others]


def load_driver() -> Callable[..., None]:
    """driver(name, *arguments) calls a function of CUDA's driver and raises Unreachable with its error's text.

    Raises OSError without a driver.
    """
    library = ctypes.CDLL("libcuda.so.1")
    for name, types in _FUNCTIONS.items():
        getattr(library, name).argtypes = types

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(library, name)(*arguments):
            text = ctypes.c_char_p()
            library.cuGetErrorString(code, ctypes.byref(text))
            raise Unreachable(f"{name}: {(text.value or b'unknown error').decode()} ({code})")

    return call


class CudaPeers(Peers):
    """Processes with a GPU each, on a stream of their own."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        """device: this rank's GPU."""
        super().__init__(comm)
        self._device = device
        self._stream = torch.cuda.Stream(self._device)
        self._mapped: list[int] = []  # what has been opened

    def _offer(self) -> Any:
        self._driver = load_driver()
        # word [which, rank] is set by that rank
        self._words, handle = self._allocate((2, self.size), torch.int32)
        self._context = ctypes.c_void_p()
        self._driver("cuCtxGetCurrent", ctypes.byref(self._context))
        self._operate([_MemoryOperation(WRITE, self._words.data_ptr(), 0)])  # where there are no such, it is said now
        return self._device.index, handle

    def _accept(self, offers: list[Any]) -> None:
        # graphs and the stream may not be done when this object is; nothing is left to be done at the process's end
        weakref.finalize(self, self._end_in_thread()).atexit = False
        opened = {}
        for rank in self.others:
            index, handle = offers[rank]
            known = index != self._device.index and index < torch.cuda.device_count()
            if known and not torch.cuda.can_device_access_peer(self._device.index, index):
                raise Unreachable(f"GPU {self._device.index} has no access to the memory of GPU {index}")
            opened[rank] = self._open(rank, handle, self._words)
        self._opened[self._words.data_ptr()] = opened
        self._comm.aborts(self)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """Of torch's allocator, whose segments are the driver's allocations, which is what can be shared."""
        tensor = torch.zeros(shape, dtype=dtype, device=self._device)
        torch.cuda.synchronize(self._device)  # it is zero before others see it
        base, size, handle = _POINTER(), _SIZE(), _IpcHandle()
        self._driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), tensor.data_ptr())
        self._driver("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return tensor, (bytes(handle.bytes), tensor.data_ptr() - base.value)

    def _open(self, rank: int, handle: Any, tensor: torch.Tensor) -> int:
        base, (opaque, offset) = _POINTER(), handle
        same = _IpcHandle((ctypes.c_ubyte * 64).from_buffer_copy(opaque))
        self._driver("cuIpcOpenMemHandle_v2", ctypes.byref(base), same, LAZY_PEER_ACCESS)
        self._mapped.append(base.value)
        return base.value + offset

    @contextmanager
    def after_now(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def issued(self) -> Work:
        return _Recorded(self._stream)

    def push(self, source: torch.Tensor, rank: int, place: torch.Tensor) -> None:
        self._copy(self._address(rank, place), source.data_ptr(), source)

    def pull(self, rank: int, place: torch.Tensor, target: torch.Tensor) -> None:
        self._copy(target.data_ptr(), self._address(rank, place), target)

    def _address(self, rank: int, place: torch.Tensor) -> int:
        return self._of(rank, place) + place.storage_offset() * place.itemsize

    def _copy(self, target: int, source: int, like: torch.Tensor) -> None:
        self._driver("cuMemcpyAsync", target, source, like.numel() * like.itemsize, self._stream.cuda_stream)

    def meet(self, which: int) -> None:
        operations = []
        for operation, whose, word, value in meeting(self.rank, self.size, which):
            place = self._words[word]
            address = place.data_ptr() if whose == self.rank else self._address(whose, place)
            operations.append(_MemoryOperation(operation, address, value, EQUAL if operation == WAIT else 0))
        self._operate(operations)

    def _operate(self, operations: list[_MemoryOperation]) -> None:
        array = (_MemoryOperation * len(operations))(*operations)
        self._driver("cuStreamBatchMemOp_v2", self._stream.cuda_stream, len(operations), array, 0)

    def abort(self) -> None:
        """End this rank's waits, from any thread: words that nobody sets any more are set here, as long as this is in
        use."""
        self._end_in_thread(weakref.ref(self))()

    def _end_in_thread(self, user: Callable[[], Any] = lambda: None) -> Callable[[], None]:
        """What starts `_end` for this object, without keeping it alive."""
        arguments = (self._driver, self._context, self._stream, self._words, self._mapped, user)
        return threading.Thread(target=_end, args=arguments, daemon=True).start


class _Recorded:
    """What is on a stream so far."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        self._event.wait()


def _end(
    driver: Callable[..., None],
    context: ctypes.c_void_p,
    stream: torch.cuda.Stream,
    words: torch.Tensor,
    mapped: list[int],
    user: Callable[[], Any],
) -> None:
    """Let `stream` come to its end, though others may be gone for whom it waits, and unmap their memory.

    user: gives None once nothing more is put on the stream.
    """
    with suppress(RuntimeError, Unreachable):  # the device is out of order, and with it all that is on it
        driver("cuCtxSetCurrent", context)
        aside = torch.cuda.Stream(stream.device)
        until = time.monotonic() + PATIENCE
        while user() is not None or (not stream.query() and time.monotonic() < until):
            driver("cuMemsetD32Async", words.data_ptr(), 1, words.numel(), aside.cuda_stream)
            time.sleep(0.01)
        while mapped and stream.query():
            driver("cuIpcCloseMemHandle", mapped.pop())
