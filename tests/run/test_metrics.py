"""metrics.csv and log.jsonl: what they count, and that a step appears once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.data.chat import Example
from fullstride.data.loader import Loader
from fullstride.run.metrics import COLUMNS, EventLog, MetricsFile, read_events, read_metrics, update_row
from fullstride.run.plot import sketch
from fullstride.run.progress import describe
from fullstride.trainer import trainer
from tests.run.conftest import run

LOSS = {"loss": 1.75, "grad_norm": 0.5, "tokens": 30}


def row(step: int, **values: Any) -> dict[str, Any]:
    made = update_row(epoch=1, step=step, metrics=LOSS, lr=0.1, tokens=100, seconds=1.0, peak_bytes=None, mfu=None)
    return made | values


def test_case_25_tokens_per_second_count_no_padding() -> None:
    """Rows of 10 and 90 tokens padded to 90, 30 supervised, 1 second: 100 (padded would be 180)."""
    examples = [Example(np.arange(n, dtype=np.int32), np.arange(n) >= n - k, "f", 1) for n, k in ((10, 5), (90, 25))]
    window = Loader(examples, 90, 2, packing=False, seed=0, pad_id=0).next_window(1)
    tokens = sum(batch.tokens for batch in window)
    made = update_row(epoch=1, step=1, metrics=LOSS, lr=0.1, tokens=tokens, seconds=1.0, peak_bytes=0, mfu=None)
    assert (made["tokens_per_sec"], made["tokens"], made["supervised_tokens"]) == (100, 100, 30)
    assert sum(batch.supervised for batch in window) == 30


def test_case_26_a_peak_inside_an_update_shows(model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch) -> None:
    """The peak since the last update is asked for once an update, and written in 1e9 bytes."""

    class Peak:
        def __init__(self, device: Any) -> None:
            self.updates = 0

        def __call__(self) -> int:
            self.updates += 1
            return 2**30 if self.updates == 2 else 5_000_000  # a GiB lived within the second update only

    monkeypatch.setattr(trainer, "PeakMemory", Peak)
    run(model_dir, data_dir, tmp_path / "run", steps=3)
    peaks = [float(r["peak_vram_gb"]) for r in read_metrics(tmp_path / "run" / "metrics.csv")]
    assert peaks == [0.005, 1.073741824, 0.005]


def test_case_24_rows_after_the_resumed_step_and_torn_ones_go(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    metrics = MetricsFile(file, 0)
    for step in range(1, 13):
        metrics.append(row(step))
    with file.open("a", encoding="utf-8") as torn:
        torn.write("single,1,13,0.")
    metrics = MetricsFile(file, 10)
    for step in range(11, 21):
        metrics.append(row(step, eval_loss=2.5 if step >= 15 else None))
    assert file.read_text(encoding="utf-8").split("\n")[0] == ",".join(COLUMNS)
    assert file.read_text(encoding="utf-8").count("strategy") == 1
    assert [int(r["step"]) for r in read_metrics(file)] == list(range(1, 21))
    assert [r["eval_loss"] for r in read_metrics(file)] == [""] * 14 + ["2.5"] * 6
    assert MetricsFile(file, 0) and read_metrics(file) == []


def test_numbers_survive_the_file_exactly(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.csv", 0)
    metrics.append(row(1, loss=0.1 + 0.2, lr=1e-30))
    read = read_metrics(tmp_path / "metrics.csv")[0]
    assert (float(read["loss"]), float(read["lr"])) == (0.1 + 0.2, 1e-30)
    assert (read["peak_vram_gb"], read["mfu"]) == ("", "")


def test_events_keep_what_has_no_step(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    log = EventLog(file, 0)
    log.write("data", file="a\u2028b.jsonl", count=1)
    for step in (1, 2, 3):
        log.write("update", step=step)
    with file.open("a", encoding="utf-8") as torn:
        torn.write('{"event": "upd')
    EventLog(file, 2).write("resume", step=2)
    events = read_events(file)
    assert [(e["event"], e.get("step")) for e in events] == [
        ("data", None),
        ("update", 1),
        ("update", 2),
        ("resume", 2),
    ]
    assert events[0]["file"] == "a\u2028b.jsonl"
    assert all("time" in e for e in events)


def test_a_line_of_progress() -> None:
    text = describe(row(3, peak_vram_gb=1.5), 10)
    assert text == "step 3/10  epoch 1  loss 1.7500  lr 1.00e-01  100 tokens/s  1.00 s  1.50 GB"


def test_sketch_draws_high_values_high() -> None:
    lines = sketch([4.0, 3.0, 2.0, 1.0], height=4).split("\n")
    assert [line.index("*") for line in lines] == [10, 11, 12, 13]
    assert lines[0].startswith("   4.000 |") and lines[-1].startswith("   1.000 |")
    assert len(sketch([1.0] * 500).split("\n")[-1]) == 70  # means of neighbours: 60 columns and the labels


def test_a_terminal_gets_a_live_line(model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    run(model_dir, data_dir, tmp_path / "run", steps=2)
    assert "evaluation at step 2" in capsys.readouterr().out


def test_without_matplotlib_one_line_says_how(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(model_dir, data_dir, tmp_path / "run", steps=1)
    assert "pip install 'fullstride[plot]'" in capsys.readouterr().out
    assert not (tmp_path / "run" / "loss.png").exists()
