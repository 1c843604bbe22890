"""Where the time of an update goes on a GPU: its kernels by kind, and the rest of the clock.

    products       matrix products (cuBLAS)
    attention      cuDNN, FlashAttention or the memory-efficient operation, with their helper kernels
    element_wise   our Triton kernels, torch's own (fills, sums, sorting), copies
    optimizer      everything that update() issues, whatever its name
    other          kernels whose name nobody here knows; they are listed
    idle           the wall clock of the update minus the time in which any kernel ran

A kind's time is the union of its kernels' intervals, so two of one kind side by side count once. Kernels of two kinds
side by side (on two streams) count for both, each by its own duration; `overlap` is what is counted twice that way, so

    products + attention + element_wise + optimizer + other + idle = wall clock + overlap
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

KINDS = ("products", "attention", "element_wise", "optimizer", "other", "idle")

# Parts of names, in lower case; the first kind that has one counts. Attention comes before products, since its kernels
# are built from the same libraries.
PARTS = (
    ("attention", ("cudnn", "flash", "fmha", "sdpa", "memeffattention", "compute_dot", "convert_dq", "reduce_head")),
    ("products", ("nvjet", "gemm", "gemv", "xmma", "cutlass", "splitk", "cublas")),
    ("element_wise", ("memcpy", "memset", "at::native", "at_cuda_detail", "cub::")),
    (
        "element_wise",  # ours (kernels/)
        (
            "accumulate_kernel",
            "adamw_kernel",
            "add_partials_kernel",
            "add_shares_kernel",
            "cross_entropy_kernel",
            "dropout_kernel",
            "gather_rows_kernel",
            "part_bwd_kernel",
            "part_terms_kernel",
            "rms_norm_bwd_kernel",
            "rms_norm_fwd_kernel",
            "rope_bwd_kernel",
            "rope_fwd_kernel",
            "scatter_rows_kernel",
            "stochastic_round_kernel",
            "sum_of_squares_kernel",
            "sum_partials_kernel",
            "sum_shares_kernel",
            "swiglu_bwd_kernel",
            "swiglu_fwd_kernel",
        ),
    ),
)
UPDATE_BEGINS = "sum_of_squares_kernel"  # the gradient's norm, which nothing but an update asks for


@dataclass(frozen=True)
class Kernel:
    """One piece of work on the GPU; start and end in seconds on any one clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class TimeByKind:
    """`seconds` by kind (KINDS) of an update that took `wall` seconds; see the head of this file for `overlap`.

    unrecognised: the names behind `other`.
    """

    seconds: dict[str, float]
    wall: float
    overlap: float
    unrecognised: tuple[str, ...]


def kind_of(name: str) -> str:
    """products, attention, element_wise or, for a name that nobody knows, other."""
    lower = name.lower()
    return next((kind for kind, parts in PARTS if any(part in lower for part in parts)), "other")


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end) intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def time_by_kind(kernels: Sequence[Kernel], wall: float) -> TimeByKind:
    """The account of one update (micro-steps, then the update) of `wall` seconds, from all kernels that ran in it."""
    norms = [k.start for k in kernels if UPDATE_BEGINS in k.name]
    assert norms, f"no {UPDATE_BEGINS} among {len(kernels)} kernels: where does the update begin?"
    begins = min(norms)
    intervals: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS[:-1]}
    unrecognised = set()
    for kernel in kernels:
        kind = "optimizer" if kernel.start >= begins else kind_of(kernel.name)
        intervals[kind].append((kernel.start, kernel.end))
        if kind == "other":
            unrecognised.add(kernel.name)
    seconds = {kind: covered(found) for kind, found in intervals.items()}
    busy = covered(pair for found in intervals.values() for pair in found)
    idle = max(0.0, wall - busy)  # two clocks: that of the host and that of the GPU differ by parts of a millionth
    overlap = sum(seconds.values()) - busy
    return TimeByKind(seconds | {"idle": idle}, wall, overlap, tuple(sorted(unrecognised)))


def gpu_kernels(work: Callable[[], object]) -> list[Kernel]:
    """What the current GPU ran during `work`, by torch's profiler; [] where the driver lets no one look."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from fullstride.trainer.profiling import on_gpu

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        work()
        torch.cuda.synchronize()
    return [Kernel(e.name, e.time_range.start * 1e-6, e.time_range.end * 1e-6) for e in on_gpu(profiler)]
