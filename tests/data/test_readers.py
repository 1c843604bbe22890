"""Files as records: what they are, whatever their names say; Parquet through pyarrow."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fullstride.data import readers
from fullstride.data.readers import JsonlFile, ParquetFile
from fullstride.data.report import Report
from fullstride.data.rows import Row, rows_of
from fullstride.data.sources import source
from fullstride.errors import ConfigError

LINE = b'{"prompt": "a", "completion": "b"}\n'


def rows(path: Path, report: Report | None = None) -> list[Row]:
    found = source(path)
    return list(rows_of(found.records(), found.name, report or Report()))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"\x1f\x8b\x08...", "gunzip"),
        (b"PK\x03\x04...", "unzip"),
        (b"PAR1...", r"end in \.parquet"),
        (LINE.decode().encode("utf-16"), "iconv"),
        (b"\x28\xb5\x2f\xfd...", "unzstd"),
        (bytes(range(256)) * 50, "binary file"),
        (b"\0" * 1000, "binary file"),
    ],
)
def test_files_that_are_no_jsonl_are_refused(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=word):
        rows(path)


def test_a_zero_byte_in_one_row_does_not_make_the_file_binary(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + b"\0\n" + LINE)
    report = Report()
    assert [row.line for row in rows(path, report)] == [1, 3]
    assert report.events()[0]["lines"] == [2]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps([json.loads(LINE)] * 2, indent=1), r"JSON array.*jq -c '\.\[\]'"),
        (json.dumps([json.loads(LINE)]), "JSON array"),
        (json.dumps(json.loads(LINE), indent=1), "objects over several lines.*jq -c"),
        ("plain text", None),
    ],
)
def test_what_a_file_without_rows_may_be(tmp_path: Path, content: str, words: str | None) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    assert rows(path) == []
    hint = JsonlFile(path).hint()
    assert hint == "" if words is None else re.search(words, hint)


def test_a_line_that_is_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MOST_LINE", 64)
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + b"x" * 63 + b"\n" + b"x" * 64 + b"\n" + b"x" * 300 + b"\n" + LINE.strip())
    report = Report()
    assert [row.line for row in rows(path, report)] == [1, 5]
    assert [(event["reason"], event["lines"]) for event in report.events()] == [
        ("broken JSON", [2]),
        ("line over 0 MB", [3, 4]),
    ]


def test_a_part_of_a_file_keeps_its_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE * 5)
    assert [number for number, _ in JsonlFile(path, past=4).records()] == [1, 2, 3]
    assert [number for number, _ in JsonlFile(path, first=4).records()] == [4, 5]
    scans = [JsonlFile(path, past=4).scan(), JsonlFile(path, first=4).scan(), JsonlFile(path).scan()]
    assert len({scan.digest for scan in scans}) == 3 and scans[0].count == 3 and scans[2].count == 5


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE)

    def refuse(*_: Any, **__: Any) -> None:  # root, as whom tests may run, reads everything
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"cannot read .*Permission denied; name a readable file"):
        rows(path)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*Is a directory"):
        JsonlFile(tmp_path).scan()


def write_parquet(path: Path, table: list[dict[str, Any]], **keys: Any) -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    columns = {name: [row.get(name) for row in table] for name in dict.fromkeys(key for row in table for key in row)}
    pq.write_table(pa.table(columns), path, **keys)
    return path


def turn(role: str, content: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


def test_parquet_rows_are_those_of_jsonl(tmp_path: Path) -> None:
    table = [
        {"messages": [turn("user", "q", tool_calls=None, name="x"), turn("assistant", "a")], "id": 1},
        {"messages": [turn("user", "q"), turn("assistant", None)], "id": None},
        {"prompt": "p", "completion": "c"},  # messages: null, as every row of a table has every column
        {"dialogue": "A: hi", "summary": "s"},
        {"prompt": "p", "completion": None},
        {"id": 4},  # all null
        {"messages": [turn("user", "q"), turn("assistant", "a", tool_calls=[{"id": "1"}])]},
    ]
    report = Report()
    found = rows(write_parquet(tmp_path / "a.PARQUET", [*table, *table * 100], row_group_size=50), report)
    assert [row.line for row in found[:3]] == [1, 3, 4] and len(found) == 303
    assert found[0].messages == [turn("user", "q"), turn("assistant", "a")]
    assert (found[1].prompt, found[1].completion) == ("p", "c")
    assert {event["reason"]: event["lines"][:2] for event in report.events()} == {
        "null content": [2, 5],
        "tool_calls is not supported": [7, 14],
    }


def test_parquet_that_holds_other_things(tmp_path: Path) -> None:
    report = Report()
    path = write_parquet(tmp_path / "a.parquet", [{"text": "a", "n": float("nan")}, {"text": None, "n": 1.0}])
    assert rows(path, report) == []
    assert report.events()[0]["reason"] == "unknown shape"
    assert ParquetFile(path).hint().endswith("has the columns text, n")
    numbers = write_parquet(tmp_path / "b.parquet", [{"prompt": float("nan"), "completion": "x"}])
    assert rows(numbers, report) == []
    assert report.events()[1]["reason"] == "content is not text"


def test_bytes_that_are_no_text_in_parquet_are_named(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    column = pa.array([b"good", b"caf\xe9", b"good"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": column, "completion": pa.array(["a", "b", "c"])}), tmp_path / "a.parquet")
    report = Report()
    assert [row.line for row in rows(tmp_path / "a.parquet", report)] == [1, 3]
    assert [(event["reason"], event["lines"]) for event in report.events()] == [("not UTF-8", [2])]


def test_parquet_that_is_damaged(tmp_path: Path) -> None:
    whole = write_parquet(tmp_path / "a.parquet", [{"prompt": f"{i} " * 30, "completion": "c"} for i in range(500)])
    content = whole.read_bytes()
    for damaged in (b"", b"PAR1", content[:-20], content[: len(content) // 2], LINE, b"x" * 40 + content[40:]):
        path = tmp_path / "b.parquet"
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"b\.parquet cannot be read as Parquet .*; write it again"):
            ParquetFile(path).scan()
            rows(path)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for use in (ParquetFile(path).scan, lambda: rows(path)):
        with pytest.raises(ConfigError, match=r"Parquet needs the extra hub: pip install 'fullstride\[hub\]'"):
            use()
