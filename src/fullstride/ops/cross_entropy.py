"""Cross-entropy over the vocabulary with z-loss, forward and backward in one, in place on the logits.

For a supervised row, lse = log(sum(exp(logits))):

    loss    = lse - logits[target]                         (what is reported; z-loss is left out)
    dlogits = softmax(logits) * (1 + 2 * z * lse) - onehot(target)      (of loss + z * lse ** 2, summed over rows)

z-loss: Chowdhery et al. 2022 (PaLM, arXiv 2204.02311), section 5. An ignored row (target -100) has loss, lse and
dlogits 0.
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
