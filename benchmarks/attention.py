"""Attention at training sizes: torch's operations beside FlashAttention-4, one document a row and four, deterministic.

    PYTHONPATH=src python3 benchmarks/attention.py [part of a model's name]

Microseconds of a layer's forward + backward (kernels/attention, on views of a merged qkv), replayed from a CUDA graph.
The last column is four documents over one, both directions, by the fastest that there is for each.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch

from fullstride.kernels.attention import attention_bwd, attention_fwd
from fullstride.model.presets import preset
from fullstride.ops.attention import Documents
from fullstride.ops.rope import heads

SIZES = [
    ("qwen2.5-0.5b", 16, 1024),
    ("qwen2.5-1.5b", 16, 1024),
    ("qwen2.5-3b", 16, 1024),
    ("qwen2.5-7b", 16, 1024),
    ("qwen3-4b", 16, 1024),
    ("qwen3-4b", 32, 512),
]
CUTS = (0, 1 / 8, 1 / 2, 3 / 4)  # where a row's four documents begin
CALLS, REPLAYS = 8, 7


def microseconds(call: Callable[[], object]) -> float:
    """Median of one call's time."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / CALLS)
    return statistics.median(times)


def boundaries(rows: int, seq_len: int, packed: bool) -> torch.Tensor:
    starts = [row * seq_len + round(cut * seq_len) for row in range(rows) for cut in (CUTS if packed else CUTS[:1])]
    return torch.tensor([*starts, rows * seq_len], dtype=torch.int32, device="cuda")


def measure(name: str, rows: int, seq_len: int, documents: Documents) -> tuple[float, float]:
    """(forward, backward)."""
    c, n = preset(name), rows * seq_len
    num_q, num_kv, size = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    qkv = torch.randn(n, c.q_size + 2 * c.kv_size, dtype=torch.bfloat16, device="cuda")
    q, k, v = (heads(qkv, a, m, size) for a, m in ((0, num_q), (num_q, num_kv), (num_q + num_kv, num_kv)))
    dout = torch.randn(n, num_q, size, dtype=torch.bfloat16, device="cuda")
    out, saved = attention_fwd(q, k, v, documents)
    forward = microseconds(lambda: attention_fwd(q, k, v, documents))
    return forward, microseconds(lambda: attention_bwd(dout, q, k, v, out, saved, documents))


def main(part: str = "") -> None:
    libraries = (False, True) if find_spec("flash_attn") else (False,)
    columns = ("model", "B x T", "documents", "deterministic", "torch", "FlashAttention-4", "four over one")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name, rows, seq_len in SIZES:
        best: dict[tuple[bool, bool], float] = {}
        for deterministic in (False, True) if part in name else ():
            for packed in (False, True):
                bounds = boundaries(rows, seq_len, packed)
                times = [
                    measure(name, rows, seq_len, Documents(bounds, rows, seq_len, packed, deterministic, flash4))
                    for flash4 in libraries
                ]
                best[deterministic, packed] = min(map(sum, times))
                told = [f"{forward:.0f} + {backward:.0f}" for forward, backward in times] + ["-"] * (2 - len(times))
                more = f"{best[deterministic, True] / best[deterministic, False] - 1:+.0%}" if packed else ""
                what = f"{4 if packed else 1} | {'yes' if deterministic else 'no'}"
                print(f"| {name} | {rows} x {seq_len} | {what} | {told[0]} | {told[1]} | {more} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
