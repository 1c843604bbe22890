"""Causal attention within documents: see ops/attention. Not Triton: torch's explicit forward and backward operations.

bf16 and fp16, one document a row, heads up to 128 wide: `_scaled_dot_product_cudnn_attention` (cuDNN) on views
[rows, heads, T, E]; it saves logsumexp [rows, H, T], float32.
bf16 and fp16, packed, or deterministic, or wider heads: `_flash_attention_forward` (FlashAttention-2, variable length);
it saves logsumexp [H, N], float32.
With documents.flash4 and heads of 64 or 128, FlashAttention-4 (kernels/flash4) takes the place of FlashAttention-2, and
of cuDNN's backward.
float32: `_efficient_attention_forward` (memory-efficient, of CUTLASS, variable length); it saves logsumexp
[documents, H, T rounded up to 32], float32.

All take strided rows and heads and scale by 1/sqrt(E) themselves. cuDNN and FlashAttention take fewer key/value heads
as they are; the float32 operation gets them repeated, and their gradients are summed here. The variable-length ones
read the boundaries on the device, so a captured graph sees new ones; an empty document costs idle blocks, and in
FlashAttention's backward 128 * H * E float32 of scratch. cuDNN's backward adds with atomics; FlashAttention's is
deterministic under torch's flag, which is set around that one call; the float32 one is when keys are not split among
blocks. Multiply-adds: 2 E for each query, key and head forward, 5 E backward; half of the pairs are masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fullstride.errors import ConfigError
from fullstride.kernels.flash4 import flash4_bwd, flash4_fwd

if TYPE_CHECKING:
    from fullstride.ops.attention import Documents

CAUSAL = 1  # custom_mask_type of the memory-efficient operation: causal, aligned to the upper left corner
CUDNN_MAX_HEAD_DIM = 128  # cuDNN's backward takes wider heads in some versions only
FLASH4_HEAD_DIMS = (64, 128)  # of others some fail on Hopper

Saved = tuple[torch.Tensor, ...]
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attention_fwd(
    q_NHE: torch.Tensor, k_NKE: torch.Tensor, v_NKE: torch.Tensor, documents: Documents
) -> tuple[torch.Tensor, Saved]:
    """See ops/attention. ConfigError for a head size or a dtype that none of the operations takes."""
    _check(q_NHE)
    if q_NHE.dtype == torch.float32:
        return _efficient_fwd(q_NHE, k_NKE, v_NKE, documents)
    if _takes_cudnn(q_NHE, documents):
        return _cudnn_fwd(q_NHE, k_NKE, v_NKE, documents)
    if _takes_flash4(q_NHE, documents):
        return flash4_fwd(q_NHE, k_NKE, v_NKE, documents)
    return _flash_fwd(q_NHE, k_NKE, v_NKE, documents)


def attention_bwd(
    dout_NHE: torch.Tensor,
    q_NHE: torch.Tensor,
    k_NKE: torch.Tensor,
    v_NKE: torch.Tensor,
    out_NHE: torch.Tensor,
    saved: Saved,
    documents: Documents,
) -> Grads:
    """See ops/attention. The gradients are new, and contiguous in their last dimension."""
    dout = dout_NHE.contiguous()  # cuDNN's plans are cached by q, k and v alone: dout must always look the same
    if q_NHE.dtype == torch.float32:
        return _efficient_bwd(dout, q_NHE, k_NKE, v_NKE, out_NHE, saved, documents)
    if _takes_flash4(q_NHE, documents):
        return flash4_bwd(dout, q_NHE, k_NKE, v_NKE, out_NHE, saved, documents)
    if _takes_cudnn(q_NHE, documents):
        return _cudnn_bwd(dout, q_NHE, k_NKE, v_NKE, out_NHE, saved, documents)
    return _flash_bwd(dout, q_NHE, k_NKE, v_NKE, out_NHE, saved, documents)


def check_head_dim(head_dim: int) -> None:
    """See ops/attention."""
    if head_dim % 8 or head_dim > 256:
        raise ConfigError(
            "attention on a GPU needs head_dim to be a multiple of 8, at most 256; this model has "
            f"head_dim={head_dim}. Train it on the CPU, or change the model."
        )


def _check(q_NHE: torch.Tensor) -> None:
    check_head_dim(q_NHE.shape[2])
    if q_NHE.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ConfigError(
            f"attention on a GPU takes bfloat16, float16 or float32, not {str(q_NHE.dtype).removeprefix('torch.')}. "
            "Choose one of those, or train on the CPU."
        )


def _takes_cudnn(q_NHE: torch.Tensor, documents: Documents) -> bool:
    plain = not documents.packed and not documents.deterministic
    # in rows of one token its backward crashes
    return plain and q_NHE.shape[2] <= CUDNN_MAX_HEAD_DIM and documents.seq_len > 1


def _takes_flash4(q_NHE: torch.Tensor, documents: Documents) -> bool:
    return documents.flash4 and q_NHE.shape[2] in FLASH4_HEAD_DIMS


def _unused(x: torch.Tensor) -> torch.Tensor:
    """Stands for the state of a random number generator: without dropout the operations do not look at it."""
    return torch.empty(2, dtype=torch.uint64, device=x.device)


def _by_row(x_NHE: torch.Tensor, documents: Documents) -> torch.Tensor:
    """The [rows, heads, T, E] view of x."""
    return x_NHE.unflatten(0, (documents.rows, documents.seq_len)).transpose(1, 2)


def _by_token(x_BHTE: torch.Tensor) -> torch.Tensor:
    return x_BHTE.transpose(1, 2).flatten(0, 1)


def _cudnn_fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents) -> tuple[torch.Tensor, Saved]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(_by_row(x, documents) for x in (q, k, v)), None, True, 0.0, True, False
    )
    return _by_token(out), (lse,)


def _cudnn_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    saved: Saved,
    documents: Documents,
) -> Grads:
    (lse,), length = saved, documents.seq_len
    inputs = (_by_row(x, documents) for x in (dout, q, k, v, out))
    rng = _unused(q)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *inputs, lse, rng, rng, None, None, None, length, length, 0.0, True
    )
    dq, dk, dv = (_by_token(x) for x in grads)
    return dq, dk, dv


def _flash_fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents) -> tuple[torch.Tensor, Saved]:
    bounds, length = documents.boundaries, documents.seq_len
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, bounds, bounds, length, length, 0.0, True, False)
    return out, (lse,)


def _flash_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    saved: Saved,
    documents: Documents,
) -> Grads:
    (lse,), bounds, length = saved, documents.boundaries, documents.seq_len
    rng = _unused(q)
    with _deterministic(documents.deterministic):
        return torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, bounds, bounds, length, length, 0.0, True, rng, rng
        )


@contextmanager
def _deterministic(enabled: bool) -> Iterator[None]:
    """Sets torch's flag, without its filling of every new tensor, and restores both."""
    if not enabled:
        yield
        return
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # its attribute is made at run time
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill


