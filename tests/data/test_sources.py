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
from fullstride.data.rows import Row, rows_of
from fullstride.data.sources import Part, absolute, eval_parts, stem, train_parts
from fullstride.errors import ConfigError, DataError, UsageError


def write(path: Path, *completions: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": "p", "completion": c}) + "\n" for c in completions))
    return str(path)


def rows(parts: list[Part], report: Report | None = None) -> list[Row]:
    report = report or Report()
    sources = [source for part in parts for source in part.sources]
    return [row for source in sources for row in rows_of(source.records(), source.name, report)]


def train(data: str) -> list[str]:
    return [row.completion for row in rows(train_parts(data))]


def evaluation(data: str, eval_data: str | None = None) -> list[str] | None:
    parts = eval_parts(data, eval_data)
    return None if parts is None else [row.completion for row in rows(parts)]


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
    for name in ("none.jsonl", f"{a},none.jsonl", f"{a}:0.5,{a}", "owner/name"):
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


def weights(data: str) -> list[tuple[str, float | None]]:
    return [(Path(part.name).name, part.weight) for part in train_parts(data)]


@pytest.mark.parametrize(("text", "weight"), [("0.3", 0.3), ("1", 1.0), (".5", 0.5), ("2.", 2.0), ("1e-3", 0.001)])
def test_weights_follow_names(tmp_path: Path, text: str, weight: float) -> None:
    a, b = write(tmp_path / "a,x.jsonl", "1"), write(tmp_path / "b.jsonl", "2")
    assert weights(f"{a}:{text}, {b}:7") == [("a,x.jsonl", weight), ("b.jsonl", 7.0)]
    assert train(f"{a}:{text},{b}:7") == ["1", "2"]
    colon = write(tmp_path / f"a,x.jsonl:{text}", "3")  # a file of that name is that file
    assert weights(f"{colon},{b}") == [(f"a,x.jsonl:{text}", None), ("b.jsonl", None)]


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "-inf", "x", "0.3.4", "1e999"])
def test_weights_that_are_none_are_refused(tmp_path: Path, weight: str) -> None:
    a = write(tmp_path / "a.jsonl", "1")
    with pytest.raises(UsageError, match=r"^data: a weight must be a positive number, got .*leave out a file"):
        train(f"{a}:1,{a}:{weight}")


def test_weights_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", "1"), write(tmp_path / "d" / "train.jsonl", "2")
    with pytest.raises(UsageError, match=r"a\.jsonl has a weight and .*train\.jsonl has none; give every file one"):
        train(f"{a}:1,{b}")
    with pytest.raises(UsageError, match="nothing to weigh it against; leave it out"):
        train(f"{a}:0.5")
    with pytest.raises(UsageError, match=r"every row is evaluated once; leave out the weights"):
        evaluation(a, f"{a}:1,{b}:2")
    with pytest.raises(UsageError, match=r"d is a directory, and a list names files: .*train\.jsonl"):
        train(f"{a}:1,{tmp_path / 'd'}:2")
    with pytest.raises(ConfigError, match=r"no such file: none\.jsonl;"):
        train(f"{a}:1,none.jsonl:2")


def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b", "a", "c"):
        write(tmp_path / f"part-{name}.jsonl", name)
    pattern = str(tmp_path / "part-*.jsonl")
    assert train(pattern) == ["a", "b", "c"]
    other = write(tmp_path / "other.jsonl", "x")
    assert weights(f"{pattern}:3,{other}:1") == [("part-*.jsonl", 3.0), ("other.jsonl", 1.0)]
    assert train(f"{pattern}:3,{other}:1") == ["a", "b", "c", "x"]
    with pytest.raises(ConfigError, match=r"no file matches .*none-\*"):
        train(str(tmp_path / "none-*.jsonl"))
    monkeypatch.chdir(tmp_path)
    named = absolute("part-*.jsonl:3,other.jsonl:1", "data")
    monkeypatch.chdir("/")
    assert weights(named) == [("part-*.jsonl", 3.0), ("other.jsonl", 1.0)]
    assert stem(named) == "part-a"
    assert [absolute(name, "data") for name in ("ami", "sample", "owner/name", "owner/name:b@c")] == [
        "ami",
        "sample",
        "owner/name",
        "owner/name:b@c",
    ]
    write(tmp_path / "odd[1].jsonl", "odd")
    assert train(str(tmp_path / "odd[1].jsonl")) == ["odd"]


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


def test_a_directory_with_several_kinds_of_one_split_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00002.jsonl", "1")
    write(tmp_path / "train-00001-of-00002.jsonl", "2")
    assert train(str(tmp_path)) == ["1", "2"]
    (tmp_path / "train.parquet").touch()
    with pytest.raises(UsageError, match=r"holds train-\*\.jsonl and train\.parquet; name the files"):
        train(str(tmp_path))


