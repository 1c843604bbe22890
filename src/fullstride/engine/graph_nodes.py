"""Memset nodes of a captured CUDA graph become kernel nodes. Not Triton: the driver's interface, through ctypes.

The driver replays a graph of nothing but kernels in a few microseconds, however many there are; a memset among them
costs the host 2.5 us at every replay (docs/log.md). cuBLAS and cuDNN put one before most of their kernels, for the few
counters by which blocks of a kernel share work. The documentation of the CUDA driver API's graph management has the
meaning of every name.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_MEMSET = 2  # CUgraphNodeType
_THREADS = 128

# memset of 32-bit words, one thread a word
_PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry memset_kernel(.param .u64 words, .param .u64 count, .param .u32 value)
{
    .reg .pred %outside;
    .reg .b32 %block, %threads, %thread, %what;
    .reg .b64 %first, %num, %index, %lane, %address;
    ld.param.u64 %first, [words];
    ld.param.u64 %num, [count];
    ld.param.u32 %what, [value];
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    cvt.u64.u32 %lane, %thread;
    mul.wide.u32 %index, %block, %threads;
    add.u64 %index, %index, %lane;
    setp.ge.u64 %outside, %index, %num;
    @%outside ret;
    shl.b64 %address, %index, 2;
    add.u64 %address, %first, %address;
    cvta.to.global.u64 %address, %address;
    st.global.u32 [%address], %what;
    ret;
}
"""


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS: `height` rows of `width` elements of `element_bytes`, `pitch` bytes apart."""

    _fields_ = (
        ("target", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("params", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def replace_memsets(graph: torch.cuda.CUDAGraph) -> int:
    """Put a kernel that does the same in the place of every memset node of `graph`, captured with keep_graph and not
    instantiated yet. Returns how many memsets stay: those that are no single run of whole 32-bit words."""
    raw, stay = ctypes.c_void_p(graph.raw_cuda_graph()), 0
    for node in _nodes("cuGraphGetNodes", raw):
        kind = ctypes.c_int()
        _call("cuGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value == _MEMSET:
            stay += not _replace_memset(raw, node)
    return stay


def _replace_memset(graph: ctypes.c_void_p, node: ctypes.c_void_p) -> bool:
    memset = _Memset()
    _call("cuGraphMemsetNodeGetParams", node, ctypes.byref(memset))
    num_bytes = memset.width * memset.element_bytes
    if memset.height != 1 or num_bytes % 4 or memset.target % 4:
        return False
    bits = 8 * memset.element_bytes
    word = sum((memset.value & ((1 << bits) - 1)) << shift for shift in range(0, 32, bits))
    values = ctypes.c_uint64(memset.target), ctypes.c_uint64(num_bytes // 4), ctypes.c_uint32(word)
    pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
    grid = (ctypes.c_uint * 3)(-(-num_bytes // 4 // _THREADS), 1, 1)
    block = (ctypes.c_uint * 3)(_THREADS, 1, 1)
    kernel = _Kernel(_memset_kernel(torch.cuda.current_device()), grid, block, 0, pointers)
    before, after = _nodes("cuGraphNodeGetDependencies", node), _nodes("cuGraphNodeGetDependentNodes", node)
    new = ctypes.c_void_p()
    sources = (ctypes.c_void_p * len(before))(*before)
    _call("cuGraphAddKernelNode_v2", ctypes.byref(new), graph, sources, len(before), ctypes.byref(kernel))
    targets = (ctypes.c_void_p * len(after))(*after)
    _call("cuGraphAddDependencies", graph, (ctypes.c_void_p * len(after))(*[new] * len(after)), targets, len(after))
    _call("cuGraphDestroyNode", node)
    return True


def _nodes(query: str, of: ctypes.c_void_p) -> list[Any]:
    """The node handles that `query` gives for a graph or a node."""
    count = ctypes.c_size_t()
    _call(query, of, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    if nodes:  # asked for none, the driver refuses
        _call(query, of, nodes, ctypes.byref(count))
    return [ctypes.c_void_p(node) for node in nodes]


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _memset_kernel(device: int) -> int:
    """The function above, loaded on `device`, the current one."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), _PTX)
    _call("cuModuleGetFunction", ctypes.byref(function), module, b"memset_kernel")
    assert function.value is not None
    return function.value


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed with CUresult {status}")
