"""Ranks in rows and columns, as far as their hosts are concerned: who speaks for all, and what all know."""

from __future__ import annotations

from typing import Any

from fullstride.parallel.comm import Communicator


class _Grid(Communicator):
    """All ranks of the rows and columns that this one's `row` and `column` are of; ranks of a column are neighbours.

    It has no collectives over buffers.
    """

    def __init__(self, row: Communicator, column: Communicator) -> None:
        super().__init__(row.rank * column.size + column.rank, row.size * column.size)
        self._row, self._column = row, column

    def gather(self, value: Any) -> list[Any]:
        columns = self._row.gather(self._column.gather(value))
        return [value for column in columns for value in column]

    def check(self) -> None:
        self._row.check()
        self._column.check()


def grid(row: Communicator, column: Communicator) -> Communicator:
    """All ranks of both, for `gather`, `barrier`, `agreed`, `committed` and `check`."""
    return row if column.size == 1 else _Grid(row, column)
