"""Records as rows to train on. A record that is not a row is dropped and counted, with its reason and number.

Shapes of a row:
  {"messages": [{"role", "content"}, ...]}   a chat: every assistant turn is an answer
  {"prompt", "completion"}                   plain text without a chat template; or two lists of messages, which are
                                             one chat of which only the completion's assistant turns are answers
  {"dialogue", "summary"}                    a meeting and its summary, made into a chat
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fullstride.data.report import Report

MEETING_SYSTEM_PROMPT = (
    "You are a meeting assistant. Write a concise summary of the meeting transcript: the main discussion points, "
    "the decisions that were made, and the action items with their owners and deadlines."
)

ROLES = ("system", "user", "assistant")
# Parts of a message that a chat template would render but that a mask over `content` cannot supervise.
UNSUPPORTED_KEYS = ("tool_calls", "function_call", "reasoning_content")

SHAPES = (("messages",), ("prompt", "completion"), ("dialogue", "summary"))
COLUMNS = (*(key for shape in SHAPES for key in shape), "tools")  # what is looked at

Message = dict[str, str]


@dataclass(frozen=True)
class Row:
    """One row: `messages` of a chat, or else `prompt` and `completion`, plain text.

    Answers are the assistant turns from message `first_answer` on. `line` counts from 1.
    """

    file: str
    line: int
    messages: list[Message] | None = None
    prompt: str = ""
    completion: str = ""
    first_answer: int = 0


class BadRow(Exception):
    """A record that cannot be trained on; its text is the reason that is counted."""


def rows_of(records: Iterable[tuple[int, bytes | dict[str, Any] | BadRow]], file: str, report: Report) -> Iterator[Row]:
    """Rows of numbered records of `file`: lines or objects. Blank lines are no rows, bad ones go to `report`."""
    for line, record in records:
        try:
            if isinstance(record, BadRow):
                raise record
            if isinstance(record, bytes):
                record = read_record(record)
                if record is None:
                    continue
            row, num_cut = parse_record(record, file, line)
        except BadRow as bad:
            report.add(file, str(bad), line)
            continue
        if num_cut:
            report.add(file, "turns after the last answer cut", line)
        yield row


def meeting_messages(dialogue: str) -> list[Message]:
    """The prompt that a meeting's transcript becomes, in training and in generation."""
    return [
        {"role": "system", "content": MEETING_SYSTEM_PROMPT},
        {"role": "user", "content": dialogue.strip()},
    ]


def read_record(line: bytes) -> dict[str, Any] | None:
    """The object of a line of JSONL; None for a blank one. Raises BadRow."""
    try:
        # A byte-order mark starts a file, and so may start any line of files that were joined.
        text = line.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        raise BadRow("not UTF-8") from None
    if not text.strip():
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: ten thousand open brackets
        raise BadRow("broken JSON") from None
    if not isinstance(record, dict):
        raise BadRow("not an object")
    return record


def parse_record(record: Any, file: str, line: int) -> tuple[Row, int]:
    """The row, and how many turns after its last answer were cut (they teach nothing). Raises BadRow."""
    if not isinstance(record, dict):
        raise BadRow("not an object")
    if record.get("tools"):
        raise BadRow("tools are not supported")
    shape = _shape(record)
    if shape == ("messages",):
        return _chat_row(_messages(record["messages"]), 0, file, line)
    if shape == ("prompt", "completion"):
        prompt, completion = _field(record, "prompt"), _field(record, "completion")
        if isinstance(prompt, list) and isinstance(completion, list):
            return _chat_row(_messages(prompt) + _messages(completion), len(prompt), file, line)
        return Row(file, line, prompt=plain_text(prompt), completion=_answer(completion)), 0
    if shape == ("dialogue", "summary"):
        dialogue, summary = plain_text(_field(record, "dialogue")), _answer(_field(record, "summary"))
        if not dialogue.strip():
            raise BadRow("empty dialogue")
        answer = {"role": "assistant", "content": summary.strip()}
        return _chat_row([*meeting_messages(dialogue), answer], 0, file, line)
    raise BadRow("unknown shape")


def _shape(record: dict[str, Any]) -> tuple[str, ...] | None:
    """The keys that make the record what it is. In a table every row has all columns: null ones are another shape's."""
    for present in (lambda key: record.get(key) is not None, lambda key: key in record):
        for shape in SHAPES:
            if any(present(key) for key in shape):
                return shape
    return None


def _chat_row(messages: list[Message], first_answer: int, file: str, line: int) -> tuple[Row, int]:
    answers = [i for i, message in enumerate(messages) if i >= first_answer and message["role"] == "assistant"]
    if not answers:
        raise BadRow("no assistant turn")
    num_kept = answers[-1] + 1
    return Row(file, line, messages=messages[:num_kept], first_answer=first_answer), len(messages) - num_kept


def _messages(value: Any) -> list[Message]:
    if value is None:
        raise BadRow("null content")
    columns = list(value.values()) if isinstance(value, dict) else []
    if columns and all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        # the Hub's library makes one object of lists out of a list of objects
        value = [dict(zip(value, turn, strict=True)) for turn in zip(*columns, strict=True)]
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise BadRow("messages are not a list of objects")
    return [_message(message) for message in value]


def _message(message: dict[str, Any]) -> Message:
    role = _field(message, "role")
    if role not in ROLES:
        raise BadRow(f"role {role!r:.40} is not supported")
    for key in UNSUPPORTED_KEYS:
        if message.get(key):
            raise BadRow(f"{key} is not supported")
    content = _field(message, "content")
    return {"role": role, "content": _answer(content) if role == "assistant" else plain_text(content)}


def _field(record: dict[str, Any], key: str) -> Any:
    if key not in record:
        raise BadRow("missing field")
    return record[key]


def _answer(value: Any) -> str:
    text = plain_text(value)
    if not text.strip():
        raise BadRow("empty completion")
    return text


def plain_text(value: Any) -> str:
    """`value`, if it is text that a tokenizer takes. Raises BadRow."""
    if value is None:
        raise BadRow("null content")
    if not isinstance(value, str):
        raise BadRow("content is not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # JSON can escape half of a surrogate pair, which no tokenizer takes
        raise BadRow("lone surrogate") from None
    return value
