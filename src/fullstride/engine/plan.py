"""How much memory a run takes, before it runs.

Most of it is counted by the code that allocates it: an engine on torch's device `meta`, whose tensors have shapes and
no bytes. Two parts come later than the engine and are written down here: the scratch that a micro-step takes
(`take_scratch`), and what libraries allocate inside one (`library_bytes`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fullstride.engine.step import Engine, EngineSettings
from fullstride.model.block import ATTENTION_DROPPED_BY
from fullstride.model.lora import LoraSettings
from fullstride.model.spec import ModelConfig
from fullstride.ops.matmul import WORKSPACE_BYTES
from fullstride.parallel.comm import Communicator

LIBRARIES = "libraries"  # the segment of what is not the arena's

# On a GPU, once: cuBLAS's workspaces (32 MiB for each of two streams on Hopper), partial sums of our kernels, and the
# code of the libraries, which is loaded as it is first called
ON_A_GPU = 400_000_000
SORTED_TOKEN = 32  # bytes a token while the embedding's backward sorts ids: keys and places, and both again
SMS = 148  # at most on GPUs of today; FlashAttention's deterministic backward splits its work among them


class Plan(NamedTuple):
    """{segment: bytes} on the device, and in pinned host memory, where that is not the device's."""

    device: dict[str, int]
    pinned: dict[str, int]


def predict(
    config: ModelConfig,
    lora: LoraSettings | None,
    settings: EngineSettings,
    device: str = "cuda",
    documents: int = 0,
    shapes: int = 1,
    ranks: int = 1,
) -> Plan:
    """Memory of one rank (of a pipeline's ranks the one that needs most) at the peak of training: steps, updates and
    evaluations, with an engine of these arguments.

    The arena's segments are exact, except that the products' workspace on a GPU is counted under `libraries`, which is
    an estimate from above. device: "cuda" or "cpu". documents: places for documents in a packed micro-batch (0: every
    row is one). shapes: how many numbers of places the run meets, each of which has CUDA graphs of its own.
    ranks: that train the same model and share out its state.

    Raises MemoryError where the host cannot stage a micro-batch of that size.
    """
    plans = (
        _predict_rank(config, lora, settings, device, documents, shapes, Communicator(rank, ranks))
        for rank in range(0, ranks, ranks // settings.pp)
    )
    return max(plans, key=lambda plan: sum(plan.device.values()))


def _predict_rank(
    config: ModelConfig,
    lora: LoraSettings | None,
    settings: EngineSettings,
    device: str,
    documents: int,
    shapes: int,
    comm: Communicator,
) -> Plan:
    assert settings.trains
    meta = torch.device("meta")
    with meta:  # tables that are computed on the host for the device (the rotary embedding's) cost nothing either
        engine = Engine(config, lora, settings, meta, comm)
        take_scratch(engine)
    held, pinned = engine.arena.segments, engine.arena.pinned
    if device == "cpu":  # all is in one memory
        held, pinned = {name: held.get(name, 0) + pinned.get(name, 0) for name in {**held, **pinned}}, {}
    return Plan(held | {LIBRARIES: library_bytes(engine, device, documents, shapes)}, pinned)


def take_scratch(engine: Engine) -> None:
    """Takes the scratch of a micro-step: what model/block, model/head and engine/step take as they go."""
    c, s, dtype, tp = engine.share, engine.settings, engine.dtype, engine.tools.tp
    tokens, chunk, width, ffn = s.rows * s.seq_len, _chunk(engine), c.hidden_size, c.intermediate_size
    scratch, adapted, stats = engine.tools.scratch, engine.tools.adapted, engine.tools.rope.cos.dtype

    def take(names: str, rows: int, columns: int) -> None:
        for name in names.split():
            scratch(name, (rows, columns), dtype)

    take("branch dnormed", tokens, width)
    if tp.sequence:
        scratch("ddown", (tokens, width), dtype, adapted.get("down", 0))
        scratch("do", (tokens, width), dtype, adapted.get("o", 0))
    if tp.sequence and adapted.keys() & {"qkv", "o", "gate_up", "down"}:  # rows with something beside them
        take("gathered_rows", tokens, width)
    take("dact", tokens, ffn)
    take("dattn", tokens, c.q_size)
    if any(stage.last for stage in engine.stages.values()):
        take("final_normed", tokens, width)
        take("head_x head_dx", chunk, width)
        take("logits", chunk, c.vocab_size)
        scratch("final_rstd", (tokens // tp.row_shares,), stats)
        for name, parts in (("loss_terms", 1), ("loss_terms_of_all", tp.size)) if tp.size > 1 else ():
            scratch(name, (parts, 3, chunk), stats)


def _chunk(engine: Engine) -> int:
    """Rows of the head's pieces."""
    return next(iter(engine.stages.values())).slots[0].batch.chunk


def library_bytes(engine: Engine, device: str, documents: int, shapes: int) -> int:
    """Estimate of what torch's allocator holds at the peak beside the arena's buffers; arguments as in `predict`."""
    s = engine.settings
    kept, scratch = attention_bytes(engine, documents)
    layers = 1
    if not s.recompute & ATTENTION_DROPPED_BY:
        layers = sum(len(stage.layers) * len(stage.slots) for stage in engine.stages.values())
    if device == "cpu":
        return layers * kept + scratch + reference_bytes(engine)
    # graphs keep what attention returned for as long as they live, a set for every shape; backwards share the memory of
    # one pool, beside which evaluations and first runs, which are no graphs, have their own
    pools = 2 if s.graphs else 1
    sets = shapes if s.graphs else 1
    return sets * layers * kept + pools * scratch + SORTED_TOKEN * s.rows * s.seq_len + WORKSPACE_BYTES + ON_A_GPU


def attention_bytes(engine: Engine, documents: int) -> tuple[int, int]:
    """(kept from a layer's forward to its backward, taken within its backward) by attention, for the costliest of the
    operations that these settings may call (kernels/attention)."""
    c, s, size = engine.share, engine.settings, engine.dtype.itemsize
    n, heads, q, kv = s.rows * s.seq_len, c.num_attention_heads, c.q_size, c.kv_size
    documents = max(documents, s.rows)
    wide = max(4, size)
    if size >= 4:  # keys and values repeated for their query heads, gradients of those, their sums; lse by document
        lse = max(n, documents * math.ceil(s.seq_len / 32) * 32) * heads * wide
        return n * q * size + lse, (2 * q + 3 * q + 2 * kv) * n * size + lse
    padded = n + 128 * documents
    splits = math.ceil(SMS / (documents * heads)) if s.deterministic else 1
    # gradients, those of keys and values by query head too; in float32 dq's sum and the rows' statistics
    grads = n * size * (q + 2 * kv + (2 * q if c.num_key_value_heads < heads else 0))
    sums = wide * padded * (splits * heads * 32 * math.ceil(c.head_dim / 32) + heads)
    return n * q * size + n * heads * wide, grads + sums


def reference_bytes(engine: Engine) -> int:
    """What the references' temporaries take on a CPU, where formulas are evaluated operation by operation: so many
    wide copies of AdamW's largest buffer, of a chunk's logits in the loss, or of the feed-forward in SwiGLU."""
    c, s = engine.share, engine.settings
    largest = max(len(unit.param) for unit in engine.state.trained.values())
    logits, ffn = _chunk(engine) * c.vocab_size, s.rows * s.seq_len * 2 * c.intermediate_size
    return max(4, engine.dtype.itemsize) * max(8 * largest, 4 * logits, 3 * ffn)