def test_the_last_eight_rows_of_the_sample_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(i) for i in range(20)]
    monkeypatch.setattr(sources, "SAMPLE", Path(write(tmp_path / "sample.jsonl", *names)))
    assert train("sample") == names[:12]
    assert evaluation("sample") == names[12:]
    assert evaluation(write(tmp_path / "a.jsonl", "1"), "sample") == names[12:]


class FakeHub:
    """Stands in for the `datasets` library, which tests must not need, nor the network."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **splits: list[dict[str, Any]]) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.splits = splits
        self.error: Exception | None = None
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=self.load))

    def load(self, path: str, **keys: Any) -> dict[str, list[dict[str, Any]]]:
        self.calls.append((path, keys))
        if self.error is not None:
            raise self.error
        return self.splits


def meeting(summary: str) -> dict[str, Any]:
    return {"id": "x", "dialogue": "A: hi", "summary": summary}


def test_ami_trains_on_train_and_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(monkeypatch, train=[meeting("1"), meeting("")], validation=[meeting("2")], test=[meeting("3")])
    monkeypatch.setenv("HF_TOKEN", "secret")
    report = Report()
    found = rows(train_parts("ami"), report)
    assert [row.messages[-1]["content"] for row in found if row.messages] == ["1", "2"]
    assert [(event["file"], event["reason"], event["lines"]) for event in report.events()] == [
        ("knkarthick/AMI/train", "empty completion", [2])
    ]
    held_out = eval_parts("ami", None)
    assert held_out and [row.messages[-1]["content"] for row in rows(held_out) if row.messages] == ["3"]
    assert hub.calls == [("knkarthick/AMI", {"token": "secret"})] * 2


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
    assert {name for name, _ in hub.calls} == {"owner/name"}


def test_a_hub_name_may_say_configuration_and_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = FakeHub(monkeypatch, train=[{"prompt": "p", "completion": "c"}])
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name in ("owner/name:3.0.0", "owner/name@v1/x", "owner/name:en.x@abc"):
        assert train(name) == ["c"]
        assert rows(train_parts(name))[0].file == f"{name}/train"
    assert [keys for _, keys in hub.calls[::2]] == [
        {"name": "3.0.0", "token": None},
        {"revision": "v1/x", "token": None},
        {"name": "en.x", "revision": "abc", "token": None},
    ]
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "owner" / "name", "here")  # a file wins, and what follows its colon is a weight
    with pytest.raises(UsageError, match="nothing to weigh it against"):
        train("owner/name:3")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            FileNotFoundError("Dataset 'owner/name' doesn't exist on the Hub"),
            "check the name, the network and HF_TOKEN",
        ),
        (
            ValueError("Config name is missing.\nPlease pick one among the available configs: ['en', 'de']"),
            r"\['en', 'de'\]; choose one of them: owner/name:CONFIGURATION",
        ),
        (ValueError("BuilderConfig 'x' not found. Available: ['en', 'de']"), "owner/name:CONFIGURATION"),
        (FileNotFoundError("Dataset 'owner/name' is a gated dataset on the Hub"), "ask for access .* set HF_TOKEN"),
        (RuntimeError("403 Forbidden: whatever"), "ask for access"),
        (ConnectionError("Couldn't reach 'owner/name' on the Hub (LocalEntryNotFoundError)"), "there is no network"),
        (OSError(), r"OSError; check the name"),
    ],
)
def test_a_dataset_that_does_not_load(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    hub = FakeHub(monkeypatch)
    hub.error = error
    with pytest.raises(ConfigError, match=f"(?s)^data: cannot load Hub dataset owner/name: .*{words}") as raised:
        train("owner/name")
    assert "\n" not in str(raised.value)


def test_the_library_itself_loads_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    lines = [{"messages": messages, "prompt": None}, {"prompt": "p", "completion": "c"}, {"prompt": "p"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    original = datasets.load_dataset
    cache = str(tmp_path / "cache")
    monkeypatch.setattr(
        datasets, "load_dataset", lambda _, token: original(str(tmp_path), cache_dir=cache, token=token)
    )
    report = Report()
    (part,) = train_parts("owner/name")
    found = rows([part], report)
    assert found[0].messages == messages and (found[1].prompt, found[1].completion) == ("p", "c")
    assert [(event["reason"], event["lines"]) for event in report.events()] == [("null content", [3])]
    scan = part.sources[0].scan()
    assert scan.count == 3 and len(scan.digest) == 64


@pytest.mark.parametrize("name", ["ami", "owner/name"])
def test_without_the_datasets_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs the extra hub: pip install 'fullstride\[hub\]'"):
        train(name)
