"""SmolLM2 on real rows: a short run learns (on a CPU a few updates, on a GPU fifty)."""

from __future__ import annotations

from pathlib import Path

import pytest

import fullstride as fs
from fullstride.run.metrics import read_metrics
from tests.conftest import shared

DATA = {"ami": {"seq_len": 1024}, "chat": {"seq_len": 512}}


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2")
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("data", DATA)
def test_a_short_run_learns(data: str, method: str, smollm2: Path, tmp_path: Path) -> None:
    """Meetings of up to 16,000 tokens cut to the row, and chats of one to twelve turns."""
    result = fs.finetune(
        model=str(smollm2),
        data=str(shared("data", data)),
        eval_data=str(_first_rows(shared("data", data, "validation.jsonl"), 4, tmp_path)),
        out=str(tmp_path / "run"),
        method=method,
        steps=6,
        batch_size=1,
        grad_accum=2,
        lr=1e-3 if method == "lora" else 1e-4,
        schedule="constant",
        device="cpu",
        **DATA[data],
    )
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [int(row["step"]) for row in rows] == list(range(1, 7))
    assert result.eval_loss is not None and result.eval_loss_before is not None
    assert result.eval_loss < result.eval_loss_before - 0.02
    assert (result.adapter if method == "lora" else result.model) is not None


def _first_rows(file: Path, count: int, directory: Path) -> Path:
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)[:count]
    out = directory / "evaluation.jsonl"
    out.write_text("".join(lines), encoding="utf-8")
    return out
