"""What ranks share out, beyond parity in float32: bf16, rounding, float32 sums, ranks without work, files, memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullstride import Options, Trainer
from fullstride.engine import weights_io
from fullstride.engine.plan import LIBRARIES, predict
from fullstride.engine.state import Sharing
from fullstride.model.hf import Checkpoint
from fullstride.parallel.comm import Communicator
from fullstride.parallel.weights import GatheredWeights
from fullstride.trainer.setting import Setting
from tests.parity.harness import LORA, MODELS
from tests.ranks import RankTrainer, together

pytestmark = pytest.mark.xdist_group("ranks")

SHARINGS = [Sharing(0), Sharing(1), Sharing(2), Sharing(2, True), Sharing(3), Sharing(3, True)]
COPIED = [Sharing(1, gather_by_copy=True), Sharing(2, True, True, True), Sharing(3, True, True, True)]
ROWS, SEQ_LEN = 2, 16  # of each rank
# eps: under a bias, which starts at zero, AdamW would make a step of the sign of a gradient that is only noise
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-5, "weight_decay": 0.1, "grad_clip": 1.0}
BF16 = {"dtype": "bf16", "master_dtype": "bf16", "m_dtype": "bf16", "v_dtype": "bf16"}


def arrays(ranks: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets) of all ranks; a third of the targets ignored."""
    generator = np.random.default_rng(seed)
    inputs, targets = generator.integers(0, 61, (2, ROWS * ranks, SEQ_LEN), dtype=np.int32)
    targets[generator.random(targets.shape) < 0.35] = -100
    return inputs, targets


def make(
    comm: Communicator, options: dict[str, Any], grad_accum: int, model: str = "tied", ranks: int = 0, **changed: Any
) -> RankTrainer:
    """A trainer whose rows are those of `ranks` (0: as many as there are) over the ranks that there are."""
    rows = ROWS * (ranks or comm.size) // comm.size
    trainer = RankTrainer(comm, MODELS[model], Options(device="cpu", **options), rows, SEQ_LEN, grad_accum, **changed)
    weights_io.init_weights(trainer.engine, 1)
    return trainer


def whole_values(trainer: RankTrainer) -> dict[str, torch.Tensor]:
    state = trainer.engine.state
    return {f"{unit.name}.{n}": v for unit in state.units for n, v in state.values(unit).items()}


# ---- bf16


