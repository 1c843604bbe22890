"""Which documents share a row. Computed once for all data, before rows are dealt to ranks: it depends on no split."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, seq_len: int) -> list[list[int]]:
    """Documents by row: whole ones, at most `seq_len` tokens a row, by best-fit decreasing.

    `lengths` is [n], in tokens, each in 1..seq_len. The longest document is placed first, each into the fullest row
    that still takes it. Best-fit decreasing needs at most 11/9 of the best possible number of rows, plus 4
    (Johnson, Demers, Ullman, Garey and Graham 1974). Equal lengths keep their order: the same data, the same rows.
    """
    assert len(lengths) == 0 or (lengths.min() >= 1 and lengths.max() <= seq_len), (
        "a document is 1..seq_len tokens long"
    )
    rows: list[list[int]] = []
    rows_by_space: dict[int, list[int]] = {}  # free tokens -> rows that have exactly so many
    spaces: list[int] = []  # its keys, sorted: there are never more than seq_len of them, however many rows
    for document in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        length = int(lengths[document])
        at = bisect_left(spaces, length)
        if at == len(spaces):
            row, space = len(rows), seq_len
            rows.append([])
        else:
            space = spaces[at]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                del rows_by_space[space], spaces[at]
        rows[row].append(document)
        left = space - length
        if left > 0:
            if left not in rows_by_space:
                rows_by_space[left] = []
                insort(spaces, left)
            rows_by_space[left].append(row)
    return rows


def one_per_row(num_documents: int) -> list[list[int]]:
    """Packing off: every document has a row of its own."""
    return [[document] for document in range(num_documents)]
