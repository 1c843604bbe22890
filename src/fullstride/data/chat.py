"""Rows as token ids, with a mask of the tokens that are labels.

The mask is found by character offsets: a row is rendered and tokenised once, as a whole, and a token is a label where
it overlaps an answer's characters. Tokenising prompt and answer apart would give other tokens wherever one token
reaches over the seam, and would leave the answer's first token without a label.

Text of a row that spells a special token (`<|im_end|>` in a user's message) becomes that token, as in generation; it
does not end the turn for the mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from fullstride.data.report import Report
from fullstride.data.rows import Message, Row
from fullstride.errors import ConfigError, DataError

Truncate = Literal["prompt-start", "drop", "error"]
Supervise = Literal["all", "last"]

# Letters only, so that no template trims or escapes it.
SENTINEL = "SENTINELANSWER"
# what a chat template's code stumbles over, besides what it raises itself
STUMBLES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
ROWS_PER_CALL = 256  # the tokenizer works on many texts at once; offsets of all of them are alive together
NOTHING_LEFT = "no supervised token left"


@dataclass(frozen=True)
class Example:
    """One row of token ids: `ids` int32 [n], `supervised` bool [n]: which tokens are labels.

    `supervised[0]` is False: nothing comes before the first token to predict it.
    """

    ids: np.ndarray
    supervised: np.ndarray
    file: str
    line: int


@dataclass(frozen=True)
class Rendered:
    """A row's text, and the characters [start, end) of its answers, in order."""

    row: Row
    text: str
    answers: list[tuple[int, int]]


def encode(
    row: Row,
    tokenizer: Any,
    seq_len: int,
    report: Report,
    truncate: Truncate = "prompt-start",
    supervise: Supervise = "all",
) -> Example | None:
    """One row as at most `seq_len` tokens; None where it is dropped (counted in `report`). See encode_rows."""
    return next(iter(Encoder(tokenizer, seq_len, report, truncate, supervise).encode([row])), None)


def encode_rows(
    rows: Sequence[Row],
    tokenizer: Any,
    seq_len: int,
    report: Report,
    truncate: Truncate = "prompt-start",
    supervise: Supervise = "all",
) -> list[Example]:
    """All rows as examples of at most `seq_len` tokens, in order.

    `tokenizer` is a fast tokenizer of transformers. `supervise` says whether all answers of a chat are labels or the
    last one only. Rows over `seq_len`: `prompt-start` drops the row's beginning, but never of the last answer, which
    keeps its first `seq_len` tokens when it alone is longer; `drop` drops the row; `error` raises. What is changed or
    dropped is counted in `report`.

    Raises DataError when no row is left or, with `error`, for the first row that is too long; ConfigError for a
    tokenizer that cannot do the job.
    """
    encoder = Encoder(tokenizer, seq_len, report, truncate, supervise)
    examples = []
    for begin in range(0, len(rows), ROWS_PER_CALL):
        examples += encoder.encode(rows[begin : begin + ROWS_PER_CALL])
    if not examples:
        found = "; ".join(report.summary()) or "the files hold no rows"
        raise DataError(f"no data rows left with seq-len {seq_len}: {found}. Correct the data or raise seq-len")
    return examples


def check_ids(examples: Iterable[Example], vocab_size: int) -> None:
    """Raises DataError for a token that the model has no embedding for. More embeddings than tokens is legal."""
    for example in examples:
        largest = int(example.ids.max())
        if largest >= vocab_size:
            raise DataError(
                f"{example.file} line {example.line}: token id {largest}, but the model has {vocab_size} embedding "
                f"rows (ids 0 to {vocab_size - 1}); use the tokenizer that belongs to the model"
            )


def show(example: Example, tokenizer: Any) -> str:
    """The row as text, its supervised parts between « and »."""
    edges = np.flatnonzero(np.diff(example.supervised)) + 1
    parts = []
    for run in np.split(np.arange(len(example.ids)), edges):
        text = tokenizer.decode(example.ids[run].tolist(), clean_up_tokenization_spaces=False)
        parts.append(f"«{text}»" if example.supervised[run[0]] else text)
    return "".join(parts)


@dataclass(frozen=True)
class Encoder:
    """encode_rows, for rows that the tokenizer takes in one call."""

    tokenizer: Any
    seq_len: int
    report: Report
    truncate: Truncate
    supervise: Supervise

    def encode(self, rows: Sequence[Row]) -> list[Example]:
        if not getattr(self.tokenizer, "is_fast", False):
            raise ConfigError(
                f"{type(self.tokenizer).__name__} gives no character offsets, which the loss mask needs; "
                "use a model directory with a tokenizer.json"
            )
        rendered = [text for row in rows if (text := self._render(row)) is not None]
        if not rendered:
            return []
        # The template has written the special tokens. verbose=False: a row over the model's limit is ours to handle.
        tokens = self.tokenizer(
            [text.text for text in rendered], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        examples = map(self._example, rendered, tokens["input_ids"], tokens["offset_mapping"])
        return [example for example in examples if example is not None]

    def _render(self, row: Row) -> Rendered | None:
        if row.messages is None:
            text = row.prompt + row.completion
            return Rendered(row, text, [(len(row.prompt), len(text))])
        from jinja2 import TemplateError

        turns = [i for i, m in enumerate(row.messages) if i >= row.first_answer and m["role"] == "assistant"]
        if self.supervise == "last":
            turns = turns[-1:]
        try:
            text = self._apply_template(row.messages)
            answers = [self._answer(text, row.messages, turn) for turn in turns]
        except ConfigError:
            raise
        except (TemplateError, *STUMBLES) as error:  # such as roles that do not alternate
            return self._drop(row, f"refused by the chat template: {error}")
        return Rendered(row, text, [answer for answer in answers if answer is not None])

    def _apply_template(self, messages: list[Message]) -> str:
        if not self.tokenizer.chat_template:
            raise ConfigError(
                "chat rows need a chat template, and this tokenizer has none: use the model's instruct version, put a "
                "chat_template.jinja into the model directory, or give rows of prompt and completion as plain text"
            )
        return self.tokenizer.apply_chat_template(messages, tokenize=False)

    def _answer(self, text: str, messages: list[Message], turn: int) -> tuple[int, int] | None:
        """The characters of `text` that stand for the content of message `turn`; None if the template leaves it out.

        The chat is rendered again with a sentinel as that content. What comes before and after the sentinel is the
        template's and the other messages'; what `text` has instead of the sentinel is the answer, whatever the
        template has trimmed. A template may also render before it what depends on it (Qwen3 takes a think block out
        of the content and writes it anew): then all that differs is the answer, and all of the content that stands
        there verbatim.
        """
        sentinel = SENTINEL
        while sentinel in text:
            sentinel += "X"
        content = messages[turn]["content"]
        messages = [*messages[:turn], {**messages[turn], "content": sentinel}, *messages[turn + 1 :]]
        head, found, tail = self._apply_template(messages).partition(sentinel)
        if not found:
            return None
        start = _common_prefix(text, head)
        end = len(text) - _common_prefix(text[start:][::-1], tail[::-1])
        if start < len(head) and text.endswith(content, 0, end):
            start = min(start, end - len(content))
        return start, end

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


def _common_prefix(a: str, b: str) -> int:
    """Number of characters that two texts begin with alike."""
    length = min(len(a), len(b))
    codes = [np.frombuffer(text[:length].encode("utf-32-le"), dtype=np.uint32) for text in (a, b)]
    differ = np.flatnonzero(codes[0] != codes[1])
    return int(differ[0]) if differ.size else length
