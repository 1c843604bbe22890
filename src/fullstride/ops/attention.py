"""Causal attention within documents, grouped queries (Vaswani et al. 2017; Ainslie et al. 2023, arXiv 2305.13245).

For each document and query head, with its key/value head: S = q k^T / sqrt(E), masked to keys at or before the query;
P = softmax(S); out = P v. Tokens of different documents never see each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fullstride.ops.numerics import check_rows, wide

CPU_QUERIES = 256  # at a time: a long document's scores stay in the cache, and its masked half is mostly skipped


@dataclass(frozen=True)
class Documents:
    """Where the documents of a micro-batch of `rows` x `seq_len` tokens lie.

    boundaries: int32 [documents + 1] on the device, ascending from 0 to rows * seq_len (cu_seqlens); trailing entries
    may repeat (empty documents), so that its length need not change. packed: False promises one document a row, which
    allows faster kernels. deterministic: the backward must give the same bits every time, on a GPU too. flash4: there,
    use FlashAttention-4, a package of its own, where it is faster.
    """

    boundaries: torch.Tensor
    rows: int
    seq_len: int
    packed: bool
    deterministic: bool = False
    flash4: bool = False


def _grouped(x_QHE: torch.Tensor, num_kv: int) -> torch.Tensor:
    """[K, H/K * Q, E]: the query heads that share a key/value head stand below one another."""
    return x_QHE.transpose(0, 1).reshape(num_kv, -1, x_QHE.shape[2])


def _ungrouped(x_KGE: torch.Tensor, num_queries: int) -> torch.Tensor:
    """The inverse of _grouped: [Q, H, E]."""
    return x_KGE.reshape(-1, num_queries, x_KGE.shape[2]).transpose(0, 1)


def _scores_ref(q_QHE: torch.Tensor, k_TKE: torch.Tensor) -> torch.Tensor:
    """Masked scores [K, H/K * Q, T] of the last Q positions of T."""
    (num_queries, _, head_dim), (length, num_kv, _) = q_QHE.shape, k_TKE.shape
    scores = _grouped(q_QHE * head_dim**-0.5, num_kv) @ k_TKE.permute(1, 2, 0)
    future = torch.ones(num_queries, length, dtype=torch.bool, device=scores.device).triu(1 + length - num_queries)
    scores.view(num_kv, -1, num_queries, length).masked_fill_(future, float("-inf"))
    return scores


def attention_fwd_ref(
    q_QHE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out_QHE, lse_HQ) of the last Q positions of one document of T."""
    q, k, v = wide(q_QHE), wide(k_TKE), wide(v_TKE)
    p = _scores_ref(q, k)
    largest = p.amax(-1, keepdim=True)
    total = p.sub_(largest).exp_().sum(-1, keepdim=True)
    out = p @ v.transpose(0, 1) / total
    return _ungrouped(out, len(q)), (largest + total.log()).view(q.shape[1], len(q))


def attention_bwd_ref(
    dout_QHE: torch.Tensor,
    q_QHE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    out_QHE: torch.Tensor,
    lse_HQ: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq_QHE, dk_TKE, dv_TKE): what the last Q positions of one document of T contribute.

    dv = P^T dout, dP = dout v^T, dS = P * (dP - rowsum(dout * out)), dq = dS k / sqrt(E), dk = dS^T q / sqrt(E).
    """
    dout, q, k, v, out = (wide(x) for x in (dout_QHE, q_QHE, k_TKE, v_TKE, out_QHE))
    num_kv, scale = k.shape[1], q.shape[2] ** -0.5
    dout_G, q_G = _grouped(dout, num_kv), _grouped(q, num_kv)
    p = _scores_ref(q, k).sub_(lse_HQ.reshape(num_kv, -1, 1)).exp_()
    dv = p.transpose(1, 2) @ dout_G
    ds = dout_G @ v.permute(1, 2, 0)
    ds.sub_((dout_G * _grouped(out, num_kv)).sum(-1, keepdim=True)).mul_(p)
    dq = ds @ k.transpose(0, 1) * scale
    dk = ds.transpose(1, 2) @ q_G * scale
    return _ungrouped(dq, len(q)), dk.transpose(0, 1), dv.transpose(0, 1)


def check_head_dim(head_dim: int) -> None:
    """Raise ConfigError for a head size that attention on a GPU does not take."""
    from fullstride.kernels.attention import check_head_dim as check

    check(head_dim)


def attention_fwd(
    q_NHE: torch.Tensor, k_NKE: torch.Tensor, v_NKE: torch.Tensor, documents: Documents
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """(out_NHE of q's dtype, what attention_bwd needs besides). Inputs may be strided in their first two dimensions.

    The libraries' attention has no out= form, so the results are new tensors, kept until the backward.
    """
    check_rows(q_NHE, k_NKE, v_NKE)
    if q_NHE.is_cuda:
        from fullstride.kernels.attention import attention_fwd as kernel

        return kernel(q_NHE, k_NKE, v_NKE, documents)
    out = torch.empty(q_NHE.shape, dtype=q_NHE.dtype)
    lse = torch.empty(q_NHE.shape[1], q_NHE.shape[0], dtype=wide(q_NHE[:0]).dtype)
    for rows, keys in _blocks(documents):
        out[rows], lse[:, rows] = attention_fwd_ref(q_NHE[rows], k_NKE[keys], v_NKE[keys])
    return out, (lse,)


def attention_bwd(
    dout_NHE: torch.Tensor,
    q_NHE: torch.Tensor,
    k_NKE: torch.Tensor,
    v_NKE: torch.Tensor,
    out_NHE: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    documents: Documents,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq_NHE, dk_NKE, dv_NKE), new tensors; `out_NHE` and `saved` are what attention_fwd returned."""
    check_rows(dout_NHE, q_NHE, k_NKE, v_NKE, out_NHE)
    if q_NHE.is_cuda:
        from fullstride.kernels.attention import attention_bwd as kernel

        return kernel(dout_NHE, q_NHE, k_NKE, v_NKE, out_NHE, saved, documents)
    dq = torch.empty(q_NHE.shape, dtype=q_NHE.dtype)
    dk, dv = (torch.zeros(x.shape, dtype=wide(x[:0]).dtype) for x in (k_NKE, v_NKE))
    for rows, keys in _blocks(documents):
        parts = attention_bwd_ref(
            dout_NHE[rows], q_NHE[rows], k_NKE[keys], v_NKE[keys], out_NHE[rows], saved[0][:, rows]
        )
        dq[rows] = parts[0]
        dk[keys] += parts[1]
        dv[keys] += parts[2]
    return dq, dk.to(k_NKE.dtype), dv.to(v_NKE.dtype)


def _blocks(documents: Documents) -> Iterator[tuple[slice, slice]]:
    """(queries, keys) of every document, some queries at a time with the keys that they may see."""
    for start, stop in itertools.pairwise(documents.boundaries.tolist()):
        for first in range(start, stop, CPU_QUERIES):
            last = min(first + CPU_QUERIES, stop)
            yield slice(first, last), slice(start, last)
