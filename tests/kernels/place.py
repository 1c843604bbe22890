"""Tensors for kernel tests, and how a kernel's result is judged."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

FLOAT32 = 1e-6  # float32 arithmetic inside a kernel: some ten roundings of 6e-8


@dataclass(frozen=True)
class Place:
    """A device and a storage dtype. Random values are drawn on the CPU, so they are the same everywhere."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def put(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device)

    def randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.put((torch.randn(*shape, generator=self.generator) * scale).to(dtype or self.dtype))

    def randint(self, high: int, *shape: int) -> torch.Tensor:
        return self.put(torch.randint(high, shape, generator=self.generator, dtype=torch.int32))

    def poisoned(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """For a kernel to overwrite: whatever it misses stays NaN."""
        return torch.full(shape, float("nan"), dtype=dtype or self.dtype, device=self.device)

    def spaced(self, x: torch.Tensor) -> torch.Tensor:
        """x with strided rows: five columns of NaN lie between two rows (see `assert_spare_untouched`)."""
        base = self.poisoned(x.shape[0], x.shape[1] + 5, dtype=x.dtype)
        base[:, : x.shape[1]] = x
        return base[:, : x.shape[1]]


def assert_spare_untouched(*spaced: torch.Tensor) -> None:
    for x in spaced:
        assert x._base is not None and x._base[:, x.shape[1] :].isnan().all()


def high(x: torch.Tensor) -> torch.Tensor:
    """x in float64 on the CPU, for the references."""
    return x.detach().cpu().double()


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected||, in float64."""
    actual, expected = high(actual), high(expected)
    assert actual.shape == expected.shape
    return float((actual - expected).norm() / expected.norm())


def assert_close(actual: torch.Tensor, expected: torch.Tensor, inside: float = FLOAT32) -> None:
    """`expected` is the reference in float64 from the same inputs.

    The kernel may be twice as far from it as its own rounding to the storage dtype is, plus `inside`: what float32
    arithmetic inside the kernel costs. A NaN left over from the poison fails.
    """
    rounding = distance(expected.to(actual.dtype), expected)
    assert distance(actual, expected) <= 2 * rounding + inside


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    view = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    assert torch.equal(actual.cpu().contiguous().view(view), expected.cpu().contiguous().view(view))
