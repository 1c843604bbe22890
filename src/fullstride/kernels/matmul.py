"""Matrix products by cuBLASLt, each with the algorithm that was fastest when it was timed. Not Triton.

cuBLAS picks an algorithm by rules. At training sizes the pick is 3 to 20 % slower than the best of those that the same
rules offer (docs/log.md), which only shows under a load that lasts, as the chip is limited by its power. So the first
product of a kind runs all that are offered in turn, and the choice holds for the process. The interface is C, called
through ctypes: the documentation of cublasLtMatmul and cublasLtMatmulAlgoGetHeuristic has the meaning of every name.
"""

from __future__ import annotations

import ctypes
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

MAX_ALGORITHMS = 16
PASSES, PASS_MS = 3, 3.0  # how often, and for how long at a time, an algorithm is timed

_TYPES = {torch.bfloat16: 14, torch.float16: 2}  # cudaDataType
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8  # cublasLtMatmulDescAttributes_t
_EPILOGUE_BIAS = 4
_MAX_WORKSPACE, _MIN_ALIGNMENT = 1, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t; of A, B, C, D


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t, which begins with cublasLtMatmulAlgo_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Matrix(NamedTuple):
    """A tensor as a column-major matrix: what lies in memory, and whether the product takes it transposed."""

    rows: int
    columns: int
    leading: int
    transposed: bool
    alignment: int  # bytes, up to 256

    @classmethod
    def of(cls, x: torch.Tensor) -> _Matrix:
        """A row-major tensor is its own transpose in column-major order, and so is the product of two.

        A single row or column may have any stride.
        """
        alignment = math.gcd(x.data_ptr(), 256)
        if x.stride(1) == 1:
            return cls(x.shape[1], x.shape[0], max(x.stride(0), x.shape[1]), False, alignment)
        assert x.stride(0) == 1, "one of the dimensions must be contiguous"
        return cls(x.shape[0], x.shape[1], max(x.stride(1), x.shape[0]), True, alignment)


class _Problem(NamedTuple):
    """What the choice of an algorithm depends on."""

    device: int
    dtype: torch.dtype
    a: _Matrix
    b: _Matrix
    out: _Matrix
    accumulate: bool
    bias: bool
    workspace_bytes: int


@functools.cache
def _library() -> Any:
    """libcublasLt as torch has loaded it."""
    return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed with cublasStatus_t {status}")


def _created(name: str, *arguments: Any) -> ctypes.c_void_p:
    """A new handle or descriptor; it lives as long as the process."""
    handle = ctypes.c_void_p()
    _call(name, ctypes.byref(handle), *arguments)
    return handle


