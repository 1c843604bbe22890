"""The one promotion rule of the references."""

import torch


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype that references compute in: float64 stays, everything narrower becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def check_rows(*tensors: torch.Tensor | None) -> None:
    """What kernels ask of their tensors, held on a CPU too: the last dimension is contiguous, rows may be strided."""
    assert all(x is None or x.stride(-1) == 1 for x in tensors), "neighbours in a row must be neighbours in memory"
