"""Which documents share a row. Computed once for all data, before rows are dealt to ranks: it depends on no split."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from fullstride.data.examples import Example, facts_of
from fullstride.data.loader import IGNORED
from fullstride.data.tokens import DIGITS


class PackedRows:
    """Examples as rows for a Loader: several a row with `packing`, else one.

    `documents[row]` are the numbers of the examples in a row, in order.
    """

    def __init__(self, examples: Sequence[Example], seq_len: int, packing: bool) -> None:
        self._facts = facts_of(examples)
        lengths = self._facts.lengths
        assert len(lengths) == 0 or lengths.max() <= seq_len, "examples are encoded for this seq_len"
        self.examples, self.seq_len, self.packing = examples, seq_len, packing
        self.documents = pack(lengths, seq_len) if packing else one_per_row(len(examples))
        self.num_tokens = int(lengths.sum())

    def __len__(self) -> int:
        return len(self.documents)

    def of(self, row: int) -> list[Example]:
        """The examples in a row."""
        return [self.examples[i] for i in self.documents[row]]

    def write(self, row: int, inputs: np.ndarray, targets: np.ndarray, documents: np.ndarray) -> int:
        """See Rows."""
        begin = 0
        for number, example in enumerate(self.of(row)):
            end = begin + len(example.ids)
            inputs[begin:end] = example.ids
            targets[begin : end - 1] = np.where(example.supervised, example.ids, IGNORED)[1:]
            documents[end:] = number + 1
            begin = end
        return begin

    def lengths(self, row: int) -> list[int]:
        """See Rows."""
        return self._facts.lengths[self.documents[row]].tolist()

    def where(self, row: int) -> list[str]:
        """See Rows."""
        return [f"{example.file} line {example.line}" for example in self.of(row)]

    def describe(self) -> str:
        """See Rows."""
        supervised = int(self._facts.supervised.sum())
        return f"{len(self.examples):,} documents, {self.num_tokens:,} tokens ({supervised:,} supervised)"

    def digest(self) -> str:
        """Counts, and a SHA-256 over the hashes of ids and masks of all documents in the order of the rows."""
        digest = hashlib.sha256()
        for documents in self.documents:
            digest.update(len(documents).to_bytes(8, "little"))
            digest.update(self._facts.hashes[documents].astype("<i8").tobytes())
        return f"{len(self)} rows of {self.num_tokens} tokens (sha256 {digest.hexdigest()[:DIGITS]})"


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
