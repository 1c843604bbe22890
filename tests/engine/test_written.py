"""What was written is read back before it appears: another file, an empty or a spoilt tensor is an error by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fullstride import ConfigError, Trainer
from fullstride.engine import weights_io
from fullstride.model import hf
from tests.trainer.test_trainer import batch, make

B = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
LORA = {"method": "lora", "lora_rank": 2}


def adapter(trainer: Trainer, name: str) -> torch.Tensor:
    """A tensor of the trainer's adapters as it lives in the engine."""
    state = trainer.engine.state
    return next(
        state.tensor(unit, spec)[part.start : part.stop]
        for unit in state.adapters
        for spec in unit.tensors
        for part in spec.parts
        if part.hf_name == name
    )


def train(trainer: Trainer, lr: float = 1e-2) -> None:
    trainer.step(*batch(1, 6, [4]))
    trainer.update(lr=lr)


@pytest.mark.parametrize("lr", [0.0, 1e-2])
def test_an_adapter_that_is_empty_after_training(lr: float, tmp_path: Path) -> None:
    """B is zero at the start, and stays so at a rate of zero: that is no fault."""
    with make(**LORA) as trainer:
        trainer.export_adapter(tmp_path / "fresh")
        train(trainer, lr)
        adapter(trainer, B).zero_()
        if not lr:
            trainer.export_adapter(tmp_path / "adapter")
            return
        with pytest.raises(ConfigError, match=rf"1 are zero after 1 updates, the first is {B}; leave"):
            trainer.export_adapter(tmp_path / "adapter")
        assert [path.name for path in tmp_path.iterdir()] == ["fresh"]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite(value: float, tmp_path: Path) -> None:
    with make(**LORA) as trainer:
        train(trainer)
        adapter(trainer, B)[1, 1] = value
        with pytest.raises(ConfigError, match=rf"must be finite; {B} has values"):
            trainer.export_adapter(tmp_path / "adapter")
    with make() as trainer:
        train(trainer)
        trainer.engine.state.views["head"]["lm_head"][3, 2] = value
        with pytest.raises(ConfigError, match=r"must be finite; lm_head\.weight has values"):
            trainer.export_model(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_values_that_overflow_when_they_are_rounded(tmp_path: Path) -> None:
    """The greatest float32 is infinite in bf16: what counts is what the file holds."""
    with make() as trainer:
        trainer.engine.state.views["head"]["lm_head"][0, 0] = torch.finfo(torch.float32).max
        trainer.export_model(tmp_path / "fp32")
        with pytest.raises(ConfigError, match=r"must be finite; lm_head\.weight has values"):
            trainer.export_model(tmp_path / "bf16", dtype="bf16")


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_file_that_is_not_what_was_written(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is lost, and one whose bytes are not those handed over (as on a disk that drops blocks)."""
    name = "lm_head.weight" if method == "full" else B

    def export(trainer: Trainer) -> None:
        getattr(trainer, "export_model" if method == "full" else "export_adapter")(tmp_path / "out")

    with make(**(LORA if method == "lora" else {})) as trainer:
        train(trainer)
        with monkeypatch.context() as patch:
            patch.setattr(hf.Checkpoint, "get", zeroed(name, hf.Checkpoint.get))
            with pytest.raises(OSError, match=rf"{name} reads back with values from 0 to 0, but those written"):
                export(trainer)
        with monkeypatch.context() as patch:
            if method == "full":
                patch.setattr(hf, "_write_safetensors", without(name, hf._write_safetensors))
            else:
                patch.setattr(weights_io, "save_tensors", without(name, weights_io.save_tensors))
            with pytest.raises(ConfigError, match=rf"missing: {name}"):
                export(trainer)
        assert not list(tmp_path.iterdir())
        export(trainer)
    assert (tmp_path / "out").is_dir()


def zeroed(name: str, get: Any) -> Any:
    return lambda self, wanted: torch.zeros_like(get(self, wanted)) if wanted == name else get(self, wanted)


def without(name: str, write: Any) -> Any:
    """`write` that leaves one tensor out, of {name: tensor} first or of (name, ...) tuples second."""

    def leave_out(first: Any, second: Any, *more: Any) -> Any:
        if isinstance(first, dict):
            return write({key: value for key, value in first.items() if key != name}, second, *more)
        return write(first, [source for source in second if source[0] != name], *more)

    return leave_out
