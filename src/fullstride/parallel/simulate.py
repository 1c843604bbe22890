"""How long a pipeline's schedule takes where every action has a known cost, and its picture."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from fullstride.parallel.schedule import Action, Schedule, peak_live

MARKS = {"F": ">", "B": "<", "W": "*"}
IDLE = "."
CUT = " ... "


@dataclass(frozen=True)
class Timeline:
    """When each action starts and ends, in the unit of the costs."""

    schedule: Schedule
    start: dict[Action, float]
    end: dict[Action, float]

    @property
    def total(self) -> float:
        """From the first start to the last end."""
        return max(self.end.values()) - min(self.start.values())

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in `total` that they are idle."""
        busy = math.fsum(self.end[action] - self.start[action] for action in self.start)
        return 1 - busy / (self.schedule.num_ranks * self.total)


def simulate(schedule: Schedule, cost: Callable[[Action], float], transfer: float = 0.0) -> Timeline:
    """Every action as early as its rank is free and what it needs is over, and `transfer` later where that was on
    another rank. Sends cost the ranks nothing.

    Raises ValueError where ranks wait for one another for ever.
    """
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    free = [0.0] * schedule.num_ranks
    done = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            while done[rank] < len(order) and all(need in end for need in schedule.needs(order[done[rank]])):
                action = order[done[rank]]
                arrivals = (
                    end[need] + (transfer if schedule.rank_of(need.stage) != rank else 0.0)
                    for need in schedule.needs(action)
                )
                start[action] = max(free[rank], *arrivals, 0.0)
                end[action] = free[rank] = start[action] + cost(action)
                done[rank] += 1
                moved = True
    stuck = [
        f"rank {r} before {o[n]}" for r, (n, o) in enumerate(zip(done, schedule.orders, strict=True)) if n < len(o)
    ]
    if stuck:
        raise ValueError(f"{schedule.name}: ranks wait for one another for ever: {', '.join(stuck)}")
    return Timeline(schedule, start, end)


def picture(timeline: Timeline, width: int = 120) -> str:
    """The timeline as text of at most `width` columns: a row a rank, time to the right; beneath, the bubble and the
    most micro-batches that are alive at once. What does not fit is left out in the middle."""
    schedule = timeline.schedule
    labels = [f"rank {rank} " for rank in range(schedule.num_ranks)]
    margin = max(map(len, labels))
    rows = _rows(timeline, width - margin)
    if len(rows[0]) > width - margin:
        kept = width - margin - len(CUT)
        left = kept - kept // 2
        rows = [row[:left] + CUT + row[len(row) - kept // 2 :] for row in rows]
    lines = [label.ljust(margin) + row for label, row in zip(labels, rows, strict=True)]
    return "\n".join([*lines, "", *textwrap.wrap(_legend(schedule), width), *textwrap.wrap(_told(timeline), width)])


def _rows(timeline: Timeline, width: int) -> list[str]:
    """A row a rank, one character a column, at the widest scale that fits `width`, else at the narrowest that is read:
    the shortest forward shows its micro-batch and its mark (what is too short for that, its mark alone)."""
    schedule = timeline.schedule
    begin = min(timeline.start.values())
    shortest = min(timeline.end[a] - timeline.start[a] for a in timeline.start if a.kind == "F")
    needed = len(_cell(schedule, Action("F", 0, schedule.microbatches - 1)))
    columns = next((n for n in range(needed + 3, needed, -1) if timeline.total * n / shortest <= width), needed)

    def column(time: float) -> int:
        # what is exactly between two columns goes one way, whatever its last bits: cells of one length stay so
        return math.floor((time - begin) * columns / shortest + 0.5 + 1e-6)

    rows = []
    for order in schedule.orders:
        row = ""
        for action in order:
            cells = column(timeline.end[action]) - column(timeline.start[action])
            mark, cell = MARKS[action.kind], _cell(schedule, action)
            row = row.ljust(column(timeline.start[action]), IDLE) + (cell if len(cell) <= cells else "").ljust(
                cells, mark
            )
        rows.append(row.ljust(column(begin + timeline.total), IDLE))
    return rows


def _cell(schedule: Schedule, action: Action) -> str:
    """The micro-batch, the chunk where a rank has several (a, b, ...), and the mark of what is done."""
    chunk = action.stage // schedule.num_ranks
    letter = chr(ord("a") + chunk % 26) if schedule.chunks > 1 else ""
    return f"{action.microbatch}{letter}{MARKS[action.kind]}"


def _legend(schedule: Schedule) -> str:
    chunk = "a" if schedule.chunks > 1 else ""
    first = Action("F", 0, 0)
    told = [f"{_cell(schedule, first)} forward of micro-batch 0{' in chunk a' if chunk else ''}"]
    told.append(f"0{chunk}{MARKS['B']} backward" + (" for the input" if schedule.name == "zb-h1" else ""))
    if schedule.name == "zb-h1":
        told.append(f"0{MARKS['W']} backward for the weights")
    return ", ".join([*told, f"{IDLE} idle"])


def _told(timeline: Timeline) -> str:
    schedule = timeline.schedule
    peaks = ["+".join(map(str, peak_live(schedule, rank).values())) for rank in range(schedule.num_ranks)]
    return f"bubble {100 * timeline.bubble:.1f} %; peak live micro-batches by rank: {', '.join(peaks)}"
