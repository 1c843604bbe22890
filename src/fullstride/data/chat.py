"""Rows as token ids, with a mask of the tokens that are labels.

The mask is found by character offsets: a document (see render) is tokenised once, as a whole, and a token is a label
where it overlaps an answer's characters. Tokenising prompt and answer apart would give other tokens wherever one token
reaches over the seam, and would leave the answer's first token without a label.

Text of a row that spells a special token (`<|im_end|>` in a user's message) becomes that token, as in generation; it
does not end the turn for the mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from fullstride.data.examples import Example
from fullstride.data.render import NOTHING_LEFT, Rendered, Renderer, Supervise, Thinking
from fullstride.data.report import Report
from fullstride.data.rows import Row
from fullstride.errors import ConfigError, DataError

Truncate = Literal["prompt-start", "drop", "error"]

# The tokenizer works on many texts at once; what it says of all of them, some 600 bytes a token, is alive together.
ROWS_PER_CALL, CHARACTERS_PER_CALL = 256, 2**20
MOST_CHARACTERS = 4 * 2**20  # of one text: 5 seconds and 0.8 GB at the tokenizer
TOO_LONG = f"longer than {MOST_CHARACTERS:,} characters"


def nothing_left(seq_len: int, report: Report, hints: Sequence[str] = ()) -> DataError:
    """The error for data without a row to train on; `hints`: what the files may be."""
    found = "; ".join([*report.summary(), *hints]) or "the files hold no rows"
    return DataError(f"no data rows left with seq-len {seq_len}: {found}. Correct the data or raise seq-len")


def spans(example: Example, tokenizer: Any) -> Iterator[tuple[str, bool]]:
    """The row as text, cut where labels begin and end; with each piece whether it is one."""
    edges = np.flatnonzero(np.diff(example.supervised)) + 1
    for run in np.split(np.arange(len(example.ids)), edges):
        text = tokenizer.decode(example.ids[run].tolist(), clean_up_tokenization_spaces=False)
        yield text, bool(example.supervised[run[0]])


@dataclass(frozen=True)
class Encoder:
    """Rows as examples of at most `seq_len` tokens.

    `tokenizer` is a fast tokenizer of transformers. `supervise` says whether all answers of a chat are labels or the
    last one only, `thinking` how they are prompted (see Renderer). Documents over `seq_len`: `prompt-start` drops the
    beginning, but never of the last answer, which keeps its first `seq_len` tokens when it alone is longer; `drop`
    drops the document; `error` raises DataError. What is changed or dropped is counted in `report`. Raises ConfigError
    for a tokenizer that cannot do the job.
    """

    tokenizer: Any
    seq_len: int
    report: Report
    truncate: Truncate = "prompt-start"
    supervise: Supervise = "all"
    thinking: Thinking = "auto"

    def encode(self, rows: Iterable[Row]) -> list[Example]:
        """The documents of some rows, in order; a chat may become several."""
        return [example for part in self.encode_all(rows) for example in part]

    def encode_all(self, rows: Iterable[Row]) -> Iterator[list[Example]]:
        """The same, some hundred at a time. The next ones are rendered while the tokenizer works on these."""
        if not getattr(self.tokenizer, "is_fast", False):
            raise ConfigError(
                f"{type(self.tokenizer).__name__} gives no character offsets, which the loss mask needs; "
                "use a model directory with a tokenizer.json"
            )
        with ThreadPoolExecutor(1) as pool:  # outside Python's lock
            under_way: tuple[list[Rendered], Future[Any]] | None = None
            for texts in self._calls(rows):
                following = texts, pool.submit(self._tokenize, texts)
                if under_way is not None:
                    yield self._examples(*under_way)
                under_way = following
            if under_way is not None:
                yield self._examples(*under_way)

    def _calls(self, rows: Iterable[Row]) -> Iterator[list[Rendered]]:
        """The texts of all rows, as many at a time as the tokenizer takes in one call."""
        renderer = Renderer(self.tokenizer, self.thinking, self.supervise, self.report)
        call: list[Rendered] = []
        room = CHARACTERS_PER_CALL
        for row in rows:
            for document in renderer.documents(row):
                if len(document.text) > MOST_CHARACTERS:
                    self._drop(row, TOO_LONG)
                    continue
                if call and (len(call) == ROWS_PER_CALL or len(document.text) > room):
                    yield call
                    call, room = [], CHARACTERS_PER_CALL
                call.append(document)
                room -= len(document.text)
        if call:
            yield call

    def _tokenize(self, texts: list[Rendered]) -> Any:
        # The template has written the special tokens. verbose=False: a row over the model's limit is ours to handle.
        return self.tokenizer(
            [text.text for text in texts],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            verbose=False,
        )

    def _examples(self, texts: list[Rendered], tokens: Future[Any]) -> list[Example]:
        found = tokens.result()
        examples = map(self._example, texts, found["input_ids"], found["offset_mapping"])
        return [example for example in examples if example is not None]

    def _example(self, rendered: Rendered, ids: list[int], offsets: list[tuple[int, int]]) -> Example | None:
        row = rendered.row
        if row.messages is None and self._bos is not None and ids[:1] != [self._bos]:
            ids, offsets = [self._bos, *ids], [(0, 0), *offsets]
        ids, ranges = self._label(rendered, ids, np.array(offsets, dtype=np.int64).reshape(-1, 2))
        if not ranges:
            return self._drop(row, NOTHING_LEFT)
        kept = self._fit(row, len(ids), ranges[-1][0])
        if kept is None:
            return self._drop(row, "over seq-len")
        supervised = np.zeros(len(ids), dtype=bool)
        for first, past in ranges:
            supervised[first:past] = True
        supervised = supervised[kept]
        supervised[0] = False
        if not supervised.any():
            return self._drop(row, NOTHING_LEFT)
        if len(supervised) < len(ids):
            self.report.add(row.file, "truncated", row.line)
        return Example(np.array(ids[kept], dtype=np.int32), supervised, row.file, row.line)

    def _drop(self, row: Row, reason: str) -> None:
        self.report.add(row.file, reason, row.line)

    def _label(
        self, rendered: Rendered, ids: list[int], offsets: np.ndarray
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids up to the last answer's end token, and the ranges of tokens that are labels, end tokens included.

        What follows the last end token (the template's newline) would teach nothing. Where the template writes no end
        token after the last answer, or there is no template, the tokenizer's is added.
        """
        ranges = []
        for start, end in rendered.answers:
            # From the first to the last token that overlaps: a token inside may have no characters of its own.
            hit = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
            if hit.size:
                ranges.append((int(hit[0]), int(hit[-1]) + 1))
        if not ranges:
            return ids, []
        ends = [self._end_token(rendered.text, ids, offsets, past) for _, past in ranges]
        if ends[-1] is None:
            ids = ids[: ranges[-1][1]]
            if ids[-1] != self._eos:
                ids = [*ids, self._eos]
            ends[-1] = len(ids) - 1
        # The special token after an earlier answer may also be the next turn's beginning: only a known end counts.
        known = (ids[ends[-1]], self.tokenizer.eos_token_id)
        labels = [
            (first, past if end is None or ids[end] not in known else end + 1)
            for (first, past), end in zip(ranges, ends, strict=True)
        ]
        return ids[: labels[-1][1]], labels

    def _end_token(self, text: str, ids: list[int], offsets: np.ndarray, past: int) -> int | None:
        """Index of the special token at `past`, or after the white space there; None without one."""
        while past < len(ids) and text[slice(*offsets[past])].isspace() and ids[past] not in self._special_ids:
            past += 1
        return past if past < len(ids) and ids[past] in self._special_ids else None

    def _fit(self, row: Row, num_tokens: int, answer_start: int) -> slice | None:
        """The at most seq_len tokens that are kept; the last answer begins at `answer_start`. None drops the row."""
        if num_tokens <= self.seq_len:
            return slice(0, num_tokens)
        if self.truncate == "error":
            raise DataError(
                f"{row.file} line {row.line}: {num_tokens} tokens, but seq-len is {self.seq_len}; "
                "raise seq-len, or set truncate to prompt-start or drop"
            )
        if self.truncate == "drop":
            return None
        assert self.truncate == "prompt-start"
        begin = min(num_tokens - self.seq_len, answer_start)
        return slice(begin, begin + self.seq_len)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special)

    @cached_property
    def _eos(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end token: set eos_token in its tokenizer_config.json")
        return self.tokenizer.eos_token_id

    @cached_property
    def _bos(self) -> int | None:
        """The token that the tokenizer itself puts before a text, if it does."""
        added = self.tokenizer("")["input_ids"]
        return self.tokenizer.bos_token_id if list(added[:1]) == [self.tokenizer.bos_token_id] else None
