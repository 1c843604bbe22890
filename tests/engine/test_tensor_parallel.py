"""Models shared out by tensor parallelism, beyond parity: files in and out, other splits, memory, bf16, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fullstride import Options
from fullstride.engine import weights_io
from fullstride.engine.batch import HostBatch
from fullstride.engine.checkpoint import load_checkpoint, save_checkpoint
from fullstride.engine.plan import LIBRARIES, predict
from fullstride.engine.state import Precision, Sharing, State
from fullstride.engine.step import Engine, EngineSettings
from fullstride.errors import ConfigError
from fullstride.model.hf import Checkpoint
from fullstride.model.presets import preset
from fullstride.model.spec import ModelConfig, parameter_table
from fullstride.model.tensor_parallel import shares, split_config
from fullstride.parallel.comm import Communicator
from fullstride.trainer.setting import Setting
from tests.oracle import distance, in_float64, loss_sum, make_model, random_batch
from tests.parity.harness import CONFIG, LORA, MODELS, replicas_agree
from tests.ranks import RankTrainer, together

pytestmark = pytest.mark.xdist_group("ranks")  # one worker has the processes

ROWS, SEQ_LEN = 2, 16
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-5, "weight_decay": 0.1, "grad_clip": 1.0}
# odd vocabulary; parts of the feed-forward width in groups of eight, which share a draw of dropout's noise
LARGER = ModelConfig("qwen3", 997, 128, 256, 3, 4, 2, head_dim=64, tie_word_embeddings=True)
METHODS = {
    "full": {"dtype": "bf16", "master_dtype": "fp32", "v_dtype": "bf16"},
    "lora": {**LORA, "dtype": "fp32"},
}


def make(
    comm: Communicator, tp: int, options: dict[str, Any], model: str = "untied", grad_accum: int = 1, **changed: Any
) -> RankTrainer:
    given = Options(device="cpu", tp=tp, dp=comm.size // tp, **options)
    return RankTrainer(comm, MODELS[model], given, ROWS, SEQ_LEN, grad_accum, **changed)


def arrays(seed: int = 0, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets); a third of the targets ignored."""
    generator = np.random.default_rng(seed)
    inputs, targets = generator.integers(0, 61, (2, rows, SEQ_LEN), dtype=np.int32)
    targets[generator.random(targets.shape) < 0.35] = -100
    return inputs, targets


def values(state: State) -> dict[str, torch.Tensor]:
    return {f"{unit.name}.{n}": v for unit in state.units for n, v in state.values(unit).items()}


# ---- against transformers


def against(comm: Communicator, directory: Path, sequence_parallel: bool) -> Any:
    """(loss, gradients) of two micro-steps in float64."""
    double = torch.float64
    settings = EngineSettings(2, 14, Precision(double, None, double, double), 3, grad_accum=3)
    settings = replace(settings, sequence_parallel=sequence_parallel, tp=comm.size)
    engine = Engine(ModelConfig.from_pretrained(directory), None, settings, torch.device("cpu"), comm)
    weights_io.import_weights(engine, directory)
    for seed in (1, 2):
        engine.micro_step([HostBatch.of(*random_batch(2, 14, seed), None)], z_loss=2**-10)
    found = {}
    for unit in engine.state.units:
        views = engine.state.gradient(unit)
        found |= {p.hf_name: views[s.name][p.start : p.stop].clone() for s in unit.tensors for p in s.parts}
    return engine.tools.stats[0].item(), found


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("family", "tied"), [("qwen2", False), ("qwen3", True)])
def test_loss_and_every_gradient(family: str, tied: bool, sequence_parallel: bool, tmp_path: Path) -> None:
    """Import, loss and gradients are those of transformers' own model, in float64."""
    model = make_model(family, tied, num_key_value_heads=2, intermediate_size=54)
    model.save_pretrained(tmp_path)
    (loss, ours), *others = together(2, against, tmp_path, sequence_parallel)
    oracle = in_float64(model)
    sum(loss_sum(oracle, *random_batch(2, 14, seed), z_loss=2**-10) for seed in (1, 2)).backward()
    plain = sum(loss_sum(oracle, *random_batch(2, 14, seed)) for seed in (1, 2))
    assert loss == pytest.approx(plain.item(), rel=1e-9)  # float64: sums of some hundred terms
    theirs = {name: p.grad for name, p in oracle.named_parameters()}
    for _, gradients in [(loss, ours), *others]:
        assert {
            name: distance(g, theirs[name]) for name, g in gradients.items() if distance(g, theirs[name]) > 1e-9
        } == {}
        assert gradients.keys() == theirs.keys()


