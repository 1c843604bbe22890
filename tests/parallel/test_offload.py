"""Gradient shards in host memory: no bit changes, and what the device holds of them does not grow with the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fullstride import Options, Trainer, UsageError
from fullstride.engine.plan import LIBRARIES, Plan, predict
from fullstride.engine.state import Sharing
from fullstride.memory import offload
from fullstride.parallel.comm import Communicator
from fullstride.trainer.setting import Setting
from tests.parallel.test_sharing import BF16, HYPER, arrays, make, whole_values
from tests.parity.harness import CONFIG, LORA, MODELS
from tests.ranks import together

pytestmark = pytest.mark.xdist_group("ranks")

PRECISIONS = {"fp32": {"dtype": "fp32"}, "bf16": BF16, "bf16, fp32 sums": BF16 | {"grad_dtype": "fp32"}}
WINDOWS = (3, 1, 2, 3)  # micro-steps of each update; the last of grad_accum = 3 is not always there


class LateLane(offload.Lane):
    """Copies as late as their order allows: when they are waited for."""

    lanes: ClassVar[list[LateLane]] = []

    def __init__(self, buffer: torch.Tensor) -> None:
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.lanes.append(self)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.waiting.append((source, target))

    def wait(self) -> None:
        for source, target in self.waiting:
            target.copy_(source)
        self.waiting.clear()


def train(comm: Communicator, options: dict[str, Any], sharing: Sharing, late: bool = False) -> Any:
    """What updates tell, gradients before the last one, and weights; with `late`, copies by LateLane, none of which is
    under way between pieces of work that are captured."""
    lane, offload.Lane = offload.Lane, LateLane if late else offload.Lane  # type: ignore[misc]
    try:
        trainer = make(comm, options, 3, "untied", sharing=sharing)
    finally:
        offload.Lane = lane  # type: ignore[misc]
    told, gradients = [], {}
    for update, micro_steps in enumerate(WINDOWS):
        for micro_step in range(micro_steps):
            trainer.step(*arrays(comm.size, seed=3 * update + micro_step))
            assert not any(lane.waiting for lane in LateLane.lanes)
        state = trainer.engine.state
        gradients = {f"{u.name}.{n}": g.clone() for u in state.units for n, g in state.gradient(u).items()}
        told.append(trainer.update(**HYPER))
        assert not any(lane.waiting for lane in LateLane.lanes)
    if late:
        assert LateLane.lanes
        LateLane.lanes.clear()
    return told, gradients, whole_values(trainer)


def everywhere(ranks: int, *arguments: Any) -> list[Any]:
    """`train` on every rank."""
    return together(ranks, train, *arguments) if ranks > 1 else [train(Communicator(), *arguments)]


def same_bits(found: list[Any], expected: list[Any]) -> None:
    for (told, *tensors), (expected_told, *expected_tensors) in zip(found, expected, strict=True):
        assert told == expected_told
        for a, b in zip(tensors, expected_tensors, strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "late copies"])
@pytest.mark.parametrize("all_to_all", [False, True], ids=["reduce-scatter", "all-to-all"])
@pytest.mark.parametrize("method", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_bits_are_those_without_offload(
    ranks: int, precision: str, method: dict[str, Any], all_to_all: bool, late: bool
) -> None:
    options = PRECISIONS[precision] | method
    found = everywhere(ranks, options, Sharing(2, all_to_all, offload=True), late)
    same_bits(found, everywhere(ranks, options, Sharing(2, all_to_all)))


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_one_rank_may_offload_at_every_level(zero: int) -> None:
    """With the bits of shared blocks, whatever the level."""
    same_bits(everywhere(1, BF16, Sharing(zero, offload=True)), everywhere(1, BF16, Sharing(2)))


def test_one_rank_has_nobody_to_exchange_with() -> None:
    """All-to-all is reduce-scatter there, in memory too."""
    same_bits(everywhere(1, BF16, Sharing(2, True)), everywhere(1, BF16, Sharing(2)))
    a, b = (make(Communicator(), BF16, 1, sharing=Sharing(2, x)).engine.arena.segments for x in (False, True))
    assert a == b


def test_blocks_of_one_rank_are_summed_apart_from_zero_2_on() -> None:
    """Not as level 1 does: its bf16 sums are products' accumulators, these are rounded stochastically."""
    (_, apart, _), *_ = everywhere(1, BF16, Sharing(2))
    (_, together_, _), *_ = everywhere(1, BF16, Sharing(1))
    assert any(not torch.equal(apart[name], together_[name]) for name in apart if name.startswith("blocks"))
    assert all(torch.isfinite(value).all() and value.any() for value in apart.values())


