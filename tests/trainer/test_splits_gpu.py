"""Pipelines and shared tensors on several GPUs (NCCL): as one GPU, with graphs; and when a stage ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fullstride import Options, Trainer, WorkerError
from tests.trainer.test_workers import WITHIN, workers
from tests.trainer.test_workers_gpu import CONFIG, ROWS, SEQ_LEN, TOLERANCE, batch, train, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def make(gpus: int, **options: Any) -> Trainer:
    options = {"device": "cuda", "dtype": "fp32", "deterministic": True, **options}
    trainer = Trainer(CONFIG, Options(**options), gpus=gpus, batch_size=ROWS, seq_len=SEQ_LEN, grad_accum=2)
    trainer.init_weights(seed=5)
    return trainer


SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1")
SPLITS: list[dict[str, Any]] = [{"pp": 2, "pp_schedule": schedule} for schedule in SCHEDULES]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("split", [*SPLITS, {"tp": 2}], ids=str)
def test_two_gpus_equal_one(split: dict[str, Any], packed: bool, tmp_path: Path) -> None:
    """Enough updates for graphs to be captured and replayed; evaluations in between, a short window at the end."""
    updates = 8 if packed else 6
    with make(1) as trainer:
        expected, expected_weights = train(trainer, updates, packed), weights(trainer, tmp_path / "one")
    with make(2, **split) as trainer:
        told, found = train(trainer, updates, packed), weights(trainer, tmp_path / "two")
    for a, b in zip(told, expected, strict=True):
        assert a == pytest.approx(b, rel=TOLERANCE)
    assert (found - expected_weights).norm() / expected_weights.norm() < TOLERANCE
    assert not workers()


@pytest.mark.parametrize("split", [{"pp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_graphs_give_the_bits_of_eager_runs_in_bf16(method: str, split: dict[str, Any]) -> None:
    found = []
    for graphs in (True, False):
        with make(2, dtype="bf16", graphs=graphs, method=method, **split) as trainer:
            found.append(train(trainer, 6))
    assert found[0] == found[1]


def test_a_stage_that_is_killed() -> None:
    """While its kernels and ours wait for one another on the GPUs."""
    trainer = make(2, pp=2)
    train(trainer, 4)
    trainer.step(*batch(1))
    os.kill(workers()[1], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
        trainer.step(*batch(2))
        trainer.update(lr=1e-3)
    assert time.monotonic() - begin < WITHIN and not workers()
