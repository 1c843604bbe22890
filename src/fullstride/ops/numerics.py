"""The one promotion rule of the references."""

import torch


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype that references compute in: float64 stays, everything narrower becomes float32."""
    return x if x.dtype == torch.float64 else x.float()
