from __future__ import annotations

import math

import pytest
import torch

from fullstride.ops.rope import rope_frequencies, rope_tables


def test_default_frequencies() -> None:
    frequency = rope_frequencies(8, 10000.0)
    expected = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    torch.testing.assert_close(frequency, expected, rtol=1e-14, atol=0)


def test_llama3_scaling() -> None:
    """Frequencies 0-14 stay, 15-17 are interpolated, 18-31 divided by 32 (known to four digits)."""
    plain = rope_frequencies(64, 5e5)
    ratio = rope_frequencies(64, 5e5, (32.0, 1.0, 4.0, 8192)) / plain
    torch.testing.assert_close(ratio[:15], torch.ones(15, dtype=torch.float64), rtol=1e-14, atol=0)
    assert ratio[15:18].tolist() == pytest.approx([0.6056, 0.3037, 0.1035], abs=1e-4)
    torch.testing.assert_close(ratio[18:], torch.full((14,), 1 / 32, dtype=torch.float64), rtol=1e-14, atol=0)


def test_tables_are_right_at_large_positions() -> None:
    """131,072 positions: float32 angles would be off by 4e-3 there."""
    cos, sin = rope_tables(rope_frequencies(4, 1e6), 131072)
    assert cos.shape == sin.shape == (131072, 2)
    for position in (0, 1, 131071):
        for i, frequency in enumerate((1.0, 1e-3)):
            # the angle itself is a float64 of size 1e5: 1e-11
            assert cos[position, i].item() == pytest.approx(math.cos(position * frequency), abs=1e-10)
            assert sin[position, i].item() == pytest.approx(math.sin(position * frequency), abs=1e-10)