def _repeat_heads(x_NKE: torch.Tensor, num_heads: int) -> torch.Tensor:
    num_tokens, num_kv_heads, head_dim = x_NKE.shape
    group = num_heads // num_kv_heads
    return x_NKE[:, :, None].expand(-1, -1, group, -1).reshape(num_tokens, num_heads, head_dim)


def _sum_groups(dx_NHE: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    return dx_NHE.unflatten(1, (num_kv_heads, -1)).sum(2)


def _efficient_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents
) -> tuple[torch.Tensor, Saved]:
    bounds, length, num_heads = documents.boundaries, documents.seq_len, q.shape[1]
    inputs = (x[None] for x in (q, _repeat_heads(k, num_heads), _repeat_heads(v, num_heads)))
    out, lse, *_ = torch.ops.aten._efficient_attention_forward(
        *inputs, None, bounds, bounds, length, length, 0.0, CAUSAL, True
    )
    return out[0], (lse,)


def _efficient_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    saved: Saved,
    documents: Documents,
) -> Grads:
    (lse,), bounds, length = saved, documents.boundaries, documents.seq_len
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    inputs = (x[None] for x in (dout, q, _repeat_heads(k, num_heads), _repeat_heads(v, num_heads)))
    rng = _unused(q)
    dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
        *inputs,
        None,
        out[None],
        bounds,
        bounds,
        length,
        length,
        lse,
        0.0,
        rng,
        rng,
        CAUSAL,
        False,
        num_splits_key=1 if documents.deterministic else None,
    )
    return dq[0], _sum_groups(dk[0], num_kv_heads), _sum_groups(dv[0], num_kv_heads)
