"""metrics.csv and log.jsonl: what they count, and that a step appears once."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import sys
import termios
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fullstride.data.chat import Example
from fullstride.data.loader import Loader
from fullstride.data.packing import PackedRows
from fullstride.errors import ConfigError
from fullstride.run.metrics import COLUMNS, EventLog, MetricsFile, read_events, read_metrics, update_row
from fullstride.run.plot import sketch
from fullstride.run.progress import Progress, describe, details
from fullstride.trainer import worker
from tests.run.conftest import run

LOSS = {"loss": 1.75, "grad_norm": 0.5, "tokens": 30}


def row(step: int, **values: Any) -> dict[str, Any]:
    made = update_row(epoch=1, step=step, metrics=LOSS, lr=0.1, tokens=100, seconds=1.0, peak_bytes=None, mfu=None)
    return made | values


def started(file: Path, after_step: int = 0) -> MetricsFile:
    metrics = MetricsFile(file)
    metrics.begin(after_step)
    return metrics


def losses(model_dir: Path, file: Path) -> list[tuple[float, int]]:
    """(sum of the losses, number) of the supervised tokens of every chat in `file`, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
    found = []
    for line in file.read_text(encoding="utf-8").split("\n")[:-1]:
        messages = json.loads(line)["messages"]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        start = len(tokenizer(text[: text.index(messages[1]["content"])])["input_ids"])
        ids = tokenizer(text)["input_ids"][:-1]  # the line end after the end token is nobody's label
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, start - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[start:]), reduction="sum")
        found.append((loss.item(), len(ids) - start))
    return found


