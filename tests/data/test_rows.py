"""Reading JSONL: every row that is one, and every other line counted with its reason and number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import shared

from fullstride.data.readers import JsonlFile
from fullstride.data.report import Report
from fullstride.data.rows import MEETING_SYSTEM_PROMPT, Row, rows_of
from fullstride.errors import ConfigError


def read_rows(path: Path, report: Report) -> list[Row]:
    """All rows of a JSONL file."""
    source = JsonlFile(path)
    return list(rows_of(source.records(), source.name, report))


GOOD = {"prompt": "Say hello.", "completion": "Hello."}
BAD_LINES = [
    (b'{"prompt": "a", "completion": ""}', "empty completion"),
    (b'{"prompt": "a", "completion": " \\n"}', "empty completion"),
    (b'{"prompt": "a", "completion": null}', "null content"),
    (b'{"prompt": null, "completion": "b"}', "null content"),
    (b'{"prompt": "a"}', "missing field"),
    (b'{"completion": "a"}', "missing field"),
    (b'{"dialogue": "a"}', "missing field"),
    (b'{"dialogue": " ", "summary": "b"}', "empty dialogue"),
    (b'{"dialogue": "a", "summary": " "}', "empty completion"),
    (b'{"prompt": "a", "completion": 5}', "content is not text"),
    (b'{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}', "content is not text"),
    (b'{"prompt": "a", "completion": "caf\xe9"}', "not UTF-8"),
    (b'{"prompt": "a", "completion": "b"', "broken JSON"),
    (b"[" * 100_000, "broken JSON"),
    (b'{"prompt": "a", "completion": "\\ud83d"}', "lone surrogate"),
    (b'["a", "b"]', "not an object"),
    (b'"a"', "not an object"),
    (b'{"text": "a"}', "unknown shape"),
    (b"{}", "unknown shape"),
    (b'{"messages": null}', "null content"),
    (b'{"messages": "a"}', "messages are not a list of objects"),
    (b'{"messages": ["a"]}', "messages are not a list of objects"),
    (b'{"messages": []}', "no assistant turn"),
    (b'{"messages": [{"role": "user", "content": "a"}]}', "no assistant turn"),
    (b'{"messages": [{"role": "user"}, {"role": "assistant", "content": "b"}]}', "missing field"),
    (b'{"messages": [{"content": "a"}, {"role": "assistant", "content": "b"}]}', "missing field"),
    (b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}', "null content"),
    (b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}', "empty completion"),
    (b'{"messages": [{"role": "tool", "content": "a"}]}', "role 'tool' is not supported"),
    (b'{"messages": [{"role": ["x"], "content": "a"}]}', "role ['x'] is not supported"),
    (
        b'{"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": 1}]}]}',
        "tool_calls is not supported",
    ),
    (b'{"messages": [{"role": "assistant", "content": "a"}], "tools": [{"name": "f"}]}', "tools are not supported"),
]


def write(path: Path, *lines: bytes | dict[str, Any], end: bytes = b"\n") -> Path:
    raw = [line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in lines]
    path.write_bytes(end.join(raw))
    return path


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_is_dropped_and_counted_with_its_number(tmp_path: Path, line: bytes, reason: str) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, line, GOOD)
    report = Report()
    assert [row.line for row in read_rows(path, report)] == [1, 3]
    assert report.events() == [{"event": "data", "file": str(path), "reason": reason, "count": 1, "lines": [2]}]
    assert report.total == 1


def test_nine_good_rows_and_three_bad_kinds(tmp_path: Path) -> None:
    bad = [b'{"prompt": "a", "completion": ""}', b"{broken", b"\xe9"]
    path = write(tmp_path / "a.jsonl", *[GOOD] * 3, bad[0], *[GOOD] * 3, bad[1], bad[1], *[GOOD] * 3, bad[2])
    report = Report()
    assert len(read_rows(path, report)) == 9
    assert [(event["reason"], event["count"], event["lines"]) for event in report.events()] == [
        ("empty completion", 1, [4]),
        ("broken JSON", 2, [8, 9]),
        ("not UTF-8", 1, [13]),
    ]
    assert report.total == 4
    assert report.summary()[1] == f"{path}: 2 rows: broken JSON (lines 8, 9)"


def test_bom_crlf_blank_lines_and_u2028_are_no_faults(tmp_path: Path) -> None:
    odd = {"prompt": "one\u2028two\u0085three", "completion": "four \U0001f600"}
    lines = [b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), odd, b"", b"  ", GOOD, b""]
    report = Report()
    rows = read_rows(write(tmp_path / "a.jsonl", *lines, end=b"\r\n"), report)
    assert [(row.line, row.prompt, row.completion) for row in rows] == [
        (1, GOOD["prompt"], GOOD["completion"]),
        (2, odd["prompt"], odd["completion"]),
        (5, GOOD["prompt"], GOOD["completion"]),
    ]
    assert report.events() == []


def test_a_carriage_return_between_tokens_is_white_space(tmp_path: Path) -> None:
    report = Report()
    assert len(read_rows(write(tmp_path / "a.jsonl", b'{"prompt": "a",\r"completion": "b"}'), report)) == 1
    assert report.total == 0


def test_a_byte_order_mark_of_a_joined_file_is_no_fault(tmp_path: Path) -> None:
    report = Report()
    assert len(read_rows(write(tmp_path / "a.jsonl", GOOD, b"\xef\xbb\xbf" + json.dumps(GOOD).encode()), report)) == 2
    assert report.total == 0


def test_a_nasty_file(tmp_path: Path) -> None:
    lines = [
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
        {"prompt": "word " * 5000, "completion": "Long."},
        {"prompt": "a", "completion": ""},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]},
        {"prompt": "a\u2028b", "completion": "\U0001f600"},
        {"messages": [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "a"},
        GOOD,
        json.dumps(GOOD).encode() + b"\r",
        b'{"prompt": "a", "completion": "\xe9"}',
        b"",
        b'{"prompt": ',
    ]
    report = Report()
    rows = read_rows(write(tmp_path / "nasty.jsonl", *lines), report)
    assert [row.line for row in rows] == [1, 2, 5, 6, 8, 9]
    assert {event["reason"]: event["lines"] for event in report.events()} == {
        "empty completion": [3],
        "null content": [4],
        "missing field": [7],
        "not UTF-8": [10],
        "broken JSON": [12],
    }


def test_shapes_become_rows(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write(
        tmp_path / "a.jsonl",
        {"messages": chat, "id": 7},
        {"prompt": [*chat, {"role": "user", "content": "r"}], "completion": [{"role": "assistant", "content": "b"}]},
        {"dialogue": " A: hi \n", "summary": "\n They met. "},
    )
    report = Report()
    rows = read_rows(path, report)
    assert rows[0] == Row(str(path), 1, messages=chat)
    assert rows[1].messages == [*chat, {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]
    assert rows[1].first_answer == 3
    assert rows[2].messages == [
        {"role": "system", "content": MEETING_SYSTEM_PROMPT},
        {"role": "user", "content": "A: hi"},
        {"role": "assistant", "content": "They met."},
    ]
    assert report.total == 0


def test_turns_after_the_last_answer_are_cut_and_counted(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write(tmp_path / "a.jsonl", {"messages": [*chat, {"role": "user", "content": "thanks"}]})
    report = Report()
    assert read_rows(path, report)[0].messages == chat
    assert report.events()[0]["reason"] == "turns after the last answer cut"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl: No such file"):
        read_rows(tmp_path / "none.jsonl", Report())


@pytest.mark.parametrize(
    ("file", "count"), [("chat/train", 743), ("chat/validation", 60), ("ami/train", 97), ("ami/test", 20)]
)
def test_all_shared_rows_load(file: str, count: int) -> None:
    report = Report()
    assert len(read_rows(shared("data", f"{file}.jsonl"), report)) == count
    assert report.total == 0


def test_long_line_lists_are_whole_in_events_and_short_in_the_summary() -> None:
    report = Report()
    for line in range(1, 9):
        report.add("a.jsonl", "truncated", line)
    assert report.events()[0]["lines"] == list(range(1, 9))
    assert report.summary() == ["a.jsonl: 8 rows: truncated (lines 1-8)"]
    for line in range(10, 22, 2):
        report.add("a.jsonl", "truncated", line)
    assert report.summary() == ["a.jsonl: 14 rows: truncated (lines 1-8, 10, 12, 14, 16, ...)"]
