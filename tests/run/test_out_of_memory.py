"""Running out of memory under a command: one line that says what would fit, exit 1."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fullstride.cli.main import main
from fullstride.config import Options
from fullstride.engine.plan import LIBRARIES, predict
from fullstride.memory import arena
from fullstride.trainer.setting import Setting
from tests.run.conftest import TINY, keys


def command(model_dir: Path, data_dir: Path, out: Path, **more: object) -> list[str]:
    given = keys(model_dir, data_dir, out, **{"batch_size": 4, "grad_accum": 1, "steps": 1, **more})
    return ["finetune", *(f"--{name.replace('_', '-')}={value}" for name, value in given.items())]


@pytest.mark.parametrize("place", ["construction", "step", "library"])
def test_finetune_names_a_setting_that_works(
    place: str, model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    options = Options(method="lora", device="cpu").resolved()
    plan = predict(TINY, *Setting(options, 4, 96, 1).engine(TINY), "cpu").device
    arenas = sum(plan.values()) - plan[LIBRARIES]
    limit = {"construction": arenas - plan["scratch"] - 1, "step": arenas - 1, "library": 10 * arenas}[place]
    monkeypatch.setattr(arena, "_physical_memory", lambda: limit)
    if place == "library":

        def fails(*_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.00 MiB. GPU 0 has")

        monkeypatch.setattr("fullstride.engine.stage.attention_fwd", fails)
    assert main(command(model_dir, data_dir, tmp_path / "run")) == 1
    told = capsys.readouterr().err
    assert told.startswith("fullstride: error: out of memory on cpu: segment '") and told.count("\n") == 1
    segment = {"construction": r"\w+", "step": "scratch", "library": "libraries"}[place]
    assert re.search(f"segment '{segment}' asks for", told) and "Traceback" not in told
    flags = re.search(r"; ((?:--[\w-]+ \S+ )+)would fit: about", told)
    assert flags, told
    if place == "library":
        monkeypatch.undo()
    words = flags[1].split()
    named = dict(zip((word[2:].replace("-", "_") for word in words[::2]), words[1::2], strict=True))
    # the same command with the flags that were named: a run that has trained nothing does not hold its directory
    assert main(command(model_dir, data_dir, tmp_path / "run", **named)) == 0
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 2
