"""Sources as encoded documents, kept on the disk and found again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.data.test_chat import load_tokenizer, with_template

from fullstride.data import cache as cache_module
from fullstride.data import encode
from fullstride.data.cache import Cache, open_cache, prune
from fullstride.data.chat import Encoder
from fullstride.data.encode import SourceEncoder, report_repeated, scan_all
from fullstride.data.examples import Example, Examples, check_ids
from fullstride.data.packing import PackedRows
from fullstride.data.report import Report
from fullstride.data.sources import train_parts
from fullstride.errors import ConfigError, DataError


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


def row(i: int) -> dict[str, str]:
    return {"prompt": f"Question {i}?", "completion": f" Answer {i}." + " and so on" * (i % 3)}


class Start:
    """A start of a run: what it reads and finds in `directory`."""

    def __init__(self, data: str | Path, directory: Path | None, seq_len: int = 48, tokenizer: Any = None, **keys: Any):
        self.report, self.notes = Report(), list[str]()
        self.advanced = 0
        self.encoded = 0  # rows that were tokenised now
        parts = train_parts(str(data))
        self.scans = scan_all(parts)
        encoder = Encoder(tokenizer or load_tokenizer("smollm2"), seq_len, self.report, **keys)
        sources = SourceEncoder(encoder, Cache(directory, self.notes), self.advance)
        original = Encoder.encode_all

        def counted(this: Encoder, rows: Any) -> Any:
            for part in original(this, rows):
                self.encoded += len(part)
                yield part

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Encoder, "encode_all", counted)
            self.examples, said = sources.examples(parts, self.scans, seed=7)
        self.notes += said

    def advance(self, count: int) -> None:
        self.advanced += count

    @property
    def content(self) -> list[tuple[list[int], list[bool], int]]:
        return [(e.ids.tolist(), e.supervised.tolist(), e.line) for e in self.examples]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(
        tmp_path / "a.jsonl", *map(row, range(300)), "{broken", {"prompt": "p " * 90, "completion": "c"}, row(1)
    )


def entries(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_dir())


def test_a_second_start_finds_the_same_rows_and_the_same_report(data: Path, tmp_path: Path) -> None:
    first, second = Start(data, tmp_path / "kept"), Start(data, tmp_path / "kept")
    assert (first.encoded, second.encoded) == (302, 0)
    assert second.content == first.content and len(first.content) == 302
    assert second.report.events() == first.report.events()
    assert {event["reason"]: event["lines"] for event in first.report.events()} == {
        "broken JSON": [301],
        "truncated": [302],
    }
    assert first.advanced == second.advanced == 303
    assert first.notes == second.notes == []
    assert Start(data, None).content == first.content  # kept nowhere
    (tmp_path / "b.jsonl").write_bytes(data.read_bytes())
    moved = Start(tmp_path / "b.jsonl", tmp_path / "kept")
    assert moved.encoded == 0 and moved.examples[0].file == moved.report.events()[0]["file"] == str(
        tmp_path / "b.jsonl"
    )


def test_what_decides_about_rows_decides_about_entries(data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    kept, smollm2 = tmp_path / "kept", load_tokenizer("smollm2")
    Start(data, kept)
    chatty = with_template(smollm2, smollm2.chat_template + " ")
    for keys in (
        {"seq_len": 47},
        {"truncate": "drop"},
        {"supervise": "last"},
        {"thinking": "on"},
        {"tokenizer": chatty},
    ):
        assert Start(data, kept, **keys).encoded > 0 and Start(data, kept, **keys).encoded == 0  # pyright: ignore
    data.write_text(data.read_text().replace("Question 5?", "Question X?"))
    assert Start(data, kept).encoded > 0
    monkeypatch.setattr(encode, "CODE", encode.CODE[:-1])  # another version of the code
    assert Start(data, kept).encoded > 0


def test_a_template_that_writes_todays_date_is_rendered_anew_tomorrow(tmp_path: Path, monkeypatch: Any) -> None:
    smollm2 = load_tokenizer("smollm2")
    dated = with_template(smollm2, "{{ strftime_now('%d') }}" + smollm2.chat_template)
    data = write(tmp_path / "a.jsonl", {"dialogue": "a", "summary": "b"})
    assert Start(data, tmp_path / "kept", tokenizer=dated).encoded == 1
    assert Start(data, tmp_path / "kept", tokenizer=dated).encoded == 0
    monkeypatch.setattr(encode, "time", SimpleNamespace(strftime=lambda _: "tomorrow"))
    assert Start(data, tmp_path / "kept", tokenizer=dated).encoded == 1


def damage_record(entry: Path) -> None:
    (entry / "record.json").write_text('{"checksums": {')


def flip(entry: Path) -> None:
    content = bytearray((entry / "documents.tokens").read_bytes())
    content[-100] ^= 1
    (entry / "documents.tokens").write_bytes(content)


def cut(entry: Path) -> None:
    os.truncate(entry / "facts.npy", 200)


def remove(entry: Path) -> None:
    (entry / "documents.tokens").unlink()


def other_types(entry: Path) -> None:
    (entry / "record.json").write_text('{"checksums": [1], "events": 3}')


@pytest.mark.parametrize("damage", [damage_record, flip, cut, remove, other_types])
def test_a_damaged_entry_is_made_anew(data: Path, tmp_path: Path, damage: Any) -> None:
    kept = tmp_path / "kept"
    first = Start(data, kept)
    content = first.content
    damage(entries(kept)[0])
    again = Start(data, kept)
    assert again.encoded == first.encoded and again.content == content
    assert again.report.events() == first.report.events()
    assert Start(data, kept).encoded == 0


def test_what_fails_is_not_kept(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 302: .* tokens, but seq-len is 48"):
        Start(data, tmp_path / "kept", truncate="error")
    assert entries(tmp_path / "kept") == []


def test_a_cache_that_cannot_be_written_is_said_once(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    other = write(tmp_path / "b.jsonl", row(1))
    start = Start(f"{data},{other}", tmp_path / "file" / "kept")
    assert len(start.content) == 303
    assert len(start.notes) == 1 and "tokenised rows are not kept" in start.notes[0] and "--cache-dir" in start.notes[0]


def test_a_disk_that_is_full_in_the_middle_is_said(data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    original, calls = cache_module.put_together, []

    def full(*arguments: Any) -> Path:
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return original(*arguments)

    monkeypatch.setattr(cache_module, "put_together", full)
    start = Start(data, tmp_path / "kept")
    assert len(start.content) == 302 and start.report.total == 2
    assert "No space left on device" in start.notes[0]
    assert entries(tmp_path / "kept") == []


@pytest.mark.slow
def test_several_processes_make_an_entry_once(data: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.data.test_encode import Start;"
        "s = Start(sys.argv[1], Path(sys.argv[2])); print(s.encoded, len(s.content))"
    )
    command = [sys.executable, "-c", code, str(data), str(tmp_path / "kept")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["src", ".", os.environ.get("PYTHONPATH", "")])}
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    said = sorted(process.communicate(timeout=100)[0].split() for process in running)
    assert said == [["0", "302"], ["302", "302"]]


def test_entries_go_when_they_are_old_or_too_many(tmp_path: Path, monkeypatch: Any) -> None:
    for days, name in ((40, "old"), (3, "older"), (2, "newer"), (1, "newest")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (time.time() - days * 86400,) * 2)
    (tmp_path / "old.lock").touch()
    os.utime(tmp_path / "old.lock", (time.time() - 40 * 86400,) * 2)
    prune(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newer", "newest", "older"]
    monkeypatch.setattr(cache_module, "MOST_BYTES", 250)
    prune(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newer", "newest"]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def directory(name: str, notes: list[str] | None = None) -> Path | None:
        return open_cache(name, [] if notes is None else notes).directory

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert directory("") == tmp_path / "fullstride" / "rows"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert directory("") == tmp_path / ".cache" / "fullstride" / "rows"
    assert directory("~/x") == tmp_path / "x" and directory("off") is None
    with pytest.raises(ConfigError, match=r"cache-dir: ~nobody-of-this-name/x is nowhere .* or off"):
        directory("~nobody-of-this-name/x")

    def homeless(_: Path) -> None:  # a container's user may have no home
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    notes: list[str] = []
    assert directory("", notes) is None and "--cache-dir names a place" in notes[0]


def test_weights_repeat_documents(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", *map(row, range(30)), "{broken")
    b = write(tmp_path / "b.jsonl", *map(row, range(100, 120)))
    start = Start(f"{a}:0.3,{b}:0.7", tmp_path / "kept")
    assert len(start.examples) == 100 and [note.split(": ")[0] for note in start.notes] == [str(a), str(b)]
    files = start.examples.files()
    assert np.bincount(files).tolist() == [30, 70]
    lines = [example.line for example in start.examples if example.file == str(b)]
    assert sorted(np.bincount(lines)[1:].tolist()) == [3] * 10 + [4] * 10
    assert len(start.examples.whole) == 50
    rows = PackedRows(start.examples, 48, packing=True)
    assert sum(map(len, rows.documents)) == 100
    assert rows.digest() != PackedRows(Start(f"{a}:0.5,{b}:0.5", None).examples, 48, packing=True).digest()
    empty = write(tmp_path / "c.jsonl", "{broken")
    with pytest.raises(DataError, match=r"c\.jsonl has a weight and no row to train on: .*broken JSON"):
        Start(f"{a}:1,{empty}:1", None)


def test_documents_that_come_again_are_named_and_stay(tmp_path: Path) -> None:
    a = write(
        tmp_path / "a.jsonl", row(1), row(2), row(1), {"prompt": "Question 1?", "completion": " Another."}, row(1)
    )
    b = write(tmp_path / "b.jsonl", row(5), row(2), row(1))
    train, held_out, report = Start(a, None).examples, Start(b, None).examples, Report()
    report_repeated(train, report)
    report_repeated(held_out, report, known=train)
    assert [(Path(e["file"]).name, e["reason"], e["lines"]) for e in report.events()] == [
        ("a.jsonl", "the same as an earlier one (kept)", [3, 5]),
        ("b.jsonl", "also in the training data (kept)", [2, 3]),
    ]
    assert len(train) == 5


def test_data_without_rows_say_what_they_may_be(tmp_path: Path) -> None:
    array = tmp_path / "a.json"
    array.write_text(json.dumps([row(1)], indent=2))
    with pytest.raises(DataError, match=r"no data rows left .*broken JSON.*jq -c '\.\[\]'"):
        Start(array, None)
    (tmp_path / "e.jsonl").touch()
    with pytest.raises(DataError, match="the files hold no rows"):
        Start(tmp_path / "e.jsonl", None)


def test_a_file_that_changes_meanwhile_is_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = encode.rows_of

    def growing(records: Any, file: str, report: Report) -> Any:
        for i, found in enumerate(original(records, file, report)):
            if i == 3:
                with data.open("a") as more:
                    more.write(json.dumps(row(9)) + "\n")
            yield found

    monkeypatch.setattr(encode, "rows_of", growing)
    with pytest.raises(ConfigError, match=r"a\.jsonl changed while it was read; start again"):
        Start(data, None)


def test_documents_are_found_by_number_and_slice(data: Path, tmp_path: Path) -> None:
    examples = Start(data, tmp_path / "kept").examples
    assert [example.line for example in examples[5:8]] == [6, 7, 8] and examples[-1].line == 303
    with pytest.raises(DataError, match=r"a\.jsonl line \d+: token id \d+, but the model has 100 embedding rows"):
        check_ids(examples, 100)
    check_ids(examples, 49_152)
    assert isinstance(examples[0], Example) and isinstance(examples, Examples)