# ---- files


def fill(state: State) -> dict[str, torch.Tensor]:
    """Other numbers in every element of what is kept; returns the unsplit buffers."""
    whole = {}
    for i, unit in enumerate(state.trained):
        parts = {}
        for j, (name, part) in enumerate(state.held(unit).items()):
            numbers = torch.randn(part.size, generator=torch.Generator().manual_seed(100 * i + j))
            layout = state.splits[unit].whole_layout
            gaps = torch.ones(part.size, dtype=torch.bool)
            for view in layout.views(gaps).values():
                view.fill_(False)
            numbers = numbers.masked_fill_(gaps, 0).to(part.values.dtype)
            whole[f"{unit}.{name}"] = numbers
            part.values.copy_(numbers[part.first : part.first + part.values.numel()])
            parts[name] = part
        state.restore(unit, parts)
    return whole


def save(comm: Communicator, tp: int, zero: int, method: str, directory: Path, background: bool) -> None:
    trainer = make(comm, tp, METHODS[method], sharing=Sharing(zero))
    fill(trainer.engine.state)
    saving = save_checkpoint(trainer.engine, directory, 3, {"from": tp}, background)
    if saving is not None:
        saving.finish()


def load(comm: Communicator, tp: int, zero: int, method: str, directory: Path) -> None:
    trainer, other = make(comm, tp, METHODS[method], sharing=Sharing(zero)), make(Communicator(), 1, METHODS[method])
    expected, state = fill(other.engine.state), trainer.engine.state
    load_checkpoint(trainer.engine, directory)
    for unit in state.trained:
        for name, part in state.share(unit).items():
            wanted = expected[f"{unit}.{name}"][part.first : part.first + part.values.numel()]
            assert torch.equal(part.values, wanted), (unit, name)
    whole = values(other.engine.state)
    for name, value in values(state).items():  # where weights are whole, or are gathered
        if name.split(".")[0] != "head" or method == "full":
            assert torch.equal(value, whole[name]) or (method == "lora" and "adapter" not in name), name


@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_checkpoints_are_those_of_the_unsplit_model(method: str, tmp_path: Path) -> None:
    """Written with one split, read with every other."""
    splits = [(1, 1, 0), (2, 2, 1), (2, 1, 3), (4, 2, 3)]
    for number, (ranks, tp, zero) in enumerate(splits):
        together(ranks, save, tp, zero, method, tmp_path / f"{number}", number % 2 == 1)
    for number in range(len(splits)):
        for ranks, tp, zero in splits:
            together(ranks, load, tp, zero, method, tmp_path / f"{number}")


def write(comm: Communicator, tp: int, method: str, directory: Path, model: str) -> None:
    trainer = make(comm, tp, METHODS[method], model)
    weights_io.init_weights(trainer.engine, 5)
    if method == "lora":
        weights_io.init_adapters(trainer.engine, 6)
        weights_io.export_adapter(trainer.engine, directory / "adapter", None, False)
    weights_io.export_model(trainer.engine, directory / "model", torch.float32, None, False)


def read_and_write(comm: Communicator, tp: int, source: Path, directory: Path, model: str) -> list[tuple[str, int]]:
    """What this rank read: tensors and their elements."""
    trainer, read, get = make(comm, tp, METHODS["lora"], model), [], Checkpoint.get

    def counted(self: Checkpoint, name: str, part: Any = None) -> torch.Tensor:
        tensor = get(self, name, part)
        read.append((name, tensor.numel()))
        return tensor

    Checkpoint.get = counted  # type: ignore[method-assign]
    try:
        weights_io.import_weights(trainer.engine, source / "model")
    finally:
        Checkpoint.get = get  # type: ignore[method-assign]
    weights_io.import_adapter(trainer.engine, source / "adapter")
    weights_io.export_model(trainer.engine, directory / "model", torch.float32, None, False)
    weights_io.export_adapter(trainer.engine, directory / "adapter", None, False)
    return read


