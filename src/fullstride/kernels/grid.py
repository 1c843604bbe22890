"""How many programs to start, and how large."""

from __future__ import annotations

import torch


def num_sms(x: torch.Tensor) -> int:
    """Multiprocessors of x's GPU; two in Triton's interpreter, so that a program's loop takes several turns."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


def cdiv(numerator: int, denominator: int) -> int:
    """The quotient rounded up."""
    return -(-numerator // denominator)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


def num_warps(elements_per_program: int, elements_per_thread: int) -> int:
    """A power of two from 1 to 16; `elements_per_program` is one."""
    return max(1, min(16, elements_per_program // (32 * elements_per_thread)))
