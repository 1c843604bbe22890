"""Times every element-wise kernel at training sizes, beside a device copy that moves as many bytes in the same run.

    PYTHONPATH=src python3 benchmarks/kernels.py [part of a kernel's name]

Each kernel is captured many times over in a CUDA graph, on buffers that take turns so that none is still in the L2
cache, and the graph is replayed: the median of the replays, divided by the calls in it, is the time; the host's does
not count.
Bytes are what the kernel must move at least, as its docstring says; random bf16 values, 16,384 tokens.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fullstride.kernels.adamw import adamw
from fullstride.kernels.cross_entropy import cross_entropy
from fullstride.kernels.dropout import dropout
from fullstride.kernels.embedding import embedding_bwd
from fullstride.kernels.norm import sum_of_squares
from fullstride.kernels.rms_norm import rms_norm_bwd, rms_norm_fwd
from fullstride.kernels.rope import rope_bwd, rope_fwd
from fullstride.kernels.rounding import stochastic_round
from fullstride.kernels.rows import gather_rows, scatter_rows
from fullstride.kernels.swiglu import swiglu_bwd, swiglu_fwd
from fullstride.ops.adamw import AdamWBuffers, hyper_values
from fullstride.ops.dropout import keep_scale, keep_threshold
from fullstride.ops.rope import Rope, rope_frequencies, rope_tables

N, V = 16384, 151936
FLAT = 2**27  # elements of a flat buffer
CACHE = 2**29  # bytes between two uses of a buffer: several times the L2 cache
REPLAYS = 21


Call = Callable[[], object]


@dataclass(frozen=True)
class Model:
    name: str
    D: int
    F: int
    H: int
    K: int
    E: int
    has_norm: bool


MODELS = [
    Model("0.5B", 896, 4864, 14, 2, 64, False),
    Model("4B", 2560, 9728, 32, 8, 128, True),
    Model("7B", 3584, 18944, 28, 4, 128, False),
]


@dataclass(frozen=True)
class Benchmark:
    """`make` allocates buffers and returns a call on them."""

    name: str
    size: str
    num_bytes: int
    make: Callable[[], Call]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def randint(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, dtype=torch.int32, device="cuda")


@functools.cache
def copy_rate(num_bytes: int) -> float:
    """Bytes per second of a device copy that reads and writes so many in all, 0.5 GB at most."""
    num_bytes = min(num_bytes, 4 * FLAT)

    def make() -> Call:
        source, target = randn(num_bytes // 4), randn(num_bytes // 4)
        return lambda: target.copy_(source)

    return num_bytes / seconds(Benchmark("copy", "", num_bytes, make))


def of_model(m: Model) -> Iterator[Benchmark]:
    size, row = f"{m.name}: D={m.D}", 2 * N * m.D

    def norm_fwd() -> Call:
        x, branch, residual, normed = (randn(N, m.D) for _ in range(4))
        weight, rstd = randn(m.D), randn(N, dtype=torch.float32)
        return lambda: rms_norm_fwd(x, branch, weight, 1e-6, residual, normed, rstd)

    def norm_bwd() -> Call:
        dnormed, x, dresidual, dx = (randn(N, m.D) for _ in range(4))
        weight, dweight, rstd = randn(m.D), randn(m.D), randn(N, dtype=torch.float32)
        return lambda: rms_norm_bwd(dnormed, x, weight, rstd, dresidual, dx, dweight)

    def gather() -> Call:
        x, out, index = randn(N, m.D), randn(N, m.D), torch.randperm(N, device="cuda").int()
        return lambda: gather_rows(x, index, out)

    def scatter() -> Call:
        x, out, index = randn(N, m.D), randn(N, m.D), torch.randperm(N, device="cuda").int()
        return lambda: scatter_rows(x, index, out)

    def drop() -> Call:
        x, out, rng = randn(N, m.D), randn(N, m.D), torch.tensor([1, 2, 3, 0], device="cuda")
        threshold = keep_threshold(0.1)
        return lambda: dropout(x, threshold, keep_scale(threshold), rng, 7, out)

    # ids as skewed as words are; about a quarter of the tokens are different
    ids = (torch.rand(N, device="cuda") ** 6 * (V - 1)).int()

    def embed() -> Call:
        dout, dtable = randn(N, m.D), randn(V, m.D)
        return lambda: embedding_bwd(dout, ids, dtable)

    yield Benchmark("rms_norm_fwd", size, 4 * row, norm_fwd)
    yield Benchmark("rms_norm_bwd", size, 4 * row, norm_bwd)
    yield Benchmark("gather_rows", size, 2 * row, gather)
    yield Benchmark("scatter_rows", size, 2 * row, scatter)
    yield Benchmark("dropout", size, 2 * row, drop)
    yield Benchmark("embedding_bwd", size, row + 4 * int(ids.unique().numel()) * m.D, embed)
    yield from of_heads(m)
    yield from of_mlp(m)


def of_heads(m: Model) -> Iterator[Benchmark]:
    size, token = f"{m.name}: H={m.H} K={m.K} E={m.E}" + (" norm" if m.has_norm else ""), 2 * N * m.E
    width = (m.H + 2 * m.K) * m.E
    cos, sin = (table.float().cuda() for table in rope_tables(rope_frequencies(m.E, 1e6), 1024))
    rope, positions = Rope(cos, sin, 1e-6), (torch.arange(N, device="cuda") % 1024).int()
    q_norm, k_norm = (randn(m.E), randn(m.E)) if m.has_norm else (None, None)

    def forward() -> Call:
        qkv, out = randn(N, width), randn(N, width)
        return lambda: rope_fwd(qkv, positions, rope, q_norm, k_norm, m.H, m.K, out)

    def backward() -> Call:
        dq, dk, dv = randn(N, m.H, m.E), randn(N, m.K, m.E), randn(N, m.K, m.E)
        qkv, dqkv = randn(N, width), randn(N, width)
        dq_norm, dk_norm = (randn(m.E), randn(m.E)) if m.has_norm else (None, None)
        grads = dq_norm, dk_norm, None if m.has_norm else randn(width)
        return lambda: rope_bwd(dq, dk, dv, qkv, positions, rope, q_norm, k_norm, dqkv, *grads)

    rotated = (m.H + m.K) * token
    yield Benchmark("rope_fwd", size, 2 * rotated, forward)
    yield Benchmark("rope_bwd", size, 2 * N * 2 * width + (rotated if m.has_norm else 0), backward)


def of_mlp(m: Model) -> Iterator[Benchmark]:
    size, column = f"{m.name}: F={m.F}", 2 * N * m.F

    def forward() -> Call:
        gate_up, out = randn(N, 2 * m.F), randn(N, m.F)
        return lambda: swiglu_fwd(gate_up, out)

    def backward() -> Call:
        dout, gate_up, dgate_up = randn(N, m.F), randn(N, 2 * m.F), randn(N, 2 * m.F)
        return lambda: swiglu_bwd(dout, gate_up, dgate_up)

    yield Benchmark("swiglu_fwd", size, 3 * column, forward)
    yield Benchmark("swiglu_bwd", size, 5 * column, backward)


def of_head_and_update() -> Iterator[Benchmark]:
    rng = torch.tensor([1, 2, 3], device="cuda")
    hyper = torch.tensor([*hyper_values(1e-4, 0.9, 0.95, 1e-8, 0.1, 5), 1.0], dtype=torch.float64, device="cuda")

    def loss(num_rows: int, backward: bool) -> Callable[[], Call]:
        def make() -> Call:
            logits, targets, z_loss = randn(num_rows, V), randint(V, num_rows), torch.zeros(1, device="cuda")
            loss_M, lse_M = (torch.empty(num_rows, device="cuda") for _ in range(2))
            return lambda: cross_entropy(logits, targets, z_loss, loss_M, lse_M, backward)

        return make

    def update(master: bool, moments: torch.dtype) -> Callable[[], Call]:
        def make() -> Call:
            b = AdamWBuffers(
                param=randn(FLAT),
                master=randn(FLAT, dtype=torch.float32) if master else None,
                grad=randn(FLAT),
                m=randn(FLAT, dtype=moments),
                v=randn(FLAT, dtype=moments).abs(),
                tensor=1,
            )
            return lambda: adamw(b, hyper, True, rng)

        return make

    def norm() -> Call:
        x, out = randn(FLAT), torch.empty(1, device="cuda")
        return lambda: sum_of_squares(x, out)

    def round_all() -> Call:
        x, out = randn(FLAT, dtype=torch.float32), randn(FLAT)
        return lambda: stochastic_round(x, rng, 7, out)

    yield Benchmark("cross_entropy", f"loss, 4096 x {V}", 2 * 4096 * V, loss(4096, False))
    yield Benchmark("cross_entropy", f"both, 4096 x {V}", 4 * 4096 * V, loss(4096, True))
    yield Benchmark("cross_entropy", f"both, 1024 x {V}", 4 * 1024 * V, loss(1024, True))
    yield Benchmark("adamw", "bf16 w, g, m, v", 14 * FLAT, update(False, torch.bfloat16))
    yield Benchmark("adamw", "bf16 w, g; float32 m, v", 22 * FLAT, update(False, torch.float32))
    yield Benchmark("adamw", "bf16 w, g; float32 master, m, v", 28 * FLAT, update(True, torch.float32))
    yield Benchmark("sum_of_squares", "bf16", 2 * FLAT, norm)
    yield Benchmark("stochastic_round", "float32 to bf16", 6 * FLAT, round_all)


def seconds(b: Benchmark) -> float:
    """Median time of one call."""
    calls = [b.make() for _ in range(max(2, -(-CACHE // b.num_bytes)))]
    turns = max(1, 16 // len(calls))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for call in calls:
                call()
    times = []
    for _ in range(REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times) / (turns * len(calls))


def main() -> None:
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    torch.manual_seed(0)
    largest = copy_rate(4 * FLAT) / 1e12
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a device copy of 0.5 GB: {largest:.2f} TB/s\n")
    print("| kernel | size | us | TB/s | share of a copy as large |\n|---|---|---|---|---|")
    for model in MODELS:
        for b in of_model(model):
            report(b, part)
    for b in of_head_and_update():
        report(b, part)


def report(b: Benchmark, part: str) -> None:
    if part not in b.name:
        return
    time = seconds(b)
    rate = b.num_bytes / time
    share = rate / copy_rate(b.num_bytes)
    print(f"| {b.name} | {b.size} | {time * 1e6:.1f} | {rate / 1e12:.2f} | {share:.0%} |", flush=True)
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
