"""What the keys `data` and `eval-data` name: files, with weights or without, a directory, the built-in sample, a Hub
dataset."""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Literal

from fullstride.data.hub import HubName, load_splits
from fullstride.data.readers import JsonlFile, ParquetFile, Source, lines, opened
from fullstride.errors import ConfigError, DataError, UsageError

Split = Literal["train", "eval"]

BUILT_IN = ("ami", "sample")
SAMPLE = Path(__file__).with_name("sample.jsonl")
NUM_SAMPLE_EVAL = 8
AMI = HubName("knkarthick/AMI")
EVAL_SPLITS = ("validation", "test")
MOST_NAME = 4096  # characters; no system has longer paths
ENDINGS = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Part:
    """Rows that are taken together: the sources that one name means, and what share of an epoch they get, if any."""

    name: str
    sources: tuple[Source, ...]
    weight: float | None = None


@dataclass(frozen=True)
class Group:
    """A file or the files of a pattern, and the weight after the colon, as it is written ("": none)."""

    name: str
    files: tuple[Path, ...]
    weight: str = ""

    def part(self, key: str) -> Part:
        """Raises UsageError for a weight that is none."""
        return Part(self.name, tuple(source(file) for file in self.files), self._weight(key) if self.weight else None)

    def _weight(self, key: str) -> float:
        try:
            weight = float(self.weight)
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise UsageError(
                f"{key}: a weight must be a positive number, got {self.weight!r} for {self.name}; leave out "
                "a file that is not to be trained on"
            )
        return weight


def train_parts(data: str) -> list[Part]:
    """The parts to train on. Raises ConfigError, UsageError or DataError for a name that gives none."""
    parts = find_parts(data, "train")
    assert parts is not None, "every source has training rows or raises"
    return parts


def eval_parts(data: str, eval_data: str | None) -> list[Part] | None:
    """The parts to evaluate on: those of `eval_data`, else the evaluation part of `data`, else None.

    Files named by `eval_data` are taken whole; a source that has parts (directory, `ami`, `sample`, Hub) gives its
    evaluation part.
    """
    if eval_data is None:
        return find_parts(data, "eval")
    whole = bool(find_groups(eval_data, "eval-data"))
    parts = find_parts(eval_data, "train" if whole else "eval", "eval-data")
    if parts is None:
        raise DataError(
            f"eval-data={eval_data} has no evaluation part: looked for {', '.join(EVAL_SPLITS)}; name a file"
        )
    if any(part.weight is not None for part in parts):
        raise UsageError(f"eval-data={eval_data}: every row is evaluated once; leave out the weights")
    return parts


def find_parts(name: str, split: Split, key: str = "data") -> list[Part] | None:
    """The parts of one split of a source; None where it has no evaluation split (plain files never have one).

    `ami` trains on train and validation, and evaluates on test. `sample` evaluates on its last 8 rows. A directory
    trains on train.jsonl or train.parquet (or shards of it) and evaluates on validation's, else test's. The names
    `ami` and `sample` win over a path of that name: write `./ami` for the path. `key` is the one that names the
    source, for messages.
    """
    if name == "sample":
        with opened(SAMPLE) as file:
            held_out = sum(1 for _ in lines(file)) - NUM_SAMPLE_EVAL + 1
        train, evaluation = JsonlFile(SAMPLE, past=held_out), JsonlFile(SAMPLE, first=held_out)
        return [Part(name, (train if split == "train" else evaluation,))]
    if name == "ami":
        return _hub(AMI, ("train", "validation") if split == "train" else ("test",), key)
    if groups := find_groups(name, key):
        parts = [group.part(key) for group in groups]
        _check_weights(parts, key)
        return parts if split == "train" else None
    if _holds(name, Path.is_dir):
        return _directory(Path(name), split, key)
    return _hub(_dataset(name, key), ("train",) if split == "train" else None, key)


def _dataset(name: str, key: str) -> HubName:
    """What is left when `name` is nothing here. Raises ConfigError for what is no id either."""
    if (dataset := HubName.parse(name)) is None:
        raise ConfigError(
            f"{key}: no such file or directory: {name}; name a JSONL or Parquet file, a directory, ami or sample"
        )
    return dataset


def find_groups(name: str, key: str = "data") -> list[Group]:
    """The files that a source names; none for a directory, a built-in name or a dataset of the Hub.

    Raises ConfigError, which names `key`, for what is missing.
    """
    if name in BUILT_IN or _holds(name, Path.is_dir):
        return []
    if group := _group(name):
        return [group]
    if "," in name or glob.has_magic(name):
        return _listed(name, key)
    return []


