"""Cross-entropy over the vocabulary with z-loss, forward and backward in one, in place on the logits.

For a supervised row, lse = log(sum(exp(logits))):

    loss    = lse - logits[target]                         (what is reported; z-loss is left out)
    dlogits = softmax(logits) * (1 + 2 * z * lse) - onehot(target)      (of loss + z * lse ** 2, summed over rows)

z-loss: Chowdhery et al. 2022 (PaLM, arXiv 2204.02311), section 5. An ignored row (target -100) has loss, lse and
dlogits 0.

Where ranks share the vocabulary, each has columns `first` on of the logits (Shoeybi et al. 2019, arXiv 1909.08053). Of
its part it tells three numbers a row, `terms`: maximum, sum of exp(logit - maximum), and the target's logit, which is
there on one rank and 0 on the others. Joined, they give loss and lse, and again maximum and sum, those of the whole
row, with which each rank writes its part of the gradient.
"""

from __future__ import annotations

import torch

from fullstride.ops.numerics import check_rows, wide

IGNORED = -100


def cross_entropy_ref(
    logits_MV: torch.Tensor, targets_M: torch.Tensor, z_loss: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss_M, lse_M, dlogits_MV)."""
    logits = wide(logits_MV)
    supervised = targets_M != IGNORED
    target = torch.where(supervised, targets_M, 0).long()[:, None]
    lse = torch.logsumexp(logits, dim=-1)
    loss = lse - logits.gather(1, target)[:, 0]
    dlogits = torch.exp(logits - lse[:, None])
    dlogits *= (1 + 2 * z_loss.to(lse.dtype) * lse)[:, None]
    dlogits.scatter_add_(1, target, dlogits.new_full(target.shape, -1.0))
    return (
        torch.where(supervised, loss, 0),
        torch.where(supervised, lse, 0),
        torch.where(supervised[:, None], dlogits, 0),
    )


def cross_entropy(
    logits_MV: torch.Tensor,
    targets_M: torch.Tensor,
    z_loss: torch.Tensor,
    loss_M: torch.Tensor,
    lse_M: torch.Tensor,
    backward: bool,
) -> None:
    """Overwrites loss_M and lse_M (float32, or float64 beside float64) and, with `backward`, logits_MV by dlogits_MV.

    targets_M: int32, -100 = ignored; z_loss: one element on the device, so that a captured graph sees new values.
    """
    check_rows(logits_MV, targets_M, loss_M, lse_M)
    if logits_MV.is_cuda:
        from fullstride.kernels.cross_entropy import cross_entropy as kernel

        return kernel(logits_MV, targets_M, z_loss, loss_M, lse_M, backward)
    loss, lse, dlogits = cross_entropy_ref(logits_MV, targets_M, z_loss)
    loss_M.copy_(loss)
    lse_M.copy_(lse)
    if backward:
        logits_MV.copy_(dlogits)


# ---- of a part of the vocabulary


def _here(logits_MV: torch.Tensor, targets_M: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether the target's logit is in this part, its column [M, 1] or 0)."""
    column = targets_M - first
    here = (targets_M != IGNORED) & (column >= 0) & (column < logits_MV.shape[1])
    return here, torch.where(here, column, 0).long()[:, None]


def part_terms_ref(logits_MV: torch.Tensor, targets_M: torch.Tensor, first: int) -> torch.Tensor:
    """terms_3M."""
    logits = wide(logits_MV)
    here, column = _here(logits, targets_M, first)
    top = logits.amax(1).clamp(min=torch.finfo(torch.float32).min)  # finite, even where all are -inf
    total = torch.exp(logits - top[:, None]).sum(1)
    return torch.stack([top, total, torch.where(here, logits.gather(1, column)[:, 0], 0)])


def part_bwd_ref(
    logits_MV: torch.Tensor, targets_M: torch.Tensor, first: int, z_loss: torch.Tensor, terms_3M: torch.Tensor
) -> torch.Tensor:
    """dlogits_MV."""
    logits, (top, total, _) = wide(logits_MV), terms_3M
    here, column = _here(logits, targets_M, first)
    lse = top + total.log()  # rounded as cross_entropy_ref's is
    dlogits = torch.exp(logits - lse[:, None])
    dlogits *= (1 + 2 * z_loss.to(lse.dtype) * lse)[:, None]
    dlogits.scatter_add_(1, column, -here.to(dlogits.dtype)[:, None])
    return torch.where((targets_M != IGNORED)[:, None], dlogits, 0)


def part_terms(logits_MV: torch.Tensor, targets_M: torch.Tensor, first: int, terms_3M: torch.Tensor) -> None:
    """Overwrites terms_3M (float32, or float64 beside float64; contiguous) with those of logits_MV, which are the
    logits of tokens `first` to first + V. targets_M is of the whole vocabulary; rows may be strided."""
    check_rows(logits_MV, targets_M, terms_3M)
    if logits_MV.is_cuda:
        from fullstride.kernels.cross_entropy import part_terms as kernel

        return kernel(logits_MV, targets_M, first, terms_3M)
    terms_3M.copy_(part_terms_ref(logits_MV, targets_M, first))


def join_terms(
    terms_P3M: torch.Tensor, targets_M: torch.Tensor, terms_3M: torch.Tensor, loss_M: torch.Tensor, lse_M: torch.Tensor
) -> None:
    """Overwrites terms_3M, loss_M and lse_M with those of the whole rows, of which terms_P3M are the parts'."""
    supervised = targets_M != IGNORED
    tops, totals, logits = terms_P3M.unbind(1)
    top, target = tops.amax(0), logits.sum(0)
    total = (totals * torch.exp(tops - top)).sum(0)
    log_total = total.log()
    loss_M.copy_(torch.where(supervised, log_total - (target - top), 0))  # apart: see kernels/cross_entropy
    lse_M.copy_(torch.where(supervised, top + log_total, 0))
    for term, value in zip(terms_3M, (top, total, target), strict=True):
        term.copy_(value)


def part_bwd(
    logits_MV: torch.Tensor, targets_M: torch.Tensor, first: int, z_loss: torch.Tensor, terms_3M: torch.Tensor
) -> None:
    """Overwrites logits_MV by dlogits_MV; terms_3M are the whole rows'."""
    check_rows(logits_MV, targets_M, terms_3M)
    if logits_MV.is_cuda:
        from fullstride.kernels.cross_entropy import part_bwd as kernel

        return kernel(logits_MV, targets_M, first, z_loss, terms_3M)
    logits_MV.copy_(part_bwd_ref(logits_MV, targets_M, first, z_loss, terms_3M))
