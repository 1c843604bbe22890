"""FlashAttention-4, of the package flash-attn-4: kernels in CuTe, compiled at their first use (seconds).

On a Hopper GPU its backward is faster than cuDNN's, and with document boundaries, or deterministic, both of its
directions are faster than FlashAttention-2's (docs/log.md). It takes bf16 and fp16, strided tokens and heads, and fewer
key/value heads; logsumexp is float32, [rows, H, T], or [H, N] for packed rows. Its deterministic backward orders its
additions by semaphores.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fullstride.ops.attention import Documents

Saved = tuple[torch.Tensor, ...]


def flash4_fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents) -> tuple[torch.Tensor, Saved]:
    """See ops/attention."""
    with _quiet():
        from flash_attn.cute.interface import _flash_attn_fwd  # type: ignore[import-not-found]

        inputs = (_shaped(x, documents) for x in (q, k, v))
        out, lse, *_ = _flash_attn_fwd(*inputs, causal=True, return_lse=True, **_boundaries(documents))
    return out.view(q.shape), (lse,)


def flash4_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    saved: Saved,
    documents: Documents,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ops/attention. `saved` may be cuDNN's: it is the same logsumexp."""
    (lse,) = saved
    if not documents.packed:
        lse = lse.reshape(documents.rows, q.shape[1], documents.seq_len)
    with _quiet():
        from flash_attn.cute.interface import _flash_attn_bwd  # type: ignore[import-not-found]

        inputs = (_shaped(x, documents) for x in (q, k, v, out, dout))
        options = {"causal": True, "deterministic": documents.deterministic, **_boundaries(documents)}
        dq, dk, dv = _flash_attn_bwd(*inputs, lse, **options)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _shaped(x_NHE: torch.Tensor, documents: Documents) -> torch.Tensor:
    """[rows, T, heads, E]; packed, [N, heads, E]."""
    return x_NHE if documents.packed else x_NHE.unflatten(0, (documents.rows, documents.seq_len))


def _boundaries(documents: Documents) -> dict[str, Any]:
    if not documents.packed:
        return {}
    bounds, longest = documents.boundaries, documents.seq_len
    return {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}


@contextmanager
def _quiet() -> Iterator[None]:
    """It and its compiler warn about themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
