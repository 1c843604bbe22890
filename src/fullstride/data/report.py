"""What was dropped or changed in the data, and where: no row is lost in silence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SHOWN_LINES = 5


@dataclass
class Report:
    """Counts by file and reason, in the order in which they were first seen."""

    _lines: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def add(self, file: str, reason: str, line: int) -> None:
        """Counts one row: `line` is its line in `file`, from 1 (for a Hub dataset, its row number)."""
        self._lines.setdefault((file, reason), []).append(line)

    def merge(self, other: Report) -> None:
        """Adds the counts of `other`."""
        for (file, reason), lines in other._lines.items():
            self._lines.setdefault((file, reason), []).extend(lines)

    @property
    def total(self) -> int:
        """All counts together; a row that is truncated and a row that is dropped both count one."""
        return sum(len(lines) for lines in self._lines.values())

    def events(self) -> list[dict[str, Any]]:
        """One log.jsonl event a file and reason, with every line number."""
        return [
            {"event": "data", "file": file, "reason": reason, "count": len(lines), "lines": list(lines)}
            for (file, reason), lines in self._lines.items()
        ]

    def summary(self) -> list[str]:
        """One line of text a file and reason, with the first line numbers, for people."""
        return [
            f"{event['file']}: {reason_text(event['reason'], event['count'])} "
            f"(line{'s' if event['count'] > 1 else ''} {_first(event['lines'])})"
            for event in self.events()
        ]


def reason_text(reason: str, count: int) -> str:
    """`3 rows: broken JSON`."""
    return f"{count} row{'s' if count > 1 else ''}: {reason}"


def _first(lines: list[int]) -> str:
    shown = ", ".join(str(line) for line in lines[:SHOWN_LINES])
    return f"{shown}, ..." if len(lines) > SHOWN_LINES else shown