def files(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in directory.rglob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("model", MODELS)
def test_one_model_and_one_adapter_in_and_out(model: str, tmp_path: Path) -> None:
    """The same start for any split; a rank reads its slices; what comes out is what went in, to the bit."""
    write(Communicator(), 1, "lora", tmp_path / "one", model)
    together(4, write, 2, "lora", tmp_path / "four", model)
    expected = files(tmp_path / "one")
    read = together(4, read_and_write, 2, tmp_path / "one", tmp_path / "back", model)
    for other in ("four", "back"):
        found = files(tmp_path / other)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    split = {s.parts[0].hf_name: s.split for unit in parameter_table(MODELS[model]) for s in unit.tensors}
    for name, count in (item for rank in read for item in rank):
        whole, is_whole = expected[name].numel(), split.get(name, 0) is None
        rows = -(-expected[name].shape[0] // 2) * whole // expected[name].shape[0]  # of an odd vocabulary
        assert count == whole if is_whole else count <= rows, name


# ---- memory


def held(comm: Communicator, options: dict[str, Any], tp: int, changed: dict[str, Any]) -> dict[str, int]:
    trainer = make(comm, tp, options, grad_accum=2, **changed)
    for step in range(2):
        trainer.step(*arrays(step, ROWS * comm.size // tp))
    trainer.update(**HYPER)
    return trainer.engine.arena.segments


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"dtype": "bf16"}, {**LORA, "dtype": "fp32", "lora_dropout": 0.1}, {**LORA, "lora_targets": ("o_proj",)}],
    ids=["full", "lora", "lora o"],
)
def test_every_rank_holds_what_was_predicted(options: dict[str, Any], sequence_parallel: bool) -> None:
    changed = {"sharing": Sharing(1), "sequence_parallel": sequence_parallel}
    found = together(4, held, options, 2, changed)
    resolved = Options(device="cpu", tp=2, **options).resolved()
    lora, settings = Setting(resolved, ROWS, SEQ_LEN, 2).engine(MODELS["untied"])
    plan = predict(MODELS["untied"], lora, replace(settings, **changed), "cpu", ranks=4).device
    del plan[LIBRARIES]
    assert all(segments == plan for segments in found)


# ---- bf16, and ranks with little to do


def train(comm: Communicator, tp: int, options: dict[str, Any], targets: Any, changed: dict[str, Any]) -> Any:
    """(losses, values) of three updates of two micro-steps and an evaluation."""
    trainer, losses = make(comm, tp, options, "tied", 2, **changed), []
    weights_io.init_weights(trainer.engine, 1)
    rows = ROWS * comm.size // tp
    for update in range(3):
        for micro_step in range(2):
            inputs, drawn = arrays(2 * update + micro_step, rows)
            trainer.step(inputs, drawn if targets is None else np.full_like(drawn, targets))
        losses.append(trainer.update(**HYPER)["loss"])
        losses.append(trainer.validate(*arrays(10, rows))["loss"])
    replicas_agree(trainer.engine)
    return losses, values(trainer.engine.state)


BF16 = {"dtype": "bf16", "master_dtype": "bf16", "m_dtype": "bf16", "v_dtype": "bf16"}


FULL, LORA4 = {}, {"method": "lora", "lora_rank": 4}
SHARINGS = [Sharing(1), Sharing(2, True, send_by_copy=True), Sharing(3), Sharing(3, offload=True)]
PAIRED = [(SHARINGS[1], LORA4), (SHARINGS[2], FULL)]  # the others are slow tests
PAIRS = [(s, m) for s in SHARINGS for m in (FULL, LORA4) if (s, m) not in PAIRED]


@pytest.mark.parametrize(
    ("sharing", "method"), [*PAIRED, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS)], ids=str
)
def test_replicas_agree_in_bf16(sharing: Sharing, method: dict[str, Any]) -> None:
    """Stochastic rounding, of what all have whole, is the same on every rank (asserted there); the losses are those of
    one process to the rounding of bf16, 2**-9, and a few of them."""
    (losses, found), *others = together(4, train, 2, BF16 | method, None, {"sharing": sharing})
    for other_losses, other in others:
        assert other_losses == losses and all(torch.equal(other[name], found[name]) for name in found)
    expected, _ = train_alone(method)
    assert losses == pytest.approx(expected, rel=5e-3)


def train_alone(method: dict[str, Any]) -> Any:
    """Both ranks' rows in one process."""
    options = Options(device="cpu", **BF16, **method)
    trainer, losses = RankTrainer(Communicator(), CONFIG, options, 2 * ROWS, SEQ_LEN, 2), []
    weights_io.init_weights(trainer.engine, 1)
    for update in range(3):
        for micro_step in range(2):
            trainer.step(*arrays(2 * update + micro_step, 2 * ROWS))
        losses.append(trainer.update(**HYPER)["loss"])
        losses.append(trainer.validate(*arrays(10, 2 * ROWS))["loss"])
    return losses, values(trainer.engine.state)