def train(
    comm: Communicator, options: dict[str, Any], sharing: Sharing, updates: int, grad_clip: float = 1.0
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the weights that this rank computes with."""
    trainer, losses = make(comm, options, 2, sharing=sharing), []
    for update in range(updates):
        for micro_step in range(2):
            trainer.step(*arrays(comm.size, seed=2 * (update % 3) + micro_step))
        losses.append(trainer.update(**HYPER | {"grad_clip": grad_clip})["loss"])
    state, held = trainer.engine.state, {}
    for unit in state.units:
        with state.open(unit) as views:
            held |= {f"{unit.name}.{name}": view.clone() for name, view in views.items()}
    return losses, held


@pytest.mark.parametrize(
    ("sharing", "method"),
    [
        (Sharing(2, True), LORA),
        (Sharing(3, True), {}),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in [
                (Sharing(0), {}),
                (Sharing(1), LORA),
                (Sharing(2), {}),
                (COPIED[0], LORA),
                (COPIED[2], {}),
            ]
        ),
    ],
    ids=str,
)
def test_replicas_are_equal_after_50_updates_in_bf16(sharing: Sharing, method: dict[str, Any]) -> None:
    (losses, first), (others_losses, other) = together(2, train, BF16 | method, sharing, 50)
    assert losses == others_losses and losses[-1] < losses[0] - 0.3
    assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("all_to_all", [False, True])
def test_gathered_weights_and_repeats_give_the_same_bits_in_bf16(all_to_all: bool) -> None:
    """Rounding noise depends on neither where weights lie, nor on the run."""
    runs = [together(2, train, BF16, Sharing(zero, all_to_all), 4)[0] for zero in (2, 3, 3)]
    for _, weights in runs[1:]:
        assert all(torch.equal(weights[name], runs[0][1][name]) for name in weights)


def test_parts_are_rounded_as_the_whole_in_bf16() -> None:
    """Two ranks' gradients have one sum, whatever the order, and without a clip nothing but it enters the update: what
    two owners make of their parts are the bits that one makes of the whole."""
    (_, whole), _ = together(2, train, BF16, Sharing(0), 4, 0.0)
    (_, parts), _ = together(2, train, BF16, Sharing(1), 4, 0.0)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def train_poisoned(comm: Communicator, method: dict[str, Any]) -> Any:
    """As `train`, where buffers of released weights lose what was in them, as the next gather would have it."""
    release = GatheredWeights.release

    def poison(self: GatheredWeights, unit: str) -> None:
        self._units[unit].flat.fill_(float("nan"))

    GatheredWeights.release = poison  # type: ignore[method-assign]
    try:
        return train(comm, method, Sharing(3), 2)
    finally:
        GatheredWeights.release = release  # type: ignore[method-assign]


@pytest.mark.parametrize("method", [{}, LORA], ids=["full", "lora"])
def test_nothing_reads_weights_after_their_release(method: dict[str, Any]) -> None:
    """What `open` gave is copied out before; losses and weights are those without poison, to the bit."""
    (losses, weights), _ = together(2, train_poisoned, method)
    (expected, expected_weights), _ = together(2, train, method, Sharing(3), 2)
    assert losses == expected
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)


# ---- sums of gradients


def gradient(comm: Communicator, options: dict[str, Any], micro_steps: int, ranks: int, sharing: Sharing) -> Any:
    """This rank's share of the gradient after micro-steps on the same rows (one more is to come)."""
    trainer = make(comm, options, micro_steps + 1, ranks=ranks, sharing=sharing)
    for _ in range(micro_steps):
        trainer.step(*arrays(ranks))
    state = trainer.engine.state
    return {f"{u.name}.{n}": g.double().clone() for u in state.units for n, g in state.gradient(u).items()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Of all blocks' gradients together: what managers differ in."""
    names = [name for name in b if name.startswith("blocks")]
    flat_a, flat_b = (torch.cat([x[name].flatten() for name in names]) for x in (a, b))
    return ((flat_a - flat_b).norm() / flat_b.norm()).item()


@pytest.mark.parametrize("sharing", SHARINGS, ids=str)
def test_ranks_gradients_sum_to_that_of_one_process(sharing: Sharing) -> None:
    """In float32: sums of some hundred terms in another order."""
    shares = together(2, gradient, {"dtype": "fp32"}, 2, 2, sharing)
    summed = {name: shares[0][name] + shares[1][name] for name in shares[0]}
    assert distance(summed, gradient(Communicator(), {"dtype": "fp32"}, 2, 2, Sharing())) < 1e-6


def reduced(comm: Communicator, options: dict[str, Any], ranks: int, sharing: Sharing) -> dict[str, torch.Tensor]:
    """What this rank holds of the reduced gradient: its part, zeros elsewhere; at level 0 the whole."""
    trainer = make(comm, options, 1, ranks=ranks, sharing=sharing)
    trainer.step(*arrays(ranks))
    state = trainer.engine.state
    return {f"{u.name}.{n}": g.double().clone() for u in state.units for n, g in state.gradient(u).items()}


@pytest.mark.parametrize("sharing", [Sharing(1), Sharing(2), Sharing(2, True), Sharing(3)], ids=str)
def test_bf16_splits_stay_within_what_rounding_can_do(sharing: Sharing) -> None:
    """Two ranks' reduced gradient against one process's, both in bf16, whose unit is 2**-8 of a number.

    One process sums in float32 and rounds once, by at most half a unit of its gradient g. Two ranks round their terms a
    and b so, and their sum by at most a unit (stochastically). So the distance is at most
    (|g| / 2 + (|a| + |b|) / 2 + |g|) * 2**-8, and as much again for activations and their gradients, which both round
    alike but for sums whose order the number of rows changes.
    """
    one = reduced(Communicator(), BF16, 2, Sharing())
    parts = together(2, reduced, BF16, 2, sharing)
    found = {name: parts[0][name] + parts[1][name] for name in one}
    terms = together(2, gradient, {"dtype": "fp32"}, 1, 2, Sharing())
    names = [name for name in one if name.startswith("blocks")]
    size = torch.cat([one[name].flatten() for name in names]).norm()
    of_terms = sum(torch.cat([term[name].flatten() for name in names]).norm() for term in terms)
    bound = float(2 * (1.5 + of_terms / (2 * size)) * 2**-8)
    assert 0 < distance(found, one) < bound
    assert bound < 0.03  # a factor that is wrong, or a row that is missing, is far more


@pytest.mark.parametrize("sharing", [Sharing(2), Sharing(2, True)], ids=str)
def test_float32_sums_keep_what_bf16_sums_lose(sharing: Sharing) -> None:
    """Eight times the same micro-step is eight times its gradient. Float32 sums of bf16 terms say so to the rounding of
    float32; bf16 sums are rounded seven times by 2**-9 or so of what they are."""

    def summed(options: dict[str, Any], micro_steps: int) -> dict[str, torch.Tensor]:
        shares = together(2, gradient, options, micro_steps, 2, sharing)
        return {name: shares[0][name] + shares[1][name] for name in shares[0]}

    exact, coarse = (summed(BF16 | {"grad_dtype": g}, 1) for g in ("fp32", "bf16"))
    assert distance({n: 8 * g for n, g in exact.items()}, summed(BF16 | {"grad_dtype": "fp32"}, 8)) < 1e-6
    rounded = distance({n: 8 * g for n, g in coarse.items()}, summed(BF16, 8))
    assert 1e-3 < rounded < 1e-2


def test_float32_sums_on_one_rank() -> None:
    once, eight = (gradient(Communicator(), BF16 | {"grad_dtype": "fp32"}, n, 1, Sharing()) for n in (1, 8))
    for name in once:  # every unit, not just blocks: they all have float32 sums
        assert torch.allclose(8 * once[name], eight[name], rtol=1e-6, atol=0)


# ---- ranks with little to do


def uneven(comm: Communicator, sharing: Sharing, targets: list[np.ndarray], model: str, ranks: int) -> Any:
    trainer = make(comm, {"dtype": "fp32"}, len(targets) + 1, model, ranks=ranks, sharing=sharing)
    told = []
    for _ in range(2):
        for t in targets:
            trainer.step(arrays(ranks)[0], t)
            told.append(trainer.validate(arrays(ranks)[0], targets[0]))
        told.append(trainer.update(**HYPER))
    return told, whole_values(trainer)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sharing", SHARINGS, ids=str)
@pytest.mark.parametrize("idle", [0, 1])
def test_a_rank_without_a_supervised_token(idle: int, sharing: Sharing, model: str) -> None:
    """In all micro-steps of both updates, whose windows are shorter than grad_accum too."""
    targets = [arrays(2, seed)[1] for seed in (0, 1)]
    for t in targets:
        t[idle * ROWS : (idle + 1) * ROWS] = -100
    (told, weights), other = together(2, uneven, sharing, targets, model, 2)
    assert told == other[0]
    expected, expected_weights = uneven(Communicator(), Sharing(), targets, model, 2)
    for a, b in zip(told, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-5)  # the parity harness's bound
    for name, weight in expected_weights.items():
        assert (weights[name] - weight).norm() <= 1e-5 * weight.norm(), name


def test_the_mean_is_over_all_ranks_tokens() -> None:
    """3 tokens on one rank and 29 on the other: the loss is the mean over 32, as one process has it."""
    targets = np.full((2 * ROWS, SEQ_LEN), -100, dtype=np.int32)
    targets[0, :3], targets[2, 1:], targets[3, 1:15] = 5, 7, 7
    (told, _), _ = together(2, uneven, Sharing(), [targets], "tied", 2)
    expected, _ = uneven(Communicator(), Sharing(), [targets], "tied", 2)
    assert len(told) == 4  # validated and updated, twice
    for a, b in zip(told, expected, strict=True):
        assert a["tokens"] == b["tokens"] == 3 + 29
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


# ---- files


def export(comm: Communicator, sharing: Sharing, options: dict[str, Any], directory: Path) -> Any:
    trainer = make(comm, options, 1, "untied", sharing=sharing)
    trainer.step(*arrays(comm.size))
    trainer.update(**HYPER)
    values, dtype = whole_values(trainer), torch.float32
    weights_io.export_model(trainer.engine, directory / "model", dtype, None, False)
    if trainer.engine.lora is not None:
        weights_io.export_adapter(trainer.engine, directory / "adapter", None, False)
    comm.all_reduce(torch.zeros(1)).wait()  # the first rank has written
    back = make(comm, options, 1, "untied", sharing=sharing)
    weights_io.import_weights(back.engine, directory / "model")
    if back.engine.lora is not None:
        weights_io.import_adapter(back.engine, directory / "adapter")
    return values, whole_values(back), back.validate(*arrays(comm.size)), trainer.validate(*arrays(comm.size))


@pytest.mark.parametrize("method", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("sharing", [Sharing(0), Sharing(1), Sharing(3), COPIED[0], COPIED[2]], ids=str)
def test_one_model_and_one_adapter_are_written_and_read_back(
    sharing: Sharing, method: dict[str, Any], tmp_path: Path
) -> None:
    """bf16 with float32 masters, which are what is written: exact. A model's weights are read back as parameters."""
    options = {"dtype": "bf16", "master_dtype": "fp32"} | method
    for values, back, validated, before in together(2, export, sharing, options, tmp_path):
        for name, value in values.items():
            assert torch.equal(back[name], value if method else value.bfloat16().float()), name
        assert validated == before
    names = Checkpoint(tmp_path / "model").names
    assert len(names) == 3 * 12 + 3  # the untied Qwen2: 12 tensors a block, embedding, norm, head


# ---- memory


def held(comm: Communicator, options: dict[str, Any], sharing: Sharing) -> dict[str, int]:
    trainer = make(comm, options, 2, "untied", sharing=sharing)
    for _ in range(2):
        trainer.step(*arrays(comm.size))
    trainer.update(**HYPER)
    trainer.validate(*arrays(comm.size))
    return trainer.engine.arena.segments


@pytest.mark.parametrize("options", [BF16, BF16 | {"grad_dtype": "fp32"}, LORA | {"dtype": "bf16"}], ids=str)
@pytest.mark.parametrize("sharing", SHARINGS + COPIED, ids=str)
def test_every_rank_holds_what_was_predicted(sharing: Sharing, options: dict[str, Any]) -> None:
    if sharing.zero < 2 and options.get("grad_dtype"):
        pytest.skip("float32 sums over ranks need zero 2")
    lora, settings = Setting(Options(device="cpu", **options).resolved(), ROWS, SEQ_LEN, 2).engine(MODELS["untied"])
    plan = predict(MODELS["untied"], lora, replace(settings, sharing=sharing), "cpu", ranks=4).device
    plan.pop(LIBRARIES)
    assert together(4, held, options, sharing) == [plan] * 4


def test_levels_hold_less_and_less() -> None:
    """Masters and moments a quarter from level 1 on, blocks' gradients from 2, weights from 3."""
    plans = {}
    options = Options(device="cpu", dtype="bf16", master_dtype="fp32").resolved()
    lora, settings = Setting(options, ROWS, SEQ_LEN, 2).engine(MODELS["tied"])
    for sharing in SHARINGS:
        plans[sharing] = predict(MODELS["tied"], lora, replace(settings, sharing=sharing), "cpu", ranks=4).device
    state = [plans[Sharing(zero)]["masters"] + plans[Sharing(zero)]["moments"] for zero in range(4)]
    assert state[1] == state[2] == state[3] and 3.5 < state[0] / state[1] <= 4  # padding costs a little
    weights = [plans[Sharing(zero)]["weights"] for zero in range(4)]
    assert weights[0] <= weights[1] == weights[2] and weights[3] * 4 == weights[2]
    assert "gathered" not in plans[Sharing(2)] and "gathered" in plans[Sharing(3)]


def test_a_trainer_of_one_rank_shares_nothing() -> None:
    with Trainer(MODELS["tied"], Options(device="cpu"), batch_size=1, seq_len=8) as trainer:
        assert trainer.engine.state.owners.size == 1 and trainer.engine.state.weights.resident