class CountingLane(LateLane):
    """Copies at once, and counts them: to the device, and from it."""

    fetched = put = 0

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__(buffer)
        self._address = buffer.data_ptr()

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if target.data_ptr() == self._address:
            CountingLane.fetched += 1
        else:
            CountingLane.put += 1
        target.copy_(source)


@pytest.mark.parametrize("sharing", [Sharing(2, offload=True), Sharing(2, True, offload=True)], ids=str)
def test_what_is_copied(sharing: Sharing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's sum goes back once a micro-step, and comes before, but for the first; twice for the update, whose norm
    comes before its weights."""
    monkeypatch.setattr(offload, "Lane", CountingLane)
    trainer = make(Communicator(), BF16, 3, sharing=sharing)
    layers, seen = CONFIG.num_hidden_layers, []
    for work in (*[lambda: trainer.step(*arrays(1))] * 3, lambda: trainer.update(**HYPER)):
        CountingLane.fetched = CountingLane.put = 0
        work()
        seen.append((CountingLane.fetched, CountingLane.put))
    LateLane.lanes.clear()
    assert seen == [(0, layers), (layers, layers), (layers, layers), (2 * layers, 0)]


# ---- memory


def block_elements(options: dict[str, Any]) -> tuple[int, int]:
    """(elements of one block's flat gradient, of all units' that are not blocks) of the untied model."""
    state = make(Communicator(), options, 1, "untied").engine.state
    sizes = {name: unit.layout.size for name, unit in state.trained.items()}
    return sizes["blocks.0"], sum(size for name, size in sizes.items() if not name.startswith("blocks"))


def gradients_of(sharing: Sharing, layers: int, options: dict[str, Any], device: str = "cuda") -> tuple[int, int]:
    """Predicted (device, pinned) bytes of gradients."""
    config = replace(MODELS["untied"], num_hidden_layers=layers)
    lora, settings = Setting(Options(device="cpu", **options).resolved(), 2, 16, 1).engine(config)
    plan: Plan = predict(config, lora, replace(settings, sharing=sharing), device)
    return plan.device["gradients"], plan.pinned.get("gradients", 0)


@pytest.mark.parametrize("grad", ["bf16", "fp32"])
def test_what_one_rank_holds_of_gradients(grad: str) -> None:
    """Level 2: two blocks' buffers and all sums; with offload two sums' buffers, and the sums in host memory. What is
    not a block has a buffer, and with float32 sums one of those, both on the device."""
    options = BF16 | {"grad_dtype": grad}
    block, rest = block_elements(options)
    size = {"bf16": 2, "fp32": 4}[grad]
    ends = rest * 2 + (rest * 4 if grad == "fp32" else 0)
    for layers in (3, 7):
        assert gradients_of(Sharing(2), layers, options) == (ends + block * (2 * 2 + layers * size), 0)
        away = ends + block * (2 * 2 + 2 * size), block * layers * size
        assert gradients_of(Sharing(2, offload=True), layers, options) == away
        assert gradients_of(Sharing(1, offload=True), layers, options) == away
        assert gradients_of(Sharing(2, offload=True), layers, options, "cpu") == (sum(away), 0)  # one memory


def held(comm: Communicator, options: dict[str, Any], sharing: Sharing) -> dict[str, int]:
    trainer = make(comm, options, 2, "untied", sharing=sharing)
    for _ in range(2):
        trainer.step(*arrays(comm.size))
    trainer.update(**HYPER)
    return trainer.engine.arena.segments


@pytest.mark.parametrize("options", [BF16, BF16 | {"grad_dtype": "fp32"}, LORA | {"dtype": "bf16"}], ids=str)
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("sharing", [Sharing(2), Sharing(2, True, offload=True), Sharing(3, offload=True)], ids=str)
def test_every_rank_holds_what_was_predicted(sharing: Sharing, ranks: int, options: dict[str, Any]) -> None:
    lora, settings = Setting(Options(device="cpu", **options).resolved(), 2, 16, 2).engine(MODELS["untied"])
    plan = predict(MODELS["untied"], lora, replace(settings, sharing=sharing), "cpu", ranks=ranks).device
    plan.pop(LIBRARIES)
    found = together(ranks, held, options, sharing) if ranks > 1 else [held(Communicator(), options, sharing)]
    assert found == [plan] * ranks


# ---- the Trainer


def test_a_trainer_offloads() -> None:
    """The option reaches the engine; validation leaves the sums alone."""
    levels: list[dict[str, Any]] = [{"offload": ("grads",)}, {"zero": 2}]
    runs = []
    for more in levels:
        options = Options(device="cpu", dtype="bf16", **more)
        with Trainer(CONFIG, options, batch_size=2, seq_len=16, grad_accum=2) as trainer:
            trainer.init_weights(seed=1)
            inputs, targets = np.random.default_rng(0).integers(0, 61, (2, 2, 16), dtype=np.int32)
            for _ in range(2):
                trainer.step(inputs, targets)
                trainer.validate(inputs, targets)
            runs.append((trainer.gradients(), trainer.update(lr=1e-2), trainer.engine.state.gradients))
    (gradients, told, manager), (expected, expected_told, expected_manager) = runs
    assert type(manager) is type(expected_manager) and told == expected_told
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_unshared_gradients_of_several_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match=r"needs shared gradients, zero = 2 or 3; got zero = 1 and 2 ranks; set zero"):
        Trainer(CONFIG, Options(device="cpu", offload=("grads",)), gpus=2, batch_size=1, seq_len=8)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("grad", ["bf16", "fp32"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_the_bits_on_a_gpu(graphs: bool, grad: str) -> None:
    """Windows of one to three micro-steps, packed and not, under `deterministic`; the sums are pinned, and counted."""
    config = replace(CONFIG, vocab_size=1000, hidden_size=512, intermediate_size=1000, num_hidden_layers=5, head_dim=64)
    common: dict[str, Any] = {
        "dtype": "bf16",
        "grad_dtype": grad,
        "device": "cuda",
        "deterministic": True,
        "graphs": graphs,
    }
    levels: list[dict[str, Any]] = [{"zero": 2}, {"offload": ("grads",)}]
    runs = []
    for more in levels:
        generator, told, gradients = np.random.default_rng(5), [], {}
        with Trainer(config, Options(**common, **more), batch_size=8, seq_len=512, grad_accum=3) as trainer:
            trainer.init_weights(seed=1)
            for update in range(9):
                for _ in range(1 + update % 3):
                    inputs, targets = generator.integers(0, 1000, (2, 8, 512), dtype=np.int32)
                    documents = np.sort(generator.integers(0, 5, (8, 512), dtype=np.int32)) if update % 2 else None
                    trainer.step(inputs, targets, documents)
                gradients = trainer.gradients()
                told.append(trainer.update(lr=1e-3))
            state = trainer.engine.state
            values = {f"{u.name}.{n}": v for u in state.units for n, v in state.values(u).items()}
            block = state.trained["blocks.0"].layout.size * {"bf16": 2, "fp32": 4}[grad]
            assert trainer.allocations()["gradients"]["pinned"] == (5 * block if "offload" in more else 0)
            plan = predict(config, *Setting(trainer.options, 8, 512, 3).engine(config))
            assert {n: kinds["pinned"] for n, kinds in trainer.allocations().items() if kinds["pinned"]} == plan.pinned
            runs.append((told, gradients, values))
    same_bits(runs[1:], runs[:1])
