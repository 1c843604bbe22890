"""Known small cases over a pipeline: the clip is by the norm over all stages; no layer is lost."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fullstride import ConfigError, Options, Trainer
from fullstride.engine.weights_io import init_weights
from fullstride.parallel.comm import Communicator
from tests.parity.harness import CONFIG, LORA, MODELS
from tests.ranks import RankTrainer, together

pytestmark = pytest.mark.xdist_group("ranks")  # one worker has the processes

SEQ_LEN = 8
BETA1 = 0.9


def tokens(rows: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, rows, SEQ_LEN), dtype=np.int32)
    return ids[0], ids[1]


def update_of(
    comm: Communicator, norms: tuple[float, float], options: Options, model: str
) -> tuple[float, list[float]]:
    """(the norm that this rank reports, by which each of its gradients was scaled) when the gradients of the two stages
    have these norms and the clip is 1."""
    trainer = RankTrainer(comm, MODELS[model], options, batch_size=2, seq_len=SEQ_LEN, grad_accum=1)
    engine = trainer.engine
    init_weights(engine, 1)
    trainer.step(*tokens(2 * options.dp))
    engine.pipeline.drain(2)
    engine.state.gradients.finish()
    # what is summed over both ends, the gradient of a tied embedding, is nought here
    ends = {"embedding"} if engine.state.tied else set()
    names = [name for name in engine.state.trained if name not in ends]
    owners = engine.mesh.dp.size if engine.state.owners.size > 1 else 1
    shards = engine.state.gradients.shards
    elements = owners * sum(grad.numel() for _, grad in shards(names))
    # gradients are of the loss sum, over all supervised tokens
    value = norms[engine.mesh.pp.rank] * 2 * options.dp * SEQ_LEN / math.sqrt(elements)
    for name, grad in shards(engine.state.trained):
        grad.fill_(value if name in names else 0.0)
    rates = {"lr": 1e-3, "beta1": BETA1, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
    told = trainer.update(grad_clip=1.0, **rates)
    # after the first update m = (1 - beta1) * gradient of the mean loss * factor
    mean = value / (2 * options.dp * SEQ_LEN)
    m = [(engine.state.trained[name].m / ((1 - BETA1) * mean)).unique() for name in names]
    engine.mesh.close()
    return told["grad_norm"], [extreme.item() for scale in m for extreme in (scale.min(), scale.max())]


@pytest.mark.parametrize(
    ("ranks", "model", "more"),
    [
        (2, "untied", {}),
        (2, "tied", {}),
        (2, "tied", LORA),
        (4, "untied", {"zero": 0}),
        (4, "tied", {"zero": 1}),
        (4, "untied", {"zero": 3}),
    ],
    ids=str,
)
def test_norms_3_and_4_are_5_everywhere(ranks: int, model: str, more: dict[str, Any]) -> None:
    """Each stage's own norm would report 3 and 4, and scale by 1/3 and 1/4."""
    options = Options(dtype="fp32", device="cpu", pp=2, dp=ranks // 2, **more)
    for norm, scales in together(ranks, update_of, (3.0, 4.0), options, model):
        assert norm == pytest.approx(5.0, rel=1e-6)  # float64 sums of float32 squares
        assert scales == pytest.approx([0.2] * len(scales), rel=1e-5)  # a few roundings in float32


def test_a_norm_within_the_clip_scales_nothing() -> None:
    options = Options(dtype="fp32", device="cpu", pp=2, dp=1)
    for norm, scales in together(2, update_of, (0.3, 0.4), options, "untied"):
        assert norm == pytest.approx(0.5, rel=1e-6) and scales == pytest.approx([1.0] * len(scales), rel=1e-5)


def test_a_sum_over_micro_batches_not_a_mean_of_means() -> None:
    """Rows of 1 and 3 supervised tokens are two micro-batches of a pipeline: the loss is the mean over the four."""
    losses = []
    for gpus, options in ((1, {}), (2, {"pp": 2})):
        with Trainer(CONFIG, Options(device="cpu", **options), gpus=gpus, batch_size=2, seq_len=SEQ_LEN) as trainer:
            trainer.init_weights(seed=1)
            inputs, targets = tokens(2)
            single = []
            for row, supervised in enumerate((1, 3)):
                targets[row, supervised:] = -100
                alone = targets.copy()
                alone[1 - row] = -100
                single.append(trainer.validate(inputs, alone)["loss"])
            trainer.step(inputs, targets)
            losses.append(trainer.update(lr=1e-3)["loss"])
            assert losses[-1] == pytest.approx((single[0] + 3 * single[1]) / 4, rel=1e-6)
            assert abs(losses[-1] - sum(single) / 2) > 1e-3
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def held(comm: Communicator, layers: int) -> list[int]:
    """This rank's layers, of which all have their weights here."""
    config = replace(CONFIG, num_hidden_layers=layers, hidden_size=8, intermediate_size=8)
    options = Options(dtype="fp32", device="cpu", pp=comm.size)
    trainer = RankTrainer(comm, config, options, batch_size=2, seq_len=SEQ_LEN, grad_accum=1)
    state = trainer.engine.state
    assert {f"blocks.{layer}" for layer in state.layers} <= state.views.keys()
    trainer.engine.mesh.close()
    return state.layers


@pytest.mark.parametrize(("layers", "stages"), [(7, 2), (30, 4)])
def test_all_layers_are_there(layers: int, stages: int) -> None:
    parts = together(stages, held, layers)
    assert list(itertools.chain(*parts)) == list(range(layers)) and sum(map(len, parts)) == layers


def test_fewer_layers_than_stages() -> None:
    config = replace(CONFIG, num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"3 layers cannot be split over 4 pipeline stages; set pp to at most 3"):
        Trainer(config, Options(device="cpu", pp=4), gpus=4, batch_size=2, seq_len=SEQ_LEN)


def test_the_norm_of_a_tied_embedding_is_that_of_the_sum() -> None:
    """The two ends hold shares g and h of its gradient: |g + h|, not |(g, h)|, and both end with the sum."""
    for norm, m in together(2, tied_update):
        assert norm == pytest.approx(7.0, rel=1e-6)
        assert m == pytest.approx(7.0 * (1 - BETA1), rel=1e-5)


def tied_update(comm: Communicator) -> tuple[float, float]:
    """Norm reported, and of m, where the ends' shares point one way and have norms 3 and 4, all else nought."""
    options = Options(dtype="fp32", device="cpu", pp=2)
    trainer = RankTrainer(comm, CONFIG, options, batch_size=2, seq_len=SEQ_LEN, grad_accum=1)
    engine = trainer.engine
    init_weights(engine, 1)
    trainer.step(*tokens(2))
    engine.pipeline.drain(2)
    for name, grad in engine.state.gradients.shards(engine.state.trained):
        share = (3.0, 4.0)[comm.rank] * 2 * SEQ_LEN / math.sqrt(grad.numel())
        grad.fill_(share if name == "embedding" else 0.0)
    told = trainer.update(lr=1e-3, beta1=BETA1, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip=0.0)
    m = torch.linalg.vector_norm(engine.state.trained["embedding"].m).item()
    engine.mesh.close()
    return told["grad_norm"], m
