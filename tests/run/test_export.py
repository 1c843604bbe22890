"""fullstride export: what a run itself exports, byte for byte, from checkpoints of any split."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from fullstride import ConfigError
from fullstride.cli.main import main
from fullstride.run.export import export
from tests.run.conftest import TINY, make_model, run, tree


def same_files(a: Path, b: Path) -> None:
    assert tree(a) == tree(b)
    for name in tree(a):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


SPLITS: list[dict[str, Any]] = [{}, {"gpus": 2, "zero": 3, "batch_size": 1}, {"gpus": 2, "pp": 2}, {"gpus": 2, "tp": 2}]


@pytest.mark.parametrize("split", [SPLITS[0], *(pytest.param(s, marks=pytest.mark.slow) for s in SPLITS[1:])], ids=str)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_as_the_run_exports(
    method: str, split: dict[str, Any], model_dir: Path, data_dir: Path, tmp_path: Path
) -> None:
    kept = {"tp": 2}.items() <= split.items()  # TINY's one key/value head cannot be shared out
    if kept:
        import dataclasses

        from tests.run.conftest import TINY

        model_dir = make_model(tmp_path / "wider", dataclasses.replace(TINY, num_key_value_heads=2))
    made = run(model_dir, data_dir, tmp_path / "run", method=method, steps=2, epochs=None, **split)
    out = export(run=tmp_path / "run", out=tmp_path / "out")
    same_files(out, made.model or made.adapter or Path())
    checkpoints = export(run=tmp_path / "run" / "checkpoints", out=tmp_path / "again", step=2)
    same_files(out, checkpoints)


def test_precision_steps_and_best(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    more = {"method": "full", "steps": 4, "epochs": None, "save_every": 2, "eval_every": 2, "keep_best": True}
    run(model_dir, data_dir, tmp_path / "run", **more)
    export(run=tmp_path / "run", out=tmp_path / "two", step=2)
    export(run=tmp_path / "run", out=tmp_path / "best", step="best")
    export(run=tmp_path / "run", out=tmp_path / "half", export_dtype="bf16")
    sizes = {name: (tmp_path / name / "model.safetensors").stat().st_size for name in ("two", "best", "half")}
    assert sizes["half"] < 0.6 * sizes["two"] and sizes["two"] == sizes["best"]


def test_without_the_base(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    """Checkpoints that were moved away from everything else: the model is whole, a tokenizer can be named."""
    run(model_dir, data_dir, tmp_path / "run", method="full", steps=1, epochs=None)
    shutil.move(tmp_path / "run" / "checkpoints", tmp_path / "alone")
    out = export(run=tmp_path / "alone", out=tmp_path / "out")
    assert tree(out) == {"config.json", "generation_config.json", "model.safetensors"}
    named = export(run=tmp_path / "alone", out=tmp_path / "named", model=model_dir)
    same_files(named, tmp_path / "run" / "model")


def test_what_is_refused(model_dir: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(model_dir, data_dir, tmp_path / "run", steps=1, epochs=None)
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="no checkpoint of step 7; there are: step_00000001"):
        export(run=tmp_path / "run", out=out, step=7)
    with pytest.raises(ConfigError, match="no checkpoint of step best"):
        export(run=tmp_path / "run", out=out, step="best")
    with pytest.raises(ConfigError, match="no checkpoint of step latest; there are: none"):
        export(run=tmp_path, out=out)
    with pytest.raises(ConfigError, match="export-dtype concerns full models"):
        export(run=tmp_path / "run", out=out, export_dtype="bf16")
    other = make_model(tmp_path / "other", dataclasses.replace(TINY, intermediate_size=32))
    with pytest.raises(ConfigError, match=r"of another model than .*: intermediate_size 24 instead of 32"):
        export(run=tmp_path / "run", out=out, model=other)
    (shard, *_) = (tmp_path / "run" / "checkpoints" / "step_00000001").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-9])
    assert main(["export", str(tmp_path / "run"), str(out)]) == 1
    assert "were written; restore it" in capsys.readouterr().err and not out.exists()
