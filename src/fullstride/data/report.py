"""What was dropped or changed in the data, and where: no row is lost in silence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# controls except tab and line feed, and what turns the direction of writing
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
DATA, REPEATED = "data", "repeated"  # events of the log
SHOWN_RUNS = 5  # of line numbers


@dataclass
class Report:
    """Counts by file and reason, in the order in which they were first seen."""

    _lines: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)

    def add(self, file: str, reason: str, line: int, event: str = DATA) -> None:
        """Counts one row: `line` is its line in `file`, from 1 (of Parquet and Hub datasets, its number). `event` is
        what the log calls it: DATA for what was dropped or changed, REPEATED for what was neither."""
        self.add_all(file, reason, [line], event)

    def add_all(self, file: str, reason: str, lines: Iterable[int], event: str = DATA) -> None:
        """Counts several rows: see `add`."""
        self._lines.setdefault((event, file, reason), []).extend(lines)

    def merge(self, other: Report) -> None:
        """Adds the counts of `other`."""
        for (event, file, reason), lines in other._lines.items():
            self.add_all(file, reason, lines, event)

    @property
    def total(self) -> int:
        """All counts of DATA together; a row that is truncated and a row that is dropped both count one."""
        return sum(len(lines) for (event, _, _), lines in self._lines.items() if event == DATA)

    def events(self) -> list[dict[str, Any]]:
        """One log.jsonl event a file and reason, with every line number."""
        return [
            {"event": event, "file": file, "reason": reason, "count": len(lines), "lines": list(lines)}
            for (event, file, reason), lines in self._lines.items()
        ]

    def summary(self) -> list[str]:
        """One line of text a file and reason, with the first line numbers, for people."""
        return [
            f"{safe(event['file'])}: {safe(reason_text(event['reason'], event['count']))} "
            f"(line{'s' if event['count'] > 1 else ''} {line_numbers(event['lines'])})"
            for event in self.events()
        ]


def reason_text(reason: str, count: int) -> str:
    """`3 rows: broken JSON`."""
    return f"{count} row{'s' if count > 1 else ''}: {reason}"


def safe(text: str) -> str:
    """Text that a terminal only shows."""
    return STEERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def line_numbers(lines: list[int]) -> str:
    """`3, 7-9, ...`: runs in short, and not more than some of them."""
    runs: list[list[int]] = []
    for line in sorted(lines):
        if runs and line <= runs[-1][1] + 1:
            runs[-1][1] = line
        else:
            runs.append([line, line])
        if len(runs) > SHOWN_RUNS:
            return ", ".join(map(_run, runs[:-1])) + ", ..."
    return ", ".join(map(_run, runs))


def _run(run: list[int]) -> str:
    first, last = run
    return f"{first}" if first == last else f"{first}, {last}" if last == first + 1 else f"{first}-{last}"
