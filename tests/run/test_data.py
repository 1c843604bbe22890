"""Runs over weighed files, over kept rows, and over data that come again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fullstride.cli.main import main
from fullstride.data import encode
from fullstride.errors import ConfigError
from fullstride.run.metrics import read_events
from tests.run.conftest import exact, keys, run, write_rows


def test_weighed_files_make_an_epoch_and_a_run_file_for_anywhere(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "a.jsonl", 6)
    write_rows(tmp_path / "b.jsonl", 4, first=50)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    weighed = Path("a.jsonl:0.3,b.jsonl:0.7")
    assert run(model_dir, weighed, out, epochs=1).steps == 5  # 20 documents: 6 of a, 14 of b
    said = capsys.readouterr().out
    assert f"note: {tmp_path / 'b.jsonl'}: 4 documents, each 3 or 4 times an epoch (70.0 % of all)" in said
    assert "data: 20 documents" in said
    notes = [event["text"] for event in read_events(out / "log.jsonl") if event["event"] == "note"]
    assert f"{tmp_path / 'a.jsonl'}: 6 documents, each once an epoch (30.0 % of all)" in notes
    monkeypatch.chdir("/")
    assert main(["finetune", str(out / "run.toml"), "--epochs", "2"]) == 0
    assert f'data = "{tmp_path}/a.jsonl:0.3,{tmp_path}/b.jsonl:0.7"' in (out / "run.toml").read_text()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"holds another run .data was"):
        run(model_dir, Path("a.jsonl:0.4,b.jsonl:0.6"), out, epochs=1)


def test_a_run_over_kept_rows_is_the_same_run(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (data_dir / "train.jsonl").open("a") as file:
        file.write("{broken\n")
    run(model_dir, data_dir, tmp_path / "new", steps=2, cache_dir=tmp_path / "kept")

    def no_more(*_: object) -> None:
        raise AssertionError("rows are read again")

    monkeypatch.setattr(encode, "rows_of", no_more)
    run(model_dir, data_dir, tmp_path / "again", steps=2, cache_dir=tmp_path / "kept")
    assert exact(tmp_path / "new") == exact(tmp_path / "again")
    events = [
        [e | {"time": 0} for e in read_events(tmp_path / name / "log.jsonl") if e["event"] == "data"]
        for name in ("new", "again")
    ]
    assert events[0] == events[1] and events[0][0]["lines"] == [21]
    with pytest.raises(AssertionError, match="rows are read again"):
        run(model_dir, data_dir, tmp_path / "off", steps=2, cache_dir="off")


def test_a_place_where_rows_cannot_be_kept_is_a_note_and_no_fault(
    model_dir: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    run(model_dir, data_dir, tmp_path / "run", steps=1, cache_dir=tmp_path / "file" / "kept")
    assert capsys.readouterr().out.count("tokenised rows are not kept") == 1


def test_rows_that_come_again_are_reported(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    lines = (data_dir / "train.jsonl").read_text().splitlines()
    (data_dir / "train.jsonl").write_text("\n".join([*lines, lines[4]]) + "\n")
    (data_dir / "validation.jsonl").write_text("\n".join([lines[2], lines[7]]) + "\n")
    run(model_dir, data_dir, tmp_path / "run", steps=1)
    events = [e for e in read_events(tmp_path / "run" / "log.jsonl") if e["event"] == "repeated"]
    assert [(Path(e["file"]).name, e["reason"], e["lines"]) for e in events] == [
        ("train.jsonl", "the same as an earlier one (kept)", [21]),
        ("validation.jsonl", "also in the training data (kept)", [1, 2]),
    ]
    assert not [e for e in read_events(tmp_path / "run" / "log.jsonl") if e["event"] == "data"]


def test_parquet_trains_as_jsonl_does(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    (tmp_path / "tables").mkdir()
    for name in ("train", "validation"):
        rows = [json.loads(line) for line in (data_dir / f"{name}.jsonl").read_text().splitlines()]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "tables" / f"{name}.parquet")
    run(model_dir, data_dir, tmp_path / "lines", steps=2)
    run(model_dir, tmp_path / "tables", tmp_path / "columns", steps=2)
    assert exact(tmp_path / "lines") == exact(tmp_path / "columns")


@pytest.mark.parametrize("name", ["e.jsonl", "e.parquet", "array.json", "zip.jsonl", "nothing"])
def test_data_that_cannot_be_trained_on_is_one_line(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    contents = {"e.jsonl": b"", "e.parquet": b"", "array.json": b'[\n{"prompt": "a"}\n]\n', "zip.jsonl": b"PK\x03\x04"}
    if name in contents:
        (tmp_path / name).write_bytes(contents[name])
    else:
        (tmp_path / name).mkdir()
    flags = [
        word
        for key, value in keys(model_dir, tmp_path / name, tmp_path / "run").items()
        for word in (f"--{key.replace('_', '-')}", str(value).lower() if isinstance(value, bool) else str(value))
    ]
    assert main(["finetune", *flags]) == 1
    said = capsys.readouterr().err
    assert said.startswith("fullstride: error: ") and said.count("\n") == 1 and name in said
    assert not (tmp_path / "run").exists()
