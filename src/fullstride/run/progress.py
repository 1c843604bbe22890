"""What a run shows while it works: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self


class _Shown:
    """A live line in a terminal, once `_bar` is made (rich's, started), and plain lines elsewhere; for `with`."""

    _bar: Any = None

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


class Progress(_Shown):
    """Shows updates and lets other lines through. `num_steps` updates in all, the first being `first_step`."""

    def __init__(self, num_steps: int, first_step: int) -> None:
        self._num_steps = num_steps
        self._first_step = first_step
        self._seconds = 0.0  # of the updates shown; evaluations are not part of the time left

    def __enter__(self) -> Self:
        if sys.stdout.isatty():
            self._bar = _rich_bar()
        if self._bar is not None:
            self._task = self._bar.add_task("", total=self._num_steps, completed=self._first_step - 1)
            self._bar.start()
        return self

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


class Meter(_Shown):
    """Shows how much of `total` is done: a live line in a terminal, one every few seconds elsewhere; of what takes
    less than a moment, nothing. `unit`: what is counted is bytes (MB), or things of this name."""

    MOMENT = 1.0  # seconds
    SECONDS = 10.0  # between plain lines

    def __init__(self, what: str, total: int, done: int = 0, unit: str = "MB") -> None:
        self._what, self._total, self._done, self._first = what, total, done, done
        self._unit, self._scale, self._digits = unit, *((1e6, 1) if unit == "MB" else (1, 0))

    def __enter__(self) -> Self:
        self._begun = self._told = time.monotonic()
        if self._done:
            self.line(f"{self._what}: goes on after {self._amount(self._done)} {self._unit}")
        return self

    def advance(self, amount: int) -> None:
        """So much more is done."""
        self._done += amount
        now = time.monotonic()
        if self._bar is None and now - self._begun >= self.MOMENT and sys.stdout.isatty():
            self._bar = _rich_bar()
            if self._bar is not None:
                self._task = self._bar.add_task(self._what, total=self._total)
                self._bar.start()
        waited = now - self._told
        if waited < (0.1 if self._bar is not None else self.SECONDS):
            return
        self._told = now
        rate = (self._done - self._first) / max(now - self._begun, 1e-9)
        text = (
            f"{self._what}: {self._amount(self._done)} of {self._amount(self._total)} {self._unit}  "
            f"{self._amount(rate)} {self._unit}/s"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=text)
        else:
            self.line(text)

    def _amount(self, value: float) -> str:
        return f"{value / self._scale:,.{self._digits}f}"


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
