"""fullstride plot and doctor."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fullstride.cli.main import main
from fullstride.run import doctor
from tests.run.conftest import run

PNG = b"\x89PNG\r\n"


def test_several_runs_over_one_another(
    model_dir: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        run(model_dir, data_dir, tmp_path / name, steps=3, epochs=None)
    assert main(["plot", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "x.png")]) == 0
    both = (tmp_path / "x.png").read_bytes()
    assert main(["plot", str(tmp_path / "a")]) == 0
    one = (tmp_path / "a" / "plot.png").read_bytes()
    assert both.startswith(PNG) and one.startswith(PNG) and both != one
    assert str(tmp_path / "a" / "plot.png") in capsys.readouterr().out


def test_what_is_drawn(model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fullstride.config.commands import PlotConfig
    from fullstride.run import plot

    figures: list[Any] = []
    monkeypatch.setattr(plot, "_save", lambda figure, _: figures.append(figure))
    for name in ("a", "b"):
        run(model_dir, data_dir, tmp_path / name, steps=3, epochs=None, eval_every=1)
    figures.clear()
    plot.run_plot(PlotConfig((str(tmp_path / "a"), str(tmp_path / "b"))))
    (figure,) = figures
    assert [axes.get_ylabel() for axes in figure.axes] == list(plot.PANELS.values())
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert labels == ["a", "a, evaluation", "b", "b, evaluation"]
    assert list(figure.axes[0].lines[1].get_xdata()) == [0, 1, 2, 3]
    assert all(len(line.get_xdata()) == 3 for axes in figure.axes[1:] for line in axes.lines)


def test_plot_refuses(
    model_dir: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["plot", str(tmp_path)]) == 1
    assert "no metrics.csv in" in capsys.readouterr().err
    assert main(["plot"]) == 2
    run(model_dir, data_dir, tmp_path / "a", steps=1, epochs=None)
    (tmp_path / "a" / "metrics.csv").write_text("nonsense\n1\n")
    assert main(["plot", str(tmp_path / "a")]) == 1
    assert "not the metrics of a run" in capsys.readouterr().err
    run(model_dir, data_dir, tmp_path / "b", steps=1, epochs=None)
    importing = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return importing(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["plot", str(tmp_path / "b")]) == 1
    assert "plots need matplotlib: pip install 'fullstride[plot]'" in capsys.readouterr().err


def test_doctor_tells_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", str(tmp_path / "x.json")]) == 0
    told = capsys.readouterr().out
    assert told.endswith("training can run here\n") and "torch" in told and "disk here" in told
    found = {entry["about"]: entry for entry in json.loads((tmp_path / "x.json").read_text())}
    assert found["torch"]["level"] == found["transformers"]["level"] == "ok" and "several ranks" in found


def test_doctor_finds_what_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Old and missing packages, a driver that raises: findings with a remedy, never a traceback."""
    import torch

    installed = doctor._installed
    versions = {"torch": "2.4.1+cu121", "jinja2": "", "matplotlib": ""}
    monkeypatch.setattr(doctor, "_installed", lambda name: versions.get(name, installed(name)))

    def broken() -> bool:
        raise RuntimeError("driver\nmismatch")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "2.4.1+cu121; 2.11 is the least: pip install --upgrade torch" in told
    assert "missing; pip install jinja2" in told and "pip install 'fullstride[plot]'" in told
    assert "cannot be told (RuntimeError: driver mismatch)" in told
    assert told.endswith("training cannot run here: 2 fault(s), marked !\n")
    monkeypatch.setitem(versions, "torch", "")
    assert main(["doctor"]) == 1 and "pip install 'torch>=2.11'" in capsys.readouterr().out
    assert "tensorboard" in told and sys.version_info >= (3, 11)