def _set(name: str, descriptor: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _call(name, descriptor, ctypes.c_int(attribute), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    with torch.cuda.device(device):
        return _created("cublasLtCreate")


def _layout(matrix: _Matrix, dtype: torch.dtype) -> ctypes.c_void_p:
    sizes = ctypes.c_uint64(matrix.rows), ctypes.c_uint64(matrix.columns), ctypes.c_int64(matrix.leading)
    return _created("cublasLtMatrixLayoutCreate", ctypes.c_int(_TYPES[dtype]), *sizes)


class _Plan:
    """Descriptors of one problem and the algorithms that cuBLASLt offers for it. out^T = b^T a^T, column-major."""

    def __init__(self, problem: _Problem) -> None:
        self._problem = problem
        self._matmul = _created("cublasLtMatmulDescCreate", ctypes.c_int(_COMPUTE_FLOAT32), ctypes.c_int(_FLOAT32))
        for attribute, matrix in ((_TRANSA, problem.b), (_TRANSB, problem.a)):
            self._describe(attribute, ctypes.c_int32(matrix.transposed))
        if problem.bias:
            self._describe(_EPILOGUE, ctypes.c_uint32(_EPILOGUE_BIAS))
        matrices = problem.b, problem.a, problem.out, problem.out
        self._layouts = [_layout(matrix, problem.dtype) for matrix in matrices]
        preference = _created("cublasLtMatmulPreferenceCreate")
        workspace = ctypes.c_uint64(problem.workspace_bytes)
        _set("cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, workspace)
        for attribute, matrix in zip(_MIN_ALIGNMENT, matrices, strict=True):
            alignment = ctypes.c_uint32(matrix.alignment)
            _set("cublasLtMatmulPreferenceSetAttribute", preference, attribute, alignment)
        found, count = (_Algorithm * MAX_ALGORITHMS)(), ctypes.c_int()
        _call(
            "cublasLtMatmulAlgoGetHeuristic",
            _handle(problem.device),
            self._matmul,
            *self._layouts,
            preference,
            ctypes.c_int(MAX_ALGORITHMS),
            found,
            ctypes.byref(count),
        )
        _call("cublasLtMatmulPreferenceDestroy", preference)
        self._algorithms = [found[i] for i in range(count.value) if not found[i].state]
        self.best: int | None = None

    def _describe(self, attribute: int, value: Any) -> None:
        _set("cublasLtMatmulDescSetAttribute", self._matmul, attribute, value)

    def run(
        self,
        algorithm: int,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        alpha: float,
        bias: torch.Tensor | None,
        workspace: torch.Tensor,
    ) -> None:
        """Issue the product to the current stream."""
        a, b, out = (ctypes.c_void_p(x.data_ptr()) for x in tensors)
        if bias is not None:
            self._describe(_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
        layout_b, layout_a, layout_out, _ = self._layouts
        _call(
            "cublasLtMatmul",
            _handle(self._problem.device),
            self._matmul,
            ctypes.byref(ctypes.c_float(alpha)),
            *(b, layout_b, a, layout_a),
            ctypes.byref(ctypes.c_float(self._problem.accumulate)),
            *(out, layout_out, out, layout_out),
            ctypes.byref(self._algorithms[algorithm]),
            ctypes.c_void_p(workspace.data_ptr()),
            ctypes.c_size_t(workspace.numel()),
            ctypes.c_void_p(torch.cuda.current_stream(workspace.device).cuda_stream),
        )

    def choose(self, run: Callable[[int], None]) -> None:
        """Set `best` to the algorithm with which `run` is fastest; those that fail are out."""
        runnable = [i for i in range(len(self._algorithms)) if _runs(run, i)]
        if not runnable:
            raise RuntimeError(f"cuBLASLt offers no algorithm for {self._problem}")
        self.best = runnable[0]
        if len(runnable) > 1:
            times = _times([functools.partial(run, i) for i in runnable])
            self.best = min(zip(times, runnable, strict=True))[1]


def _runs(run: Callable[[int], None], algorithm: int) -> bool:
    try:
        run(algorithm)
    except RuntimeError:  # the heuristic offers some that a driver or a stride rules out
        return False
    return True


def _times(calls: list[Callable[[], None]]) -> list[float]:
    """Median milliseconds of each call, in passes that take turns, so that all meet the chip equally hot."""

    def timed(call: Callable[[], None], repeats: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            call()
        stop.record()
        return start, stop

    events = timed(calls[0], 3)
    torch.cuda.synchronize()
    repeats = max(1, round(PASS_MS / (events[0].elapsed_time(events[1]) / 3)))
    passes = [[timed(call, repeats) for call in calls] for _ in range(PASSES)]
    torch.cuda.synchronize()
    return [
        statistics.median(start.elapsed_time(stop) for start, stop in of_call) for of_call in zip(*passes, strict=True)
    ]


_plans: dict[_Problem, _Plan] = {}


class FastestMatmul:
    """See ops/matmul.Matmul, for bfloat16 and float16 on a GPU.

    The first product of a kind (shapes, strides, alignment, dtype, accumulation) takes a tenth of a second, in which
    the host waits; it cannot be inside a graph's capture. `workspace`: uint8, of one stream.
    """

    def __init__(self, workspace: torch.Tensor) -> None:
        self._workspace = workspace

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        *,
        accumulate: bool = False,
        alpha: float = 1.0,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Choose, where this kind of product is new, and run."""
        assert a.shape[1] == b.shape[0] and out.shape == (a.shape[0], b.shape[1]) and out.stride(1) == 1
        matrices = _Matrix.of(a), _Matrix.of(b), _Matrix.of(out)
        workspace_bytes = self._workspace.numel()
        problem = _Problem(out.device.index, out.dtype, *matrices, accumulate, bias is not None, workspace_bytes)
        plan = _plans.get(problem)
        if plan is None:
            plan = _plans[problem] = _Plan(problem)

        def run(algorithm: int) -> None:
            plan.run(algorithm, (a, b, out), alpha, bias, self._workspace)

        if plan.best is None:
            assert not torch.cuda.is_current_stream_capturing(), "a new kind of product inside a capture"
            held = out.cpu() if accumulate else None  # timing adds to it again and again
            plan.choose(run)
            if held is not None:
                out.copy_(held)
        assert plan.best is not None
        run(plan.best)