@pytest.mark.parametrize(("batch_size", "grad_accum", "packing"), [(2, 1, False), (1, 2, False), (1, 1, True)])
def test_case_1_the_csv_has_the_mean_over_all_tokens_of_an_update(
    model_dir: Path, tmp_path: Path, batch_size: int, grad_accum: int, packing: bool
) -> None:
    """Rows of unequal weight: the CSV has no mean of means and not the last micro-step's; so for evaluations."""
    for name, answers in (
        ("train", ("4", "I say one and one and one")),
        ("validation", ("No, ten times no", "1", "22")),
    ):
        chats = [
            {"messages": [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": answer}]}
            for answer in answers
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(c) + "\n" for c in chats), encoding="utf-8")
    split = {"batch_size": batch_size, "grad_accum": grad_accum, "packing": packing}
    # a rate of (nearly) nothing: the evaluation after the update sees the weights that transformers sees
    result = run(model_dir, tmp_path, tmp_path / "run", steps=1, lr=1e-30, weight_decay=0, seq_len=128, **split)
    written = read_metrics(tmp_path / "run" / "metrics.csv")[0]
    for column, file in (("loss", "train.jsonl"), ("eval_loss", "validation.jsonl")):
        rows = losses(model_dir, tmp_path / file)
        mean = sum(loss for loss, _ in rows) / sum(count for _, count in rows)
        wrong = [sum(loss / count for loss, count in rows) / len(rows), *(loss / count for loss, count in rows)]
        assert float(written[column]) == pytest.approx(mean, rel=1e-5)  # float32 sums in another order
        assert all(abs(mean - other) > 1e-3 for other in wrong)
    assert int(written["supervised_tokens"]) == sum(count for _, count in losses(model_dir, tmp_path / "train.jsonl"))
    assert result.eval_loss_before == pytest.approx(float(written["eval_loss"]), rel=1e-6)


def test_case_25_tokens_per_second_count_no_padding() -> None:
    """Rows of 10 and 90 tokens padded to 90, 30 supervised, 1 second: 100 (padded would be 180)."""
    examples = [Example(np.arange(n, dtype=np.int32), np.arange(n) >= n - k, "f", 1) for n, k in ((10, 5), (90, 25))]
    window = Loader(PackedRows(examples, 90, packing=False), 2, seed=0, pad_id=0).next_window(1)
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

    monkeypatch.setattr(worker, "PeakMemory", Peak)
    run(model_dir, data_dir, tmp_path / "run", steps=3)
    peaks = [float(r["peak_vram_gb"]) for r in read_metrics(tmp_path / "run" / "metrics.csv")]
    assert peaks == [0.005, 1.073741824, 0.005]


def test_case_24_rows_after_the_resumed_step_and_torn_ones_go(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    metrics = started(file)
    for step in range(1, 13):
        metrics.append(row(step))
    with file.open("a", encoding="utf-8") as torn:
        torn.write("single,1,13,0.")
    metrics = started(file, 10)
    for step in range(11, 21):
        metrics.append(row(step, eval_loss=2.5 if step >= 15 else None))
    assert file.read_text(encoding="utf-8").split("\n")[0] == ",".join(COLUMNS)
    assert file.read_text(encoding="utf-8").count("strategy") == 1
    assert [int(r["step"]) for r in read_metrics(file)] == list(range(1, 21))
    assert [r["eval_loss"] for r in read_metrics(file)] == [""] * 14 + ["2.5"] * 6
    assert metrics.eval_losses() == dict.fromkeys(range(15, 21), 2.5)
    assert started(file).eval_losses() == {} and read_metrics(file) == []


def test_opening_the_files_writes_nothing(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "metrics.csv")
    EventLog(tmp_path / "log.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_made_later_goes_into_the_last_row(tmp_path: Path) -> None:
    metrics = started(tmp_path / "metrics.csv")
    metrics.complete(0.5)
    assert read_metrics(metrics.path) == []
    metrics.append(row(1))
    metrics.append(row(2))
    metrics.complete(0.1 + 0.2)
    assert [r["eval_loss"] for r in read_metrics(metrics.path)] == ["", str(0.1 + 0.2)]
    assert metrics.eval_losses() == {2: 0.1 + 0.2}


@pytest.mark.parametrize("content", [b"a,b\n1,2\n", b"\xff\xfe\n", b"single,1,2\n", b"step\n\x00\n"])
def test_other_files_of_that_name_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.csv").write_bytes(",".join(COLUMNS).encode() + b"\nsingle,one,two" + b"," * 10 + b"\n")
    with pytest.raises(ConfigError, match=r"metrics\.csv: not the metrics of a run"):
        read_metrics(tmp_path / "metrics.csv")
    (tmp_path / "metrics.csv").write_bytes(content + content)
    with pytest.raises(ConfigError, match=r"metrics\.csv: not the metrics of a run"):
        read_metrics(tmp_path / "metrics.csv")
    (tmp_path / "log.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=r"log\.jsonl: not the log of a run"):
        read_events(tmp_path / "log.jsonl")
    (tmp_path / "log.jsonl").write_bytes(b"[1]\n")
    with pytest.raises(ConfigError, match="every line must be an object"):
        read_events(tmp_path / "log.jsonl")


def test_numbers_survive_the_file_exactly(tmp_path: Path) -> None:
    metrics = started(tmp_path / "metrics.csv")
    metrics.append(row(1, loss=0.1 + 0.2, lr=1e-30))
    read = read_metrics(tmp_path / "metrics.csv")[0]
    assert (float(read["loss"]), float(read["lr"])) == (0.1 + 0.2, 1e-30)
    assert (read["peak_vram_gb"], read["mfu"]) == ("", "")


def test_events_keep_what_has_no_step(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    log = EventLog(file)
    log.begin(0)
    log.write("data", file="a\u2028b.jsonl", count=1)
    for step in (1, 2, 3):
        log.write("update", step=step)
    with file.open("a", encoding="utf-8") as torn:
        torn.write('{"event": "upd')
    log.begin(2)
    log.write("resume", step=2)
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
    made = row(3, peak_vram_gb=1.5)
    assert describe(made, 10) == "step 3/10  loss 1.7500  lr 1.00e-01  100 tokens/s"
    assert details(made) == "epoch 1  1.00 s  1.50 GB"


def test_sketch_draws_high_values_high() -> None:
    lines = sketch([4.0, 3.0, 2.0, 1.0], height=4).split("\n")
    assert [line.index("*") for line in lines] == [10, 11, 12, 13]
    assert lines[0].startswith("   4.000 |") and lines[-1].startswith("   1.000 |")
    assert len(sketch([1.0] * 500).split("\n")[-1]) == 70  # means of neighbours: 60 columns and the labels


class Terminal:
    """A pseudo-terminal of 80 columns as standard output; `text` is what it was sent, after `close`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        self._stdout = os.fdopen(theirs, "w", encoding="utf-8")
        monkeypatch.setattr(sys, "stdout", self._stdout)
        self.text = ""
        self._reader = threading.Thread(target=self._read)  # a terminal that nobody reads fills up and blocks
        self._reader.start()

    def _read(self) -> None:
        sent = b""
        try:
            while piece := os.read(self._ours, 65536):
                sent += piece
        except OSError:  # how Linux says that the other end is closed
            pass
        self.text = sent.decode("utf-8")

    def close(self) -> str:
        self._stdout.close()
        self._reader.join()
        os.close(self._ours)
        return self.text


LIVE = r"\x1b\[2Kstep {}/{}  loss \d\.\d{{4}}  lr \d\.\d\de-\d\d  [\d,]+ tokens/s  \d:\d\d:\d\d left .*━"


def test_a_terminal_gets_a_live_line(model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch) -> None:
    """One line, erased and drawn anew, with everything that matters in it; other lines stay above it."""
    terminal = Terminal(monkeypatch)
    run(model_dir, data_dir, tmp_path / "run", steps=2)
    text = terminal.close()
    assert re.search(LIVE.format(2, 2), text), text
    assert "evaluation at step 2: loss" in text and text.count("\x1b[2K") > 2
    assert "epoch 1 " not in text  # that is plain lines


def test_the_live_line_of_a_long_run_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    with Progress(100_000, 51) as progress:
        progress.update(row(99_000, tokens_per_sec=123_456.0, peak_vram_gb=12.5))
    assert re.search(LIVE.format(99000, 100000), terminal.close())


def test_elsewhere_there_are_plain_lines(model_dir: Path, data_dir: Path, tmp_path: Path, capsys) -> None:
    run(model_dir, data_dir, tmp_path / "run", steps=2)
    printed = capsys.readouterr().out
    assert re.search(r"^step 2/2  loss .* tokens/s  0:00:00 left  epoch 1  \d+\.\d\d s  .* GB$", printed, re.MULTILINE)
    assert "\x1b" not in printed


def test_without_matplotlib_one_line_says_how(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(model_dir, data_dir, tmp_path / "run", steps=1)
    assert "pip install 'fullstride[plot]'" in capsys.readouterr().out
    assert not (tmp_path / "run" / "loss.png").exists()