def _listed(names: str, key: str) -> list[Group]:
    """The files of a comma-separated list. A name may hold commas too: the longest one that is a file is taken."""
    parts, groups = names.split(","), []
    while parts:
        lengths = accumulate(len(part) + 1 for part in parts)
        longest = sum(1 for _ in takewhile(lambda length: length <= MOST_NAME, lengths))
        for taken in range(max(longest, 1), 0, -1):
            if group := _group(",".join(parts[:taken]).strip()):
                break
        else:
            raise _missing(parts[0].strip(), key)
        groups.append(group)
        parts = parts[taken:]
    return groups


def _missing(name: str, key: str) -> ConfigError:
    name = re.sub(r":[\d.]+$", "", name)
    if name and _holds(name, Path.is_dir):
        return UsageError(f"{key}: {name} is a directory, and a list names files: {Path(name) / 'train.jsonl'}")
    if glob.has_magic(name):
        return ConfigError(f"{key}: no file matches {name}; name existing JSONL or Parquet files")
    return ConfigError(
        f"{key}: no such file: {name or '(nothing)'}; a comma-separated list names existing JSONL or Parquet files"
    )


def _group(name: str) -> Group | None:
    """What one name of a list means; None if there is no such file. A file whose name holds a colon has no weight."""
    head, colon, weight = name.rpartition(":")
    weighed = colon and weight and not set(weight) & {",", "/"}  # else the colon is another name's, or a path's
    for path, weighs in ((name, ""), (head, weight)) if weighed else ((name, ""),):
        if _holds(path, Path.is_file):
            return Group(path, (Path(path),), weighs)
        if glob.has_magic(path):
            found = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 (absolute too)
            if files := tuple(Path(file) for file in found if Path(file).is_file()):
                return Group(path, files, weighs)
    return None


def _check_weights(parts: list[Part], key: str) -> None:
    weighed = [part.name for part in parts if part.weight is not None]
    if weighed and len(parts) == 1:
        raise UsageError(f"{key}: {weighed[0]} has a weight, and nothing to weigh it against; leave it out")
    if weighed and len(weighed) < len(parts):
        bare = next(part.name for part in parts if part.weight is None)
        raise UsageError(f"{key}: {weighed[0]} has a weight and {bare} has none; give every file one, or none")


def source(file: Path) -> Source:
    """The reader of a file."""
    return ParquetFile(file) if file.suffix.lower() == ".parquet" else JsonlFile(file)


def absolute(name: str, key: str) -> str:
    """`name` with absolute paths, so that it means the same from anywhere. Raises ConfigError for what is missing."""
    if name in BUILT_IN:
        return name
    if not (groups := find_groups(name, key)):
        return str(Path(name).resolve()) if _holds(name, Path.is_dir) else str(_dataset(name, key))

    def anywhere(group: Group) -> str:
        if not glob.has_magic(group.name) or group.files == (Path(group.name),):
            path = str(group.files[0].resolve())
        else:
            path = os.path.join(glob.escape(str(Path.cwd())), group.name)  # noqa: PTH118 (an absolute one stays)
        return f"{path}:{group.weight}" if group.weight else path

    return ",".join(map(anywhere, groups))


def stem(name: str) -> str:
    """A short word for what a source names: that of its first file, or the end of its path."""
    groups = find_groups(name)
    return (groups[0].files[0] if groups else Path(name)).stem


def _holds(name: str, check: Callable[[Path], bool]) -> bool:
    try:
        return check(Path(name))
    except (OSError, ValueError):  # a list of files may be too long for a name
        return False


def _directory(directory: Path, split: Split, key: str) -> list[Part] | None:
    wanted = ("train",) if split == "train" else EVAL_SPLITS
    for name in wanted:
        found = {
            pattern: files
            for ending in ENDINGS
            for pattern in (f"{name}{ending}", f"{name}-*{ending}")
            if (files := sorted(path for path in directory.glob(pattern) if path.is_file()))
        }
        if len(found) > 1:
            raise UsageError(f"{key}: {directory} holds {' and '.join(found)}; name the files that are meant")
        for files in found.values():
            return [Part(str(directory / name), tuple(map(source, files)))]
    if split == "train":
        there = ", ".join(sorted(path.name for path in directory.iterdir())[:8]) or "nothing"
        raise DataError(
            f"{key}={directory} has no training rows: looked for train.jsonl and train.parquet, it holds {there}; put "
            "one there or name a file"
        )
    return None


def _hub(dataset: HubName, splits: tuple[str, ...] | None, key: str) -> list[Part] | None:
    """The named splits; `splits` None: the first evaluation split there is, or None without one."""
    loaded = load_splits(dataset, key)
    if splits is None:
        splits = tuple(name for name in EVAL_SPLITS if name in loaded)[:1]
        if not splits:
            return None
    if missing := [name for name in splits if name not in loaded]:
        raise DataError(
            f"Hub dataset {dataset} has no split {', '.join(missing)}; it has {', '.join(sorted(loaded))}; write the "
            "rows that are meant as JSONL, and name that file"
        )
    return [Part(str(dataset), tuple(loaded[name] for name in splits))]
