"""metrics.csv and log.jsonl of a run: one row an update, one object an event, each step once however often resumed."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fullstride.config import Options
from fullstride.errors import ConfigError
from fullstride.files import replace_text

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


def strategy(options: Options) -> str:
    """How resolved `options` split the work: `single`, `dp2-zero1`, `pp2`, `dp2-pp2-zero1`, ..."""
    parts = [f"{name}{getattr(options, name)}" for name in ("dp", "pp", "tp") if getattr(options, name) > 1]
    return "-".join([*parts, *([f"zero{options.zero}"] if options.dp > 1 else [])]) or "single"


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
    """metrics.csv at `path`; without `writes` it is another process that writes it, and nothing is done here."""

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path, self._writes = path, writes

    def begin(self, after_step: int) -> None:
        """Keep the rows up to `after_step` (0: none), to go on after them."""
        self._write([row for row in read_metrics(self.path) if int(row["step"]) <= after_step] if after_step else [])

    def eval_losses(self) -> dict[int, float]:
        """Evaluations by step."""
        return {int(row["step"]): float(row["eval_loss"]) for row in read_metrics(self.path) if row["eval_loss"]}

    def complete(self, eval_loss: float | None) -> None:
        """Give the last row, if there is one, an evaluation that was made later."""
        rows = read_metrics(self.path)
        for row in rows[-1:]:
            row["eval_loss"] = "" if eval_loss is None else str(eval_loss)
        self._write(rows)

    def _write(self, rows: list[dict[str, str]]) -> None:
        if self._writes:
            replace_text(self.path, "".join(map(_csv_line, (COLUMNS, *([row[c] for c in COLUMNS] for row in rows)))))

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row; it is in the file when this returns."""
        if not self._writes:
            return
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(_csv_line(["" if row[c] is None else row[c] for c in COLUMNS]))


def read_metrics(path: Path) -> list[dict[str, str]]:
    """The complete rows of a metrics.csv (a crash may have torn the last one). ConfigError for another kind of file."""
    if not path.is_file():
        return []
    try:
        text = path.read_text(encoding="utf-8")
        whole = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
        rows = [row for row in whole if None not in row.values()]
        if rows and (tuple(rows[0]) != COLUMNS or not all(row["step"].isdecimal() for row in rows)):
            raise ValueError(f"its columns must be {','.join(COLUMNS)}")
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"{path}: not the metrics of a run ({error}); restore it, or remove it") from None
    return rows


def _csv_line(values: Iterable[Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue()


class EventLog:
    """log.jsonl at `path`: every line one JSON object with `event` and `time`. `writes`: as MetricsFile's."""

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path, self._writes = path, writes

    def begin(self, after_step: int) -> None:
        """Keep the events up to `after_step` (0: none), to go on after them."""
        if not self._writes:
            return
        kept = [e for e in read_events(self.path) if e.get("step", 0) <= after_step] if after_step else []
        replace_text(self.path, "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in kept))

    def write(self, event: str, **values: Any) -> None:
        """Append one event; it is in the file when this returns."""
        if not self._writes:
            return
        record = {"event": event, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **values}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_events(path: Path) -> list[dict[str, Any]]:
    """The complete events of a log.jsonl. ConfigError for another kind of file."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    try:
        # what follows the last line end is empty, or was torn by a crash
        events = [json.loads(line) for line in lines[:-1] if line]
        if not all(isinstance(event, dict) and isinstance(event.get("step", 0), int) for event in events):
            raise ValueError("every line must be an object")
    except ValueError as error:
        raise ConfigError(f"{path}: not the log of a run ({error}); restore it, or remove it") from None
    return events
