"""Token files as rows to train on: every token that has one before it is predicted once an epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from fullstride.data.loader import IGNORED
from fullstride.data.tokens import DIGITS, TokenFile


class TokenRows:
    """Files cut into rows of `seq_len` tokens (see loader.Rows), a file's last one shorter.

    A row's last target is the next row's first token, so none is lost at a cut. With `packing` the documents in a row
    do not see each other, and the first token of one is nobody's label; without, a row is one text whatever it holds.
    A document that is longer than a row goes on in the next one, and sees nothing of the row before.
    """

    def __init__(
        self, files: Sequence[TokenFile], seq_len: int, packing: bool, chosen: np.ndarray | None = None
    ) -> None:
        """chosen: the rows that these are, of all that the files have (int64); None: all."""
        self.files, self.seq_len, self.packing = files, seq_len, packing
        # a file's last token has nothing to predict: alone in a row it would teach nothing
        counts = [max(0, -(-(len(file) - 1) // seq_len)) for file in files]
        self._firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._chosen = np.arange(self._firsts[-1]) if chosen is None else chosen
        cut = [seq_len - min(seq_len, len(f) - (n - 1) * seq_len) for f, n in zip(files, counts, strict=True) if n]
        lasts = self._firsts[1:][np.diff(self._firsts) > 0] - 1
        self.num_tokens = len(self) * seq_len - int(np.dot(np.isin(lasts, self._chosen), cut))

    def __len__(self) -> int:
        return len(self._chosen)

    def split(self, fraction: float, seed: int) -> tuple[TokenRows, TokenRows]:
        """All but about `fraction` of the rows, and those, at least one, drawn by a generator keyed by `seed`."""
        count = max(1, round(fraction * len(self)))
        drawn = np.argsort(np.random.PCG64(seed).random_raw(len(self)), kind="stable")
        parts = (np.sort(self._chosen[part]) for part in (drawn[count:], drawn[:count]))
        rest, held_out = (TokenRows(self.files, self.seq_len, self.packing, part) for part in parts)
        return rest, held_out

    def _place(self, row: int) -> tuple[TokenFile, int, int]:
        """Its file, and which tokens of that it holds, [begin, end)."""
        number = int(self._chosen[row])
        at = int(np.searchsorted(self._firsts, number, side="right")) - 1
        begin = (number - int(self._firsts[at])) * self.seq_len
        return self.files[at], begin, min(begin + self.seq_len, len(self.files[at]))

    def _starts(self, file: TokenFile, begin: int, end: int) -> np.ndarray:
        """Where documents begin in (begin, end]."""
        first, last = np.searchsorted(file.documents, [begin, end], side="right")
        return np.asarray(file.documents[first:last])

    def write(self, row: int, inputs: np.ndarray, targets: np.ndarray, documents: np.ndarray) -> int:
        """See Rows."""
        file, begin, end = self._place(row)
        ids = file.span(begin, end + 1)  # one more, if there is one
        count = end - begin
        inputs[:count] = ids[:count]
        labels = file.labels(begin + 1, begin + len(ids))
        targets[: len(ids) - 1] = ids[1:] if labels is None else np.where(labels, ids[1:], IGNORED)
        if self.packing:
            starts = self._starts(file, begin, end) - begin
            inside = starts[starts < count]
            targets[starts - 1] = IGNORED
            documents[:count] = np.searchsorted(inside, np.arange(count), side="right")
            documents[count:] = len(inside) + 1
        return count

    def lengths(self, row: int) -> list[int]:
        """See Rows."""
        file, begin, end = self._place(row)
        if not self.packing:
            return [end - begin]
        edges = [begin, *(s for s in self._starts(file, begin, end).tolist() if s < end), end]
        return np.diff(edges).tolist()

    def where(self, row: int) -> list[str]:
        """See Rows."""
        file, begin, end = self._place(row)
        return [f"{file.path} tokens {begin} to {end - 1}"]

    def describe(self) -> str:
        """See Rows."""
        documents = sum(len(file.documents) - 1 for file in self.files)
        return f"{self.num_tokens:,} tokens of {documents:,} document(s) in {len(self.files)} file(s)"

    def digest(self) -> str:
        """See Rows."""
        digest = hashlib.sha256(self._chosen.astype("<i8").tobytes())
        for file in self.files:
            digest.update(file.digest().encode())
        return f"{len(self)} rows of {self.num_tokens} tokens (sha256 {digest.hexdigest()[:DIGITS]})"
