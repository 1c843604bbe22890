"""Causal attention within documents, grouped queries (Vaswani et al. 2017; Ainslie et al. 2023, arXiv 2305.13245).

For each document and query head, with its key/value head: S = q k^T / sqrt(E), masked to keys at or before the query;
P = softmax(S); out = P v. Tokens of different documents never see each other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from fullstride.ops.numerics import wide


@dataclass(frozen=True)
class Documents:
    """Where the documents of a micro-batch of `rows` x `seq_len` tokens lie.

    boundaries: int32 [documents + 1] on the device, ascending from 0 to rows * seq_len (cu_seqlens); trailing entries
    may repeat (empty documents), so that its length need not change. packed: False promises one document a row, which
    allows faster kernels. deterministic: the backward must give the same bits every time, on a GPU too.
    """

    boundaries: torch.Tensor
    rows: int
    seq_len: int
    packed: bool
    deterministic: bool = False


def _scores_ref(q_THE: torch.Tensor, k_TKE: torch.Tensor) -> torch.Tensor:
    """Masked scores [K, H/K, T, T] of one document."""
    (length, num_heads, head_dim), num_kv = q_THE.shape, k_TKE.shape[1]
    q = q_THE.transpose(0, 1).reshape(num_kv, num_heads // num_kv, length, head_dim)
    scores = q @ k_TKE.permute(1, 2, 0)[:, None] * head_dim**-0.5
    future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill_(future, float("-inf"))


def attention_fwd_ref(
    q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out_THE, lse_HT) of one document."""
    q, k, v = wide(q_THE), wide(k_TKE), wide(v_TKE)
    scores = _scores_ref(q, k)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.exp(scores - lse[..., None]) @ v.transpose(0, 1)[:, None]
    return out.reshape(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1), lse.view(q.shape[1], q.shape[0])


def attention_bwd_ref(
    dout_THE: torch.Tensor,
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    out_THE: torch.Tensor,
    lse_HT: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq_THE, dk_TKE, dv_TKE) of one document.

    dv = P^T dout, dP = dout v^T, dS = P * (dP - rowsum(dout * out)), dq = dS k / sqrt(E), dk = dS^T q / sqrt(E).
    """
    dout, q, k, v, out = (wide(x) for x in (dout_THE, q_THE, k_TKE, v_TKE, out_THE))
    (length, num_heads, head_dim), num_kv = q.shape, k.shape[1]

    def grouped(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).reshape(num_kv, num_heads // num_kv, length, head_dim)

    p = torch.exp(_scores_ref(q, k) - lse_HT.view(num_kv, -1, length, 1))
    dout_g, q_g = grouped(dout), grouped(q)
    dv = (p.transpose(-1, -2) @ dout_g).sum(1)
    dp = dout_g @ v.permute(1, 2, 0)[:, None]
    ds = p * (dp - (dout_g * grouped(out)).sum(-1, keepdim=True)) * head_dim**-0.5
    dq = (ds @ k.transpose(0, 1)[:, None]).reshape(num_heads, length, head_dim)
    dk = (ds.transpose(-1, -2) @ q_g).sum(1)
    return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)


def attention_fwd(
    q_NHE: torch.Tensor, k_NKE: torch.Tensor, v_NKE: torch.Tensor, documents: Documents
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """(out_NHE of q's dtype, what attention_bwd needs besides). Inputs may be strided in their first two dimensions.

    The libraries' attention has no out= form, so the results are new tensors, kept until the backward.
    """
    if q_NHE.is_cuda:
        from fullstride.kernels.attention import attention_fwd as kernel

        return kernel(q_NHE, k_NKE, v_NKE, documents)
    out = torch.empty(q_NHE.shape, dtype=q_NHE.dtype)
    lse = torch.empty(q_NHE.shape[1], q_NHE.shape[0], dtype=wide(q_NHE[:0]).dtype)
    for start, stop in _spans(documents):
        out[start:stop], lse[:, start:stop] = attention_fwd_ref(q_NHE[start:stop], k_NKE[start:stop], v_NKE[start:stop])
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
    if q_NHE.is_cuda:
        from fullstride.kernels.attention import attention_bwd as kernel

        return kernel(dout_NHE, q_NHE, k_NKE, v_NKE, out_NHE, saved, documents)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q_NHE, k_NKE, v_NKE))
    for start, stop in _spans(documents):
        rows = slice(start, stop)
        parts = attention_bwd_ref(
            dout_NHE[rows], q_NHE[rows], k_NKE[rows], v_NKE[rows], out_NHE[rows], saved[0][:, rows]
        )
        dq[rows], dk[rows], dv[rows] = parts
    return dq, dk, dv


def _spans(documents: Documents) -> list[tuple[int, int]]:
    """(start, stop) of every document that has tokens."""
    bounds = documents.boundaries.tolist()
    return [(a, b) for a, b in itertools.pairwise(bounds) if b > a]
