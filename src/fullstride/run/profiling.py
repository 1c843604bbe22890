"""The key `profile`: a trace of some updates, and a short table of where their time went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fullstride.files import replace_text
from fullstride.run.kinds import kind_of
from fullstride.trainer.profiling import ProfileRow
from fullstride.trainer.ranks import leads
from fullstride.trainer.trainer import Trainer

WARM_UP = 3  # updates that come before: kernels are compiled and graphs captured in them
LINES = 12  # of the table


class Tracer:
    """Traces `updates` updates (0: none) of a run that has `left` to do, after a warm-up where there is room for it."""

    def __init__(self, trainer: Trainer, updates: int, left: int, run: Path) -> None:
        self._trainer, self._updates, self._directory = trainer, min(updates, left), run / "profile"
        self._first = 1 + min(WARM_UP, left - self._updates)
        self._count = 0  # updates begun

    def before_update(self) -> None:
        """Starts recording before the first update that is traced."""
        self._count += 1
        if self._updates and self._count == self._first:
            self._directory.mkdir(exist_ok=True)
            self._trainer.start_profile()

    def after_update(self) -> list[str]:
        """After the last one, traces and table are written; returns the table."""
        if not self._updates or self._count != self._first + self._updates - 1:
            return []
        rows = self._trainer.stop_profile(self._directory)
        lines = [*table(rows, self._updates, self._trainer.options.device == "cuda"), f"profile: {self._directory}"]
        if leads():
            replace_text(self._directory / "table.txt", "\n".join(lines) + "\n")
        return lines


def table(rows: Sequence[ProfileRow], updates: int, on_gpu: bool) -> list[str]:
    """What takes the time of an update on the first rank: on a GPU kernels, by kind and the longest by name; on a CPU
    operations."""
    total = sum(row.seconds for row in rows)
    kinds: dict[str, float] = {}
    for row in rows if on_gpu else ():
        kinds[kind_of(row.name)] = kinds.get(kind_of(row.name), 0.0) + row.seconds

    def line(name: str, count: str, seconds: float) -> str:
        return f"{1e3 * seconds / updates:10.2f} ms {100 * seconds / max(total, 1e-12):5.1f} % {count:>8}  {name}"

    lines = [f"{'GPU' if on_gpu else 'CPU'} time an update (of {updates} traced), times it ran, what"]
    lines += [line(kind, "", seconds) for kind, seconds in sorted(kinds.items(), key=lambda item: -item[1])]
    return lines + [line(row.name[:70], f"{row.calls / updates:.4g}", row.seconds) for row in rows[:LINES]]
