"""Fixtures and helpers shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared(*parts: str) -> Path:
    """A path in the shared data beside the checkout; skips the test where it is not there."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs shared data beside the checkout: {'/'.join(parts)}")
    return path
