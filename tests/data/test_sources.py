"""The keys `data` and `eval-data`: what each form names, and how each mistake is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fullstride.data import sources
from fullstride.data.report import Report
from fullstride.data.sources import load_eval, load_train
from fullstride.errors import ConfigError, DataError, UsageError


def write(path: Path, *completions: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": "p", "completion": c}) + "\n" for c in completions))
    return str(path)


def train(data: str) -> list[str]:
    return [row.completion for row in load_train(data, Report())]


def evaluation(data: str, eval_data: str | None = None) -> list[str] | None:
    rows = load_eval(data, eval_data, Report())
    return None if rows is None else [row.completion for row in rows]


def test_a_file_has_no_evaluation_part_unless_one_is_named(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", "1", "2"), write(tmp_path / "b.jsonl", "3")
    assert train(a) == ["1", "2"]
    assert evaluation(a) is None
    assert evaluation(a, b) == ["3"]


def test_files_in_a_list_are_joined(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", "1", "2"), write(tmp_path / "b.jsonl", "3")
    assert train(f"{b}, {a}") == ["3", "1", "2"]
    assert evaluation(f"{a},{b}") is None
    assert evaluation(a, f"{a},{b}") == ["1", "2", "3"]


def test_a_file_whose_name_holds_a_comma_is_one_file(tmp_path: Path) -> None:
    assert train(write(tmp_path / "a,b.jsonl", "1")) == ["1"]


def test_names_in_a_list_may_hold_commas(tmp_path: Path) -> None:
    a, b = write(tmp_path / "x,y" / "a.jsonl", "1"), write(tmp_path / "x,y" / "b,c.jsonl", "2")
    assert train(f"{a},{b}") == ["1", "2"]
    assert train(f"{b}, {a}") == ["2", "1"]
    write(tmp_path / "x,y" / "train.jsonl", "3")
    assert train(str(tmp_path / "x,y")) == ["3"]


def test_a_list_may_be_longer_than_any_name(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", "1")
    assert train(",".join([a] * 300)) == ["1"] * 300  # a path has at most 4096 bytes


def test_messages_name_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = write(tmp_path / "a.jsonl", "1")
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "p.parquet").touch()
    for name in ("none.jsonl", f"{a},none.jsonl", str(tmp_path / "p.parquet"), f"{a}:0.5", "owner/name"):
        with pytest.raises(ConfigError, match=r"^data[:=]"):
            train(name)
        with pytest.raises(ConfigError, match=r"^eval-data[:=]"):
            evaluation(a, name)


def test_a_directory_evaluates_on_validation_else_test(tmp_path: Path) -> None:
    write(tmp_path / "d" / "train.jsonl", "1")
    assert train(str(tmp_path / "d")) == ["1"]
    assert evaluation(str(tmp_path / "d")) is None
    write(tmp_path / "d" / "test.jsonl", "2")
    assert evaluation(str(tmp_path / "d")) == ["2"]
    write(tmp_path / "d" / "validation.jsonl", "3")
    assert evaluation(str(tmp_path / "d")) == ["3"]
    assert evaluation(write(tmp_path / "a.jsonl", "4"), str(tmp_path / "d")) == ["3"]


def test_a_directory_without_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"looked for train\.jsonl"):
        train(str(tmp_path))
    write(tmp_path / "train.jsonl", "1")
    with pytest.raises(DataError, match="no evaluation part: looked for validation, test"):
        evaluation(str(tmp_path), str(tmp_path))


@pytest.mark.parametrize("weight", ["0.3", "1", ".5", "2."])
def test_weights_are_refused(tmp_path: Path, weight: str) -> None:
    a = write(tmp_path / "a.jsonl", "1")
    for name in (f"{a}:{weight}", f"{a},{a}:{weight}"):
        with pytest.raises(UsageError, match="weights are not available yet"):
            train(name)
        with pytest.raises(UsageError, match="weights are not available yet"):
            evaluation(name)


@pytest.mark.parametrize("name", ["none.jsonl", "some/none.jsonl", "some/where/none", "/none", "none"])
def test_a_missing_path_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no such file or directory: {name}"):
        train(name)


def test_a_missing_file_of_a_list_is_named(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", "1")
    with pytest.raises(ConfigError, match=r"no such file: none\.jsonl"):
        train(f"{a},none.jsonl")
    with pytest.raises(ConfigError, match=r"no such file: \(nothing\)"):
        train(f"{a},")


def test_parquet_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"Parquet is not supported yet: .*train\.parquet; convert to JSONL"):
        train(str(tmp_path / "train.parquet"))
    with pytest.raises(ConfigError, match="Parquet is not supported yet"):
        train(str(tmp_path))
    write(tmp_path / "train.jsonl", "1")
    assert train(str(tmp_path)) == ["1"]


def test_the_last_eight_rows_of_the_sample_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(i) for i in range(20)]
    monkeypatch.setattr(sources, "SAMPLE", Path(write(tmp_path / "sample.jsonl", *names)))
    assert train("sample") == names[:12]
    assert evaluation("sample") == names[12:]
    assert evaluation(write(tmp_path / "a.jsonl", "1"), "sample") == names[12:]


class FakeHub:
    """Stands in for the `datasets` library, which tests must not need, nor the network."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **splits: list[dict[str, Any]]) -> None:
        self.calls: list[tuple[str, str | None]] = []
        self.splits = splits
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=self.load))

    def load(self, name: str, token: str | None = None) -> dict[str, list[dict[str, Any]]]:
        self.calls.append((name, token))
        if name == "no/such":
            raise FileNotFoundError("Dataset 'no/such' doesn't exist on the Hub")
        return self.splits


def meeting(summary: str) -> dict[str, Any]:
    return {"id": "x", "dialogue": "A: hi", "summary": summary}


def test_ami_trains_on_train_and_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(monkeypatch, train=[meeting("1"), meeting("")], validation=[meeting("2")], test=[meeting("3")])
    monkeypatch.setenv("HF_TOKEN", "secret")
    report = Report()
    rows = load_train("ami", report)
    assert [row.messages[-1]["content"] for row in rows if row.messages] == ["1", "2"]
    assert [(event["file"], event["reason"], event["lines"]) for event in report.events()] == [
        ("knkarthick/AMI/train", "empty completion", [2])
    ]
    eval_rows = load_eval("ami", None, report)
    assert eval_rows and [row.messages[-1]["content"] for row in eval_rows if row.messages] == ["3"]
    assert hub.calls == [("knkarthick/AMI", "secret")] * 2


def test_other_hub_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(completion: str) -> dict[str, Any]:
        return {"prompt": "p", "completion": completion}

    hub = FakeHub(monkeypatch, train=[row("1")])
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert train("owner/name") == ["1"]
    assert evaluation("owner/name") is None
    hub.splits = {"train": [row("1")], "test": [row("3")]}
    assert evaluation("owner/name") == ["3"]
    hub.splits = {"train": [row("1")], "test": [row("3")], "validation": [row("2")]}
    assert evaluation("owner/name") == ["2"]
    hub.splits = {"test": [row("3")]}
    with pytest.raises(DataError, match="has no split train; it has test"):
        train("owner/name")
    with pytest.raises(ConfigError, match=r"cannot load Hub dataset no/such: .*doesn't exist"):
        train("no/such")
    assert set(hub.calls) == {("owner/name", None), ("no/such", None)}


@pytest.mark.parametrize("name", ["ami", "owner/name"])
def test_without_the_datasets_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs the extra hub: pip install 'fullstride\[hub\]'"):
        train(name)
