"""The bare ceiling of training on this GPU: the time of its matrix products and attention, and nothing else.

What an update cannot avoid: for every layer the products of the four linears (forward, input gradient and, when the
weight trains, weight gradient), by the fastest algorithms known, and attention forward and backward, then the head's
products. Norms, activations, losses and the optimizer are left out. Measured, not read off a data sheet, since a
sustained load is limited by power.
"""

from __future__ import annotations

import statistics
import time

import torch

from fullstride.model.spec import ModelConfig, block_unit
from fullstride.ops.attention import Documents, attention_bwd, attention_fwd
from fullstride.ops.matmul import WORKSPACE_BYTES, Matmul, fastest_matmul, matmul
from fullstride.ops.rope import heads

WEIGHT_SETS = 4  # layers take turns among so many weights, so that none is still in the cache


class _Product:
    """y = x W^T with its backward, on random numbers."""

    def __init__(
        self, num_tokens: int, shape: tuple[int, ...], trains: bool, like: torch.Tensor, matmul: Matmul
    ) -> None:
        self._matmul, (rows, columns), new = matmul, shape, like.new_empty
        self._weights = [0.02 * torch.randn(shape, dtype=like.dtype, device=like.device) for _ in range(WEIGHT_SETS)]
        self._x = torch.randn(num_tokens, columns, dtype=like.dtype, device=like.device)
        self._y = torch.randn(num_tokens, rows, dtype=like.dtype, device=like.device)
        self._out, self._dx = new(num_tokens, rows), new(num_tokens, columns)
        self._dw = new(shape) if trains else None

    def run(self, turn: int) -> None:
        weight = self._weights[turn % WEIGHT_SETS]
        self._matmul(self._x, weight.t(), self._out)
        self._matmul(self._y, weight, self._dx)
        if self._dw is not None:
            self._matmul(self._y.t(), self._x, self._dw)


def bare_ceiling(
    config: ModelConfig,
    rows: int,
    seq_len: int,
    head_chunk: int,
    trains_weights: bool,
    dtype: torch.dtype,
    flash4: bool,
    seconds: float = 3.0,
) -> float:
    """Tokens per second of the products and attention of micro-steps of rows x seq_len tokens, on the current GPU.

    trains_weights: with weight gradients (full training) or without (LoRA). head_chunk: rows of the head's products.
    flash4: attention as in ops/attention.Documents. The work is replayed as a CUDA graph for about `seconds`; the
    median of single replays after a warm-up counts.
    """
    n, device = rows * seq_len, torch.device("cuda")
    like = torch.empty(0, dtype=dtype, device=device)
    shapes = {tensor.name: tensor.shape for tensor in block_unit(config, 0).tensors}
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    products = fastest_matmul(workspace) if dtype.itemsize == 2 else matmul
    linears = [_Product(n, shapes[name], trains_weights, like, products) for name in ("qkv", "o", "gate_up", "down")]
    head = _Product(head_chunk, (config.vocab_size, config.hidden_size), trains_weights, like, products)
    qkv = torch.randn(n, config.q_size + 2 * config.kv_size, dtype=dtype, device=device)
    num_q, num_kv, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, k, v = (heads(qkv, a, m, size) for a, m in ((0, num_q), (num_q, num_kv), (num_q + num_kv, num_kv)))
    boundaries = torch.arange(0, n + 1, seq_len, dtype=torch.int32, device=device)
    documents = Documents(boundaries, rows, seq_len, packed=False, flash4=flash4)

    def micro_step() -> None:
        for layer in range(config.num_hidden_layers):
            for linear in linears:
                linear.run(layer)
            out, saved = attention_fwd(q, k, v, documents)
            attention_bwd(out, q, k, v, out, saved, documents)
        for chunk in range(-(-n // head_chunk)):
            head.run(chunk)

    micro_step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        micro_step()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        started = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return n / statistics.median(times[len(times) // 3 :])
