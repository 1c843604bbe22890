"""Packing: every document once, whole, in as few rows as best-fit decreasing gives."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullstride.data.packing import one_per_row, pack

SEQ_LEN = 24
lengths_up_to_seq_len = st.lists(st.integers(1, SEQ_LEN), max_size=60)
quick = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def best_fit_decreasing(lengths: list[int]) -> list[list[int]]:
    """The textbook's way: look at every row for each document."""
    rows: list[list[int]] = []
    for document in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        loads = [sum(lengths[i] for i in row) for row in rows]
        fitting = [r for r, load in enumerate(loads) if load + lengths[document] <= SEQ_LEN]
        if fitting:
            rows[max(fitting, key=lambda r: loads[r])].append(document)
        else:
            rows.append([document])
    return rows


@quick
@given(lengths_up_to_seq_len)
def test_every_document_once_and_no_row_too_long(lengths: list[int]) -> None:
    rows = pack(np.array(lengths, dtype=np.int64), SEQ_LEN)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= SEQ_LEN for row in rows)


@quick
@given(lengths_up_to_seq_len)
def test_rows_are_filled_as_by_the_textbook(lengths: list[int]) -> None:
    def loads(rows: list[list[int]]) -> list[int]:
        return sorted(sum(lengths[i] for i in row) for row in rows)

    assert loads(pack(np.array(lengths, dtype=np.int64), SEQ_LEN)) == loads(best_fit_decreasing(lengths))


@quick
@given(lengths_up_to_seq_len)
def test_the_same_data_gives_the_same_rows(lengths: list[int]) -> None:
    array = np.array(lengths, dtype=np.int64)
    assert pack(array, SEQ_LEN) == pack(array.copy(), SEQ_LEN)


def test_a_perfect_fit_is_found() -> None:
    assert pack(np.array([3, 5, 7, 1]), 8) == [[2, 3], [1, 0]]
    assert pack(np.array([8, 8]), 8) == [[0], [1]]
    assert pack(np.array([], dtype=np.int64), 8) == []


@pytest.mark.parametrize("length", [0, 9])
def test_a_length_that_cannot_be_is_our_own_fault(length: int) -> None:
    with pytest.raises(AssertionError, match=r"1\.\.seq_len"):
        pack(np.array([length]), 8)


def test_many_documents_pack_in_seconds_and_tightly() -> None:
    lengths = np.random.default_rng(0).integers(1, 2049, size=200_000)
    start = time.perf_counter()
    rows = pack(lengths, 2048)
    # Half a second here; a search of all rows for each document would take an hour.
    assert time.perf_counter() - start < 10
    # Uniform lengths pair up almost perfectly: best-fit decreasing wastes well under one percent.
    assert lengths.sum() / (len(rows) * 2048) > 0.99


def test_one_per_row() -> None:
    assert one_per_row(3) == [[0], [1], [2]]
