"""metrics.csv and log.jsonl of a run: one row an update, one object an event, each step once however often resumed."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fullstride.run.directory import replace_text

COLUMNS = (
    "strategy",
    "epoch",
    "step",
    "loss",
    "tokens_per_sec",
    "step_time_sec",
    "peak_vram_gb",
    "lr",
    "grad_norm",
    "tokens",
    "supervised_tokens",
    "mfu",
    "eval_loss",
)
GIGABYTE = 1e9


def update_row(
    *,
    epoch: int,
    step: int,
    metrics: Mapping[str, float],
    lr: float,
    tokens: int,
    seconds: float,
    peak_bytes: int | None,
    mfu: float | None,
    strategy: str = "single",
) -> dict[str, Any]:
    """One row of metrics.csv; None is written as an empty field.

    `tokens` are the real tokens of the update (no padding), so tokens_per_sec counts them too; `peak_bytes` is the
    peak memory since the last update; `metrics` is what `Trainer.update` returned.
    """
    return {
        "strategy": strategy,
        "epoch": epoch,
        "step": step,
        "loss": metrics["loss"],
        "tokens_per_sec": tokens / seconds,
        "step_time_sec": seconds,
        "peak_vram_gb": None if peak_bytes is None else peak_bytes / GIGABYTE,
        "lr": lr,
        "grad_norm": metrics["grad_norm"],
        "tokens": tokens,
        "supervised_tokens": int(metrics["tokens"]),
        "mfu": mfu,
        "eval_loss": None,
    }


class MetricsFile:
    """metrics.csv. Opened at a step, it keeps the rows up to that step and goes on after them."""

    def __init__(self, path: Path, after_step: int) -> None:
        self.path = path
        rows = [row for row in read_metrics(path) if int(row["step"]) <= after_step] if after_step else []
        replace_text(path, "".join(map(_csv_line, (COLUMNS, *([row[c] for c in COLUMNS] for row in rows)))))

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row; it is in the file when this returns."""
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(_csv_line(["" if row[c] is None else row[c] for c in COLUMNS]))


def read_metrics(path: Path) -> list[dict[str, str]]:
    """The complete rows of a metrics.csv (a crash may have torn the last one)."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    return [row for row in csv.DictReader(io.StringIO(whole)) if None not in row.values()]


def _csv_line(values: Iterable[Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue()


class EventLog:
    """log.jsonl: every line one JSON object with `event` and `time`. Cut back as MetricsFile is."""

    def __init__(self, path: Path, after_step: int) -> None:
        self.path = path
        kept = [json.dumps(e) + "\n" for e in read_events(path) if e.get("step", 0) <= after_step] if after_step else []
        replace_text(path, "".join(kept))

    def write(self, event: str, **values: Any) -> None:
        """Append one event; it is in the file when this returns."""
        record = {"event": event, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **values}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_events(path: Path) -> list[dict[str, Any]]:
    """The complete events of a log.jsonl."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    # what follows the last line end is empty, or was torn by a crash
    return [json.loads(line) for line in lines[:-1] if line]