def test_offloaded_sums_give_the_same_bits() -> None:
    """What is completed over ranks is put back where it lives."""
    both = [
        together(4, train, 2, LORA | {"dtype": "fp32"}, None, {"sharing": Sharing(2, offload=offload)})[0]
        for offload in (False, True)
    ]
    assert both[0][0] == both[1][0] and all(torch.equal(both[0][1][n], both[1][1][n]) for n in both[0][1])


@pytest.mark.parametrize("target", [3, 60])
def test_a_part_of_the_vocabulary_without_targets(target: int) -> None:
    """One token is all that is ever to be predicted: the other rank's logits still count in every sum."""
    fp32 = {"dtype": "fp32"}
    losses, found = together(2, train, 2, fp32, target, {})[0]
    expected, weights = train(Communicator(), 1, fp32, target, {})
    assert losses == pytest.approx(expected, rel=1e-5)  # float32: the same sums in another order
    assert max(distance(found[name], weights[name]) for name in weights) < 1e-5


def noise(comm: Communicator, tp: int) -> list[torch.Tensor]:
    """What one update without a gradient makes of equal weights that decay: only noise tells elements apart."""
    trainer = make(comm, tp, BF16, "untied")
    for unit in trainer.engine.state.trained.values():
        unit.param.fill_(1.0)
    trainer.engine.tools.stats[3] = 1.0
    trainer.engine.optimizer.load((1, 1, 0), 1.0, step=1, lr=1e-3, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=1.0)
    trainer.engine._update_piece()
    return [unit.param.clone() for unit in trainer.engine.state.trained.values()]


def test_shares_are_rounded_by_noise_of_their_own() -> None:
    """Elements at one place of two ranks' buffers are other elements of the model, unless every rank has them."""
    first, second = together(2, noise, 2)
    embedding, other = first[0], second[0]
    same = (embedding == other).double().mean()
    # two values, 1 and the bf16 below, in shares of 3 : 1 (1e-3 of a step of 2**-8): by chance 5 of 8 agree
    assert 0.5 < same < 0.75


# ---- refusals and sizes


@pytest.mark.parametrize(
    ("changes", "tp", "told"),
    [
        ({}, 3, "tp 3 must divide .*num_attention_heads 4, num_key_value_heads 2 .*intermediate_size 56.*set tp to 2"),
        ({}, 4, "num_key_value_heads 2 .*set tp to 2"),  # not replicated
        ({"num_key_value_heads": 4, "intermediate_size": 58}, 4, "intermediate_size 58.*set tp to 2"),
        ({"num_key_value_heads": 4, "vocab_size": 5}, 4, "part of the vocabulary 5; set tp to 2"),
        ({"num_key_value_heads": 1}, 2, "set tp to 1"),
    ],
)
def test_what_tp_does_not_divide(changes: dict[str, Any], tp: int, told: str) -> None:
    config, lora_and_settings = replace(CONFIG, **changes), Setting(Options(device="cpu", tp=tp).resolved(), 1, 8, 1)
    with pytest.raises(ConfigError, match=told):
        Engine(config, *lora_and_settings.engine(config), torch.device("meta"), Communicator(0, tp))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_shares_cover_every_tensor_once(size: int) -> None:
    """Of a large model, without its weights: every element of every checkpoint tensor is on one rank, or on all."""
    config = preset("qwen3-4b")
    whole, own = parameter_table(config), parameter_table(split_config(config, size))
    for mine, its in zip(own[:2] + own[-1:], whole[:2] + whole[-1:], strict=True):
        for spec, total in zip(mine.tensors, its.tensors, strict=True):
            seen = torch.zeros(total.shape, dtype=torch.uint8)
            for rank in range(size):
                filled = torch.zeros(spec.shape, dtype=torch.uint8)
                for share in shares(spec, total, rank):
                    seen[share.whole] += 1
                    filled[share.own] += 1
                assert filled.min() == filled.max() == 1
            assert seen.min() == seen.max() == (size if spec.split is None else 1), spec.name


def test_rows_that_tp_does_not_divide_stay_whole() -> None:
    config, setting = MODELS["tied"], Setting(Options(device="cpu", tp=2).resolved(), 1, 9, 1)
    for seq_len, shared in ((9, False), (10, True)):
        setting = replace(setting, seq_len=seq_len)
        engine = Engine(config, *setting.engine(config), torch.device("meta"), Communicator(0, 2))
        assert engine.tools.tp.sequence == shared
        kept = engine.stages[0].slots[0].saved[0]
        assert len(kept["x"]) == (5 if shared else 9) and len(kept["qkv"]) == seq_len
