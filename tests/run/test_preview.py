"""What a dry run shows of the data."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fullstride.data.report import Report
from fullstride.run import preview
from tests.run.conftest import run

NASTY = "\x1b[2Jgone\x9b31m [bold red]loud[/] \u202eback «x»"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows: list[Any] = [{"prompt": f"p{i} ", "completion": f"c{i}"} for i in range(4)]
    rows[0] = {"prompt": f"{NASTY} ", "completion": f"answer {NASTY}"}
    rows += [{"prompt": "p", "completion": ""}] * 3 + [rows[1], {"prompt": None, "completion": "x"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_dry_run_shows_counts_and_three_rows(
    model_dir: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(model_dir, data, tmp_path / "run", steps=1, dry_run=True)
    said = capsys.readouterr().out
    assert "3  empty completion  (lines 5-7)" in said
    assert "1  null content  (line 9)" in said
    assert "1  the same as an earlier one (kept)  (line 8)" in said
    assert [f"rows.jsonl line {i}: " in said for i in (1, 2, 3, 4)] == [True, True, True, False]
    assert "«c1" in said and "«c2" in said
    assert not (tmp_path / "run").exists()
    assert all(c.isprintable() or c == "\n" for c in said)  # nothing that steers a terminal
    assert r"\x1b[2Jgone\x9b31m" in said and r"\u202eback" in said


def test_in_a_terminal_masks_are_colours_and_data_are_not_markup(
    model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system="standard", width=200, highlight=False)
    monkeypatch.setattr(preview, "_console", lambda: console)
    run(model_dir, data, tmp_path / "run", steps=1, dry_run=True)
    capsys.readouterr()
    said = screen.getvalue()
    assert "\x1b[32mc1" in said  # green
    assert "[bold red]loud[/]" in said and "\x1b[2J" not in said and "\x9b" not in said
    assert "empty completion" in said and "5-7" in said


def test_long_prompts_are_shown_in_part(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "begin " + "x" * 5000 + " end", "completion": "answer"}) + "\n")
    run(model_dir, data, tmp_path / "run", steps=1, dry_run=True, seq_len=6000)
    said = capsys.readouterr().out
    assert "begin xxx" in said and "xxx end«answer" in said and "[... 3,510 characters ...]" in said


def test_a_table_without_entries_says_so() -> None:
    assert preview.table(Report()) == ["no row was dropped or changed"]
