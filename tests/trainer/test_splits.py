"""Pipelines behind one Trainer: calls in any order, files in and out, other splits; and when a stage is gone."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullstride import ConfigError, Options, Trainer, UsageError, WorkerError
from tests.trainer.test_trainer import CONFIG, batch
from tests.trainer.test_workers import WITHIN, workers

DEEP = replace(CONFIG, num_hidden_layers=4)
ROWS, SEQ_LEN = 4, 6
# float32, sums in another order: 1e-7 a product, some 1e-6 after a few updates
TOLERANCE = 1e-5


def make(gpus: int, rows: int, **options: Any) -> Trainer:
    trainer = Trainer(
        DEEP, Options(device="cpu", dtype="fp32", **options), gpus=gpus, batch_size=rows, seq_len=SEQ_LEN, grad_accum=2
    )
    trainer.init_weights(seed=5)
    return trainer


def train(trainer: Trainer) -> np.ndarray:
    """Three updates, the last of one micro-step; evaluations in between find micro-batches under way."""
    told = []
    for update in range(3):
        for micro_step in range(1 if update == 2 else 2):
            trainer.step(*batch(ROWS, SEQ_LEN, [3, 5, 0, 6], 10 * update + micro_step), z_loss=1e-3)
            told.append(trainer.validate(*batch(ROWS, SEQ_LEN, [0, 0, 2, 4], 9))["loss"])
        # eps: without one the first AdamW update is the gradient's sign, which rounding can turn
        metrics = trainer.update(lr=1e-2, eps=1e-4, weight_decay=0.1, grad_clip=0.7)
        told += [metrics[name] for name in ("loss", "grad_norm", "lse_max", "lse_mean", "tokens")]
    return np.array(told)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    """(a checkpoint after three updates, what they told, what the next three tell), of one process."""
    directory = tmp_path_factory.mktemp("alone")
    with make(1, ROWS) as trainer:
        told = train(trainer)
        trainer.save_checkpoint(directory, 3)
        return directory, told, train(trainer)


@pytest.mark.parametrize(
    ("gpus", "options"),
    [
        (2, {"pp": 2}),
        (2, {"pp": 2, "pp_schedule": "interleaved"}),
        (2, {"pp": 2, "pp_schedule": "zb-h1", "microbatches": 2}),
        pytest.param(4, {"pp": 4, "pp_schedule": "gpipe", "microbatches": 1}, marks=pytest.mark.slow),
        pytest.param(4, {"pp": 2, "zero": 3}, marks=pytest.mark.slow),
        (2, {"tp": 2}),
        (4, {"pp": 2, "tp": 2}),
    ],
    ids=str,
)
def test_a_split_equals_one_process_and_goes_on_as_one(
    gpus: int, options: dict[str, Any], alone: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    checkpoint, first, then = alone
    rows = ROWS * options.get("pp", 1) * options.get("tp", 1) // gpus
    with make(gpus, rows, **options) as trainer:
        np.testing.assert_allclose(train(trainer), first, rtol=TOLERANCE)
        trainer.save_checkpoint(tmp_path, 3)
        trainer.export_model(tmp_path / "model")
        trainer.load_checkpoint(checkpoint)
        np.testing.assert_allclose(train(trainer), then, rtol=TOLERANCE)
    with make(1, ROWS) as trainer:
        trainer.load_checkpoint(tmp_path)
        arrays = batch(ROWS, SEQ_LEN, [3, 3, 3, 3], 7)
        before = trainer.validate(*arrays)
        np.testing.assert_allclose(train(trainer), then, rtol=TOLERANCE)
        trainer.import_weights(tmp_path / "model")
        assert trainer.validate(*arrays) == before


def test_a_rank_holds_its_own_layers_only() -> None:
    """Weights, gradients and moments of two of four layers each, with embedding or head."""
    with make(2, ROWS, pp=2) as trainer, make(1, ROWS) as whole:
        halves = [trainer.allocations(rank) for rank in range(2)]
        for segment in ("weights", "gradients", "moments"):
            sizes = [half[segment]["pageable"] for half in halves]
            assert sum(sizes) == whole.allocations()[segment]["pageable"] and max(sizes) < 0.6 * sum(sizes)
        trainer.step(*batch(ROWS, SEQ_LEN, [3, 5, 0, 6]))
        names = [set(trainer.gradients(rank)) for rank in range(2)]
        assert not names[0] & names[1] and "model.embed_tokens.weight" in names[0] and "model.norm.weight" in names[1]


def test_gradients_of_shared_tensors_are_whole() -> None:
    found = []
    for gpus, options in ((1, {}), (2, {"tp": 2})):
        with make(gpus, ROWS, **options) as trainer:
            trainer.step(*batch(ROWS, SEQ_LEN, [3, 5, 0, 6]))
            found.append(trainer.gradients(gpus - 1))
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).norm() / gradient.norm() < TOLERANCE, name


@pytest.mark.parametrize("split", [{"pp": 2}, {"tp": 2}], ids=str)
def test_a_rank_that_is_killed(split: dict[str, Any]) -> None:
    trainer = make(2, ROWS, **split)
    trainer.step(*batch(ROWS, SEQ_LEN, [3, 5, 0, 6]))
    os.kill(workers()[1], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
        trainer.step(*batch(ROWS, SEQ_LEN, [3, 5, 0, 6]))
        trainer.update(lr=1e-3)
    assert time.monotonic() - begin < WITHIN and not workers()


@pytest.mark.parametrize(
    ("gpus", "options", "error", "told"),
    [
        (3, {"tp": 3}, ConfigError, r"tp 3 must divide num_attention_heads 4, .*set tp to 2"),
        (2, {"pp": 2, "tp": 2}, UsageError, r"multiple of pp x tp; got gpus = 2, pp = 2 and tp = 2; set gpus = 4"),
        (3, {"pp": 2}, UsageError, r"multiple of pp x tp; got gpus = 3, pp = 2 and tp = 1; set gpus = 4"),
        (5, {"pp": 5}, ConfigError, r"4 layers cannot be split over 5 pipeline stages; set pp to at most 4"),
        (2, {"pp": 2, "microbatches": 3}, ConfigError, r"batch-size 4 does not divide into 3 .* microbatches to 2"),
        (4, {"pp": 4, "pp_schedule": "interleaved"}, ConfigError, r"4 layers cannot be split over 8 pipeline stages"),
        (
            1,
            {"pp_schedule": "gpipe"},
            UsageError,
            r"concern pipelines.*got pp = 1, pp-schedule = gpipe",
        ),
        (2, {"microbatches": 2}, UsageError, r"concern pipelines.*microbatches = 2"),
        (2, {"pp": 2, "pp_chunks": 3}, UsageError, r"pp-chunks is 2 or more with pp-schedule = interleaved"),
        (2, {"pp": 2, "pp_schedule": "zb-h1", "recompute": ("norm",)}, UsageError, r"leave recompute out"),
        (4, {"pp": 2, "pp_schedule": "zb-h1", "zero": 2}, UsageError, r"needs whole gradients .* set zero = 1"),
    ],
)
def test_refused_at_start(gpus: int, options: dict[str, Any], error: type, told: str) -> None:
    with pytest.raises(error, match=told):
        make(gpus, ROWS, **options)
    assert not workers()


def test_lora_adapters_are_whole(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    found = {}
    for gpus, options in ((1, {}), (2, {"pp": 2})):
        with make(gpus, ROWS, method="lora", lora_rank=2, lora_dropout=0.2, **options) as trainer:
            train(trainer)
            trainer.export_adapter(tmp_path / str(gpus))
            found[gpus] = load_file(tmp_path / str(gpus) / "adapter_model.safetensors")
    assert found[1].keys() == found[2].keys() and len(found[2]) == 4 * 7 * 2
    for name, weight in found[1].items():
        assert torch.allclose(found[2][name], weight, rtol=TOLERANCE, atol=TOLERANCE * weight.abs().max().item())
