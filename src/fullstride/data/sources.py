"""What the keys `data` and `eval-data` name: files, a directory, the built-in sample, or a Hub dataset."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from fullstride.data.report import Report
from fullstride.data.rows import Row, parse_rows, read_rows
from fullstride.errors import ConfigError, DataError, UsageError

Split = Literal["train", "eval"]

SAMPLE = Path(__file__).with_name("sample.jsonl")
NUM_SAMPLE_EVAL = 8
AMI = "knkarthick/AMI"
EVAL_SPLITS = ("validation", "test")


def load_train(data: str, report: Report) -> list[Row]:
    """The rows to train on. Raises ConfigError, UsageError or DataError for a name that gives none."""
    rows = load_source(data, "train", report)
    assert rows is not None, "every source has training rows or raises"
    return rows


def load_eval(data: str, eval_data: str | None, report: Report) -> list[Row] | None:
    """The rows to evaluate on: those of `eval_data`, else the evaluation part of `data`, else None.

    Files named by `eval_data` are taken whole; a source that has parts (directory, `ami`, `sample`, Hub) gives its
    evaluation part.
    """
    if eval_data is None:
        return load_source(data, "eval", report)
    paths = source_paths(eval_data, "eval-data")
    whole = bool(paths) and not paths[0].is_dir()
    rows = load_source(eval_data, "train" if whole else "eval", report, "eval-data")
    if rows is None:
        raise DataError(
            f"eval-data={eval_data} has no evaluation part: looked for {_names(EVAL_SPLITS)}; name a JSONL file"
        )
    return rows


def load_source(name: str, split: Split, report: Report, key: str = "data") -> list[Row] | None:
    """The rows of one part of a source; None where it has no evaluation part (plain files never have one).

    `ami` trains on train and validation, and evaluates on test. `sample` evaluates on its last 8 rows. A directory
    trains on train.jsonl and evaluates on validation.jsonl, else test.jsonl. The names `ami` and `sample` win over a
    path of that name: write `./ami` for the path. `key` is the one that names the source, for messages.
    """
    paths = source_paths(name, key)
    if name == "sample":
        rows = read_rows(SAMPLE, report)
        return rows[:-NUM_SAMPLE_EVAL] if split == "train" else rows[-NUM_SAMPLE_EVAL:]
    if name == "ami":
        return _hub_rows(AMI, ("train", "validation") if split == "train" else ("test",), report, key)
    if not paths:
        return _hub_rows(name, ("train",) if split == "train" else None, report, key)
    if paths[0].is_dir():
        return _directory_rows(paths[0], split, report, key)
    for file in paths:
        _refuse_parquet(file, key)
    return [row for file in paths for row in read_rows(file, report)] if split == "train" else None


def source_paths(name: str, key: str = "data") -> list[Path]:
    """The directory or the files that a source names; none for a built-in name or a dataset of the Hub.

    Raises ConfigError, which names `key`, for what is missing.
    """
    if name in ("ami", "sample"):
        return []
    if _holds(name, Path.is_dir) or _holds(name, Path.is_file):
        return [Path(name)]
    if "," in name or _weight(name) is not None:
        return _listed_files(name, key)
    if not _is_hub_id(name):
        raise ConfigError(f"{key}: no such file or directory: {name}; name a JSONL file, a directory, ami or sample")
    return []


def _listed_files(names: str, key: str) -> list[Path]:
    """The files of a comma-separated list. A name may hold commas too: the longest one that is a file is taken."""
    parts, files = names.split(","), []
    while parts:
        joined = {n: ",".join(parts[:n]).strip() for n in range(len(parts), 0, -1)}
        taken = next((n for n, name in joined.items() if _holds(name, Path.is_file)), 1)
        name = joined[taken]
        if not _holds(name, Path.is_file):
            if _weight(name) is not None:
                raise UsageError(f"{key}: weights are not available yet, got {name}; leave out :{_weight(name)}")
            name = name or "(nothing)"
            raise ConfigError(f"{key}: no such file: {name}; a comma-separated list names existing JSONL files")
        files.append(Path(name))
        parts = parts[taken:]
    return files


def _holds(name: str, check: Callable[[Path], bool]) -> bool:
    try:
        return check(Path(name))
    except OSError:  # a list of files may be too long for a name
        return False


def _weight(part: str) -> str | None:
    match = re.fullmatch(r".+:(\d+\.?\d*|\.\d+)", part)
    return match and match[1]


def _refuse_parquet(file: Path, key: str) -> None:
    if file.suffix.lower() == ".parquet":
        raise ConfigError(f"{key}: Parquet is not supported yet: {file}; convert to JSONL")


def _is_hub_id(name: str) -> bool:
    return (
        re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None
        and not name.startswith((".", "~"))
        and (Path(name).suffix.lower() not in (".jsonl", ".json", ".parquet"))
    )


def _directory_rows(directory: Path, split: Split, report: Report, key: str) -> list[Row] | None:
    wanted = ("train",) if split == "train" else EVAL_SPLITS
    for part in wanted:
        file = directory / f"{part}.jsonl"
        if file.is_file():
            return read_rows(file, report)
    for part in wanted:
        if (directory / f"{part}.parquet").exists():
            _refuse_parquet(directory / f"{part}.parquet", key)
    if split == "train":
        raise DataError(f"{key}={directory} has no training rows: looked for train.jsonl; put one there or name a file")
    return None


def _hub_rows(dataset: str, splits: tuple[str, ...] | None, report: Report, key: str) -> list[Row] | None:
    """The rows of the named splits; `splits` None: of the first evaluation split there is, or None without one."""
    loaded = _load_dataset(dataset, key)
    if splits is None:
        splits = tuple(split for split in EVAL_SPLITS if split in loaded)[:1]
        if not splits:
            return None
    missing = [split for split in splits if split not in loaded]
    if missing:
        raise DataError(f"Hub dataset {dataset} has no split {_names(missing)}; it has {_names(sorted(loaded))}")
    return [row for split in splits for row in parse_rows(loaded[split], f"{dataset}/{split}", report)]


def _load_dataset(dataset: str, key: str) -> dict[str, Any]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"{key}={dataset} is not a path here; as a Hub dataset it needs the extra hub: "
            "pip install 'fullstride[hub]'"
        ) from error
    try:
        return datasets.load_dataset(dataset, token=os.environ.get("HF_TOKEN"))
    except (OSError, ValueError) as error:  # not found, no access, no network, several configurations
        raise ConfigError(
            f"cannot load Hub dataset {dataset}: {error}; check the name, the network and HF_TOKEN"
        ) from error


def _names(names: Any) -> str:
    return ", ".join(names)
