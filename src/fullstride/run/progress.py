"""What a run shows while it works: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self


class Progress:
    """Shows updates and lets other lines through. `num_steps` updates in all, the first being `first_step`."""

    def __init__(self, num_steps: int, first_step: int) -> None:
        self._num_steps = num_steps
        self._first_step = first_step
        self._seconds = 0.0  # of the updates shown; evaluations are not part of the time left
        self._bar: Any = None

    def __enter__(self) -> Self:
        if sys.stdout.isatty():
            self._bar = _rich_bar()
        if self._bar is not None:
            self._task = self._bar.add_task("", total=self._num_steps, completed=self._first_step - 1)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def line(self, text: str) -> None:
        """Print one line (above the live one)."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def update(self, row: Mapping[str, Any]) -> None:
        """Show one row of metrics.csv."""
        done = row["step"] - self._first_step + 1
        self._seconds += row["step_time_sec"]
        left = self._seconds / done * (self._num_steps - row["step"])
        essential = f"{describe(row, self._num_steps)}  {_clock(left)} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], description=essential)
        else:
            self.line(f"{essential}  {details(row)}")


class Meter:
    """Shows how much of `total` bytes is done: a live line in a terminal, one every few seconds elsewhere."""

    SECONDS = 10.0  # between plain lines

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._done, self._first = what, total, done, done
        self._bar: Any = None

    def __enter__(self) -> Self:
        self._begun = self._told = time.monotonic()
        self._bar = _rich_bar() if sys.stdout.isatty() else None
        if self._bar is not None:
            self._task = self._bar.add_task(self._what, total=self._total, completed=self._done)
            self._bar.start()
        if self._done:
            self._line(f"{self._what}: goes on after {self._done / 1e6:,.1f} MB")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, num_bytes: int) -> None:
        """So many more are done."""
        self._done += num_bytes
        now = time.monotonic()
        rate = (self._done - self._first) / max(now - self._begun, 1e-9)
        text = f"{self._what}: {self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB  {rate / 1e6:,.1f} MB/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=text)
        elif now - self._told >= self.SECONDS:
            self._told = now
            self._line(text)

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)


def describe(row: Mapping[str, Any], num_steps: int) -> str:
    """What matters in a row of metrics.csv; with the time left it fits a terminal of 80 columns."""
    return (
        f"step {row['step']}/{num_steps}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  "
        f"{row['tokens_per_sec']:,.0f} tokens/s"
    )


def details(row: Mapping[str, Any]) -> str:
    """What else is in it."""
    memory = "" if row["peak_vram_gb"] is None else f"  {row['peak_vram_gb']:.2f} GB"
    return f"epoch {row['epoch']}  {row['step_time_sec']:.2f} s{memory}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _rich_bar() -> Any:
    """rich's progress bar, or None where rich is not installed (plain lines need nothing)."""
    try:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    return Bar(TextColumn("{task.description}"), BarColumn(bar_width=None), expand=True)
