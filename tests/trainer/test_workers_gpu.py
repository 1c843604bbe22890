"""Ranks on several GPUs (NCCL): as one GPU, with graphs, at all ZeRO levels; and when one of them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fullstride import ModelConfig, Options, Trainer, WorkerError
from tests.trainer.test_workers import WITHIN, workers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    tie_word_embeddings=True,
)
ROWS, SEQ_LEN = 4, 128
# float32, sums in another order: 1e-7 a product, some 1e-6 after a few updates
TOLERANCE = 1e-5
SHARINGS: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 1},
    {"zero": 2},
    {"zero": 2, "grad_reduce": "all-to-all"},
    {"zero": 3},
    {"zero": 3, "grad_reduce": "all-to-all"},
]


def make(gpus: int, **options: Any) -> Trainer:
    """gpus: 0 for the two of a launcher."""
    options = {"device": "cuda", "dtype": "fp32", "deterministic": True, **options}
    sizes = {"batch_size": ROWS // (gpus or 2), "seq_len": SEQ_LEN, "grad_accum": 2}
    trainer = Trainer(CONFIG, Options(**options), gpus=gpus, **sizes)
    trainer.init_weights(seed=5)
    return trainer


def documents(seed: int) -> np.ndarray:
    """Of numbers that differ among ranks, and from one micro-step to the next."""
    generator = np.random.default_rng(seed)
    numbers = [np.sort(generator.integers(0, most, SEQ_LEN)) for most in generator.integers(1, 40, ROWS)]
    return np.stack(numbers).astype(np.int32)


def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    inputs, targets = generator.integers(0, CONFIG.vocab_size, (2, ROWS, SEQ_LEN), dtype=np.int32)
    targets[generator.random(targets.shape) < 0.3] = -100
    return inputs, targets


def train(trainer: Trainer, updates: int = 6, packed: bool = False) -> list[dict[str, float]]:
    """Enough updates for graphs to be captured and replayed; the last window is short."""
    told = []
    for update in range(updates):
        for micro_step in range(1 if update == updates - 1 else 2):
            seed = 2 * update + micro_step
            trainer.step(*batch(seed), documents(seed) if packed else None)
        told.append(trainer.validate(*batch(99)))
        told.append(trainer.update(lr=1e-3, eps=1e-4, weight_decay=0.1, grad_clip=1.0))
    return told


def weights(trainer: Trainer, directory: Path) -> torch.Tensor:
    trainer.export_model(directory)
    tensors = load_file(directory / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sharing", SHARINGS, ids=str)
def test_two_gpus_equal_one(sharing: dict[str, Any], packed: bool, tmp_path: Path) -> None:
    updates = 12 if packed else 6
    with make(1) as trainer:
        expected, expected_weights = train(trainer, updates, packed), weights(trainer, tmp_path / "one")
    with make(2, **sharing) as trainer:
        told, found = train(trainer, updates, packed), weights(trainer, tmp_path / "two")
        assert len(trainer.gpu_info()) == 2
    for a, b in zip(told, expected, strict=True):
        assert a == pytest.approx(b, rel=TOLERANCE)
    assert (found - expected_weights).norm() / expected_weights.norm() < TOLERANCE
    assert not workers()


@pytest.mark.parametrize("zero", [1, 3])
def test_graphs_over_ranks_give_the_bits_of_eager_runs_in_bf16(zero: int, tmp_path: Path) -> None:
    found = []
    for graphs in (True, False):
        with make(2, dtype="bf16", zero=zero, graphs=graphs) as trainer:
            found.append((train(trainer, 8), weights(trainer, tmp_path / f"{graphs}")))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("zero", [1, 3])
def test_a_worker_that_is_killed(zero: int) -> None:
    """While its kernels and ours wait for one another on the GPUs."""
    trainer = make(2, zero=zero)
    train(trainer, 4)
    trainer.step(*batch(1))
    os.kill(workers()[1], signal.SIGKILL)  # started in this order
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
        trainer.step(*batch(2))
        trainer.update(lr=1e-3)
    assert time.monotonic() - begin < WITHIN and not workers()
    with make(1) as alone:  # and the GPU is usable
        train(alone, 1)


@pytest.mark.parametrize("way", ["with trainer:\n    go(trainer)", "go(trainer)"], ids=["with", "uncaught"])
def test_torchrun_ends_after_an_error_though_graphs_were_captured(way: str, tmp_path: Path) -> None:
    """The traceback holds the engine, and its graphs those of NCCL's communicator."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, time\n"
        "from tests.trainer.test_workers_gpu import batch, make, train\n"
        "trainer = make(0)\n"
        "engine = trainer.engine\n"
        "def go(trainer):\n"
        "    train(trainer, 4)\n"
        "    if os.environ['RANK'] == '1':\n"
        f"        pathlib.Path({str(tmp_path)!r}, 'when').write_text(str(time.monotonic()))\n"
        "        raise ArithmeticError('the fault')\n"
        "    while True:\n"
        "        train(trainer, 1)\n"
        f"{way}\n"
    )
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, env=env, check=False)
    assert done.returncode != 0 and "ArithmeticError: the fault" in done.stderr
    assert time.monotonic() - float((tmp_path / "when").read_text()) < 30  # one clock for all processes
