"""The Trainer: its arithmetic on small cases with known answers, and what it refuses."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fullstride import ConfigError, ModelConfig, Options, Trainer
from fullstride.trainer.telemetry import FIELDS

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=31,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.2,
)


def make(rows: int = 1, seq_len: int = 6, accumulation: int = 1, config: ModelConfig = CONFIG, **options) -> Trainer:
    trainer = Trainer(
        config,
        Options(**{"device": "cpu", "dtype": "fp32", **options}),
        batch_size=rows,
        seq_len=seq_len,
        grad_accum=accumulation,
    )
    trainer.init_weights(seed=5)
    return trainer


def batch(rows: int, seq_len: int, supervised: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Row i has supervised[i] labels, at its end."""
    generator = np.random.default_rng(seed)
    inputs = generator.integers(0, CONFIG.vocab_size, (rows, seq_len), dtype=np.int32)
    targets = generator.integers(0, CONFIG.vocab_size, (rows, seq_len), dtype=np.int32)
    for row, count in enumerate(supervised):
        targets[row, : seq_len - count] = -100
    return inputs, targets


def weights(trainer: Trainer) -> torch.Tensor:
    state = trainer.engine.state
    return torch.cat([state.tensor(u, t).flatten() for u in state.units for t in u.tensors])


# ---- the loss


def with_head(trainer: Trainer, logits: torch.Tensor) -> None:
    """Make the model answer token t with logits[t], whatever comes before: zero blocks, identity embedding."""
    state = trainer.engine.state
    for unit in state.base:
        for spec in unit.tensors:
            tensor = state.tensor(unit, spec)
            tensor.zero_() if tensor.dim() == 2 else tensor.fill_(1.0)
    width = CONFIG.hidden_size
    state.views["embedding"]["embedding"][:width] = torch.eye(width)
    # the final norm turns a unit vector into that many times it
    length = (1 / width + CONFIG.rms_norm_eps) ** -0.5
    state.views["head"]["lm_head"].copy_(logits.t() / length)


def known_losses(values: list[float]) -> torch.Tensor:
    """Logits [width, V] such that input token i has loss values[i] on target 0: two classes share the mass."""
    logits = torch.full((CONFIG.hidden_size, CONFIG.vocab_size), -1e4)
    logits[:, 1] = 0.0
    for token, loss in enumerate(values):
        p = torch.tensor(-loss, dtype=torch.float64).exp()
        logits[token, 0] = torch.log(p / (1 - p)).float()
    return logits


@pytest.mark.parametrize("accumulation", [1, 2])
def test_loss_is_the_mean_over_supervised_tokens_not_of_means(accumulation: int) -> None:
    """Rows of 1 and 3 supervised tokens with losses 4 | 1, 1, 1: 7/4, not 2.5."""
    trainer = make(rows=2 // accumulation, seq_len=4, accumulation=accumulation)
    with_head(trainer, known_losses([4.0, 1.0]))
    inputs = np.array([[0, 2, 2, 2], [1, 1, 1, 2]], dtype=np.int32)
    targets = np.array([[0, -100, -100, -100], [0, 0, 0, -100]], dtype=np.int32)
    for part in np.split(np.arange(2), accumulation):
        trainer.step(inputs[part], targets[part])
    told = trainer.update(lr=0.0)
    assert told["loss"] == pytest.approx(1.75, abs=1e-5)
    assert told["tokens"] == 4


def test_a_perfect_model_has_loss_zero() -> None:
    """Targets come shifted and are not shifted again: a model that answers token t with t + 1 is perfect."""
    trainer = make(seq_len=8)
    logits = torch.full((CONFIG.hidden_size, CONFIG.vocab_size), -100.0)
    logits[torch.arange(10), torch.arange(10) + 1] = 100.0
    with_head(trainer, logits)
    tokens = np.arange(9, dtype=np.int32)[None]
    assert trainer.validate(tokens[:, :-1].copy(), tokens[:, 1:].copy())["loss"] == pytest.approx(0, abs=1e-6)


def test_batch_and_accumulation_are_the_same() -> None:
    """Unequal completions: batch 4 x accumulation 1 and batch 1 x accumulation 4 give the same weights."""
    inputs, targets = batch(4, 6, [1, 5, 2, 3])
    whole, parts = make(rows=4), make(rows=1, accumulation=4)
    whole.step(inputs, targets)
    for row in range(4):
        parts.step(inputs[row : row + 1], targets[row : row + 1])
    # eps: without one the first AdamW update is the gradient's sign, which rounding can turn
    told = [trainer.update(lr=1e-2, eps=1e-4, weight_decay=0.1, grad_clip=1.0) for trainer in (whole, parts)]
    assert told[0]["loss"] == pytest.approx(told[1]["loss"], rel=1e-6)
    assert (weights(whole) - weights(parts)).abs().max() < 1e-6


def test_a_short_last_window_counts_what_is_there() -> None:
    """Five equal micro-batches, accumulation 2: three updates with equal loss and equal gradient norm."""
    trainer = make(accumulation=2)
    inputs, targets = batch(1, 6, [4])
    told = []
    for window in (2, 2, 1):
        for _ in range(window):
            trainer.step(inputs, targets)
        told.append(trainer.update(lr=0.0))
    assert told[0]["loss"] == pytest.approx(told[2]["loss"], rel=1e-6)
    assert told[0]["grad_norm"] == pytest.approx(told[2]["grad_norm"], rel=1e-6)


def test_clip_is_by_the_global_norm() -> None:
    """The whole gradient is scaled by clip / norm: with SGD-like updates, clip 1 against none differ by that factor."""
    inputs, targets = batch(2, 6, [4, 2])
    moves = []
    for clip in (0.0, 0.25):
        trainer = make(rows=2)
        before = weights(trainer).clone()
        trainer.step(inputs, targets)
        norm = trainer.update(lr=1.0, beta1=0.0, beta2=0.0, eps=1e4, grad_clip=clip)["grad_norm"]
        moves.append(weights(trainer) - before)
    assert norm > 0.25
    # eps >> sqrt(v): the move is -lr * g / eps; float32 weights of size 0.2 resolve moves of 1e-5 to about 1e-3
    assert moves[1].norm() / moves[0].norm() == pytest.approx(0.25 / norm, rel=2e-2)


def test_z_loss_moves_the_gradient_but_not_the_reported_loss() -> None:
    inputs, targets = batch(1, 6, [4])
    told = []
    for z_loss in (0.0, 1.0):
        trainer = make()
        trainer.step(inputs, targets, z_loss=z_loss)
        told.append(trainer.update(lr=0.0))
    assert told[0]["loss"] == told[1]["loss"]
    assert abs(told[0]["grad_norm"] - told[1]["grad_norm"]) > 0.1


def test_statistics_of_the_logits_and_of_the_first_positions() -> None:
    trainer = make(rows=1, seq_len=1100)
    inputs, targets = batch(1, 1100, [1100])
    trainer.step(inputs, targets)
    told = trainer.update(lr=0.0)
    first = trainer.validate(inputs, np.where(np.arange(1100) < 1024, targets, -100).astype(np.int32))
    assert told["loss_1k"] == pytest.approx(first["loss"], rel=1e-6)
    assert first["tokens"] == 1024


def test_log_sum_exps_are_over_supervised_tokens() -> None:
    """A model of known logits: class 1 has 0 and class 0 log(p / (1 - p)), so lse = -log(1 - p)."""
    trainer = make(rows=1, seq_len=4)
    with_head(trainer, known_losses([4.0, 1.0]))
    inputs, targets = np.array([[0, 1, 1, 2]], dtype=np.int32), np.array([[0, 0, -100, -100]], dtype=np.int32)
    trainer.step(inputs, targets)
    told = trainer.update(lr=0.0)
    lse = [-np.log(1 - np.exp(-loss)) for loss in (4.0, 1.0)]
    assert told["lse_max"] == pytest.approx(max(lse), abs=1e-5)
    assert told["lse_mean"] == pytest.approx(np.mean(lse), abs=1e-5)


# ---- documents


def test_documents_do_not_see_each_other() -> None:
    """A (3 tokens) and B (2) in one row: A's tokens do not change B's loss, and both losses are as alone."""
    trainer = make(seq_len=5)
    documents = np.array([[0, 0, 0, 1, 1]], dtype=np.int32)
    targets_b = np.array([[-100, -100, -100, 7, -100]], dtype=np.int32)
    a, other_a, b = [3, 4, 5], [8, 9, 10], [11, 12]
    losses = [
        trainer.validate(np.array([start + b], dtype=np.int32), targets_b, documents)["loss"] for start in (a, other_a)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    alone = make(seq_len=2).validate(np.array([b], dtype=np.int32), targets_b[:, 3:].copy())
    assert losses[0] == pytest.approx(alone["loss"], abs=1e-6)
    # positions alone do not isolate: without documents B's loss depends on A
    mixed = [trainer.validate(np.array([start + b], dtype=np.int32), targets_b)["loss"] for start in (a, other_a)]
    assert abs(mixed[0] - mixed[1]) > 1e-4


def test_positions_restart_in_every_document() -> None:
    from fullstride.engine.batch import HostBatch

    documents = np.array([[0, 0, 0, 1, 1], [4, 4, 4, 4, 4]], dtype=np.int32)
    host = HostBatch.of(np.zeros((2, 5), np.int32), np.full((2, 5), -100, np.int32), documents)
    assert host.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 4]
    assert host.boundaries.tolist() == [0, 3, 5, 10]
    assert host.packed and host.most == 3


def test_ranks_with_other_documents_have_the_same_shapes() -> None:
    """What chooses a CUDA graph is the same on all ranks: collectives are inside."""
    from fullstride.engine.batch import DeviceBatch, HostBatch
    from fullstride.memory.arena import Arena

    device = DeviceBatch(Arena(torch.device("cpu")), 2, 50, 1, torch.float32)
    shapes = set()
    for starts in (range(0, 50, 5), [0], [0, 30]):
        numbers = np.searchsorted(starts, np.arange(50), side="right").astype(np.int32)
        host = HostBatch.of(*(np.zeros((2, 50), np.int32) for _ in range(2)), np.stack([numbers, numbers]), most=20)
        device.load(host, (0, 0, 0, 0), 0.0)
        assert host.packed and len(host.boundaries) == 2 * len(starts) + 1
        shapes.add((device.documents.packed, len(device.documents.boundaries)))
    assert shapes == {(True, 33)}  # places grow by fours: 8, 32
    numbers = np.zeros((4, 6), np.int32)
    numbers[3] = range(6)  # of the second rank
    with Trainer(CONFIG, Options(device="cpu", dtype="fp32"), gpus=2, batch_size=2, seq_len=6) as trainer:
        trainer.init_weights()
        assert [trainer._batch(numbers, numbers, d).most_documents for d in (None, numbers)] == [0, 7]


@pytest.mark.parametrize("call", ["init_weights", "import_weights", "load_checkpoint"])
def test_other_weights_forget_the_gradients(call: str, tmp_path: Path) -> None:
    trainer = make(rows=2, seq_len=6)
    trainer.export_model(tmp_path / "model")
    trainer.save_checkpoint(tmp_path / "run", 1)
    inputs, targets = batch(2, 6, [2, 2])
    trainer.step(inputs, targets)
    {
        "init_weights": trainer.init_weights,
        "import_weights": lambda: trainer.import_weights(tmp_path / "model"),
        "load_checkpoint": lambda: trainer.load_checkpoint(tmp_path / "run"),
    }[call]()
    with pytest.raises(ConfigError, match="update needs at least one step"):
        trainer.update(lr=1e-3)
    trainer.step(inputs, np.full_like(targets, -100))
    with pytest.raises(ConfigError, match="no supervised token"):
        trainer.update(lr=1e-3)


def test_packed_loss_equals_unpacked() -> None:
    inputs, targets = batch(2, 3, [2, 2])
    unpacked = make(rows=2, seq_len=3).validate(inputs, targets)
    documents = np.array([[0, 0, 0, 1, 1, 1]], dtype=np.int32)
    packed = make(rows=1, seq_len=6).validate(inputs.reshape(1, 6), targets.reshape(1, 6), documents)
    assert packed["loss"] == pytest.approx(unpacked["loss"], rel=1e-6)


# ---- validate, gradients, memory


def test_validate_between_step_and_update_changes_nothing() -> None:
    inputs, targets = batch(1, 6, [4])
    told = []
    for validates in (False, True):
        trainer = make(accumulation=2)
        trainer.step(inputs, targets)
        if validates:
            trainer.validate(*batch(1, 6, [6], seed=9))
        trainer.step(inputs, targets)
        told.append((trainer.update(lr=1e-2), weights(trainer)))
    assert told[0][0] == told[1][0]
    assert torch.equal(told[0][1], told[1][1])


def test_discarded_micro_steps_leave_no_trace() -> None:
    a, b = make(method="lora", lora_rank=2, lora_dropout=0.5), make(method="lora", lora_rank=2, lora_dropout=0.5)
    a.step(*batch(1, 6, [4], seed=9))
    a.discard()
    told = []
    for trainer in (a, b):
        trainer.step(*batch(1, 6, [4]))
        told.append(trainer.update(lr=1e-2))
    assert told[0] == told[1] and torch.equal(weights(a), weights(b))


@pytest.mark.parametrize("tied", [False, True])
def test_a_micro_step_without_supervised_tokens_is_legal(tied: bool) -> None:
    inputs, targets = batch(1, 6, [4])
    nothing = np.full_like(targets, -100)
    config = ModelConfig(**{**vars(CONFIG), "tie_word_embeddings": tied})
    a, b = make(accumulation=2, config=config), make(accumulation=2, config=config)
    for trainer in (a, b):  # an update before, so that there are old gradients to overwrite
        trainer.step(*batch(1, 6, [6], seed=3))
        trainer.update(lr=1e-2)
    a.step(inputs, targets)
    b.step(inputs, nothing)  # first: what it should overwrite must still become zero
    b.step(inputs, targets)
    assert a.update(lr=1e-2) == b.update(lr=1e-2)
    assert torch.equal(weights(a), weights(b))


def test_gradients_by_hugging_face_name() -> None:
    trainer = make()
    trainer.step(*batch(1, 6, [4]))
    gradients = trainer.gradients(0)
    assert gradients["model.layers.1.self_attn.k_proj.weight"].shape == (16, 24)
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm().item() / 4
    assert trainer.update(lr=0.0)["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_lora_trains_the_adapters_alone() -> None:
    trainer = make(method="lora", lora_rank=2)
    base = {u.name: [trainer.engine.state.tensor(u, t).clone() for t in u.tensors] for u in trainer.engine.state.base}
    trainer.step(*batch(1, 6, [4]))
    assert all("lora_" in name for name in trainer.gradients())
    trainer.update(lr=1e-2)
    for unit in trainer.engine.state.base:
        for before, spec in zip(base[unit.name], unit.tensors, strict=True):
            assert torch.equal(before, trainer.engine.state.tensor(unit, spec))
    assert set(trainer.allocations(0)) >= {"weights", "adapters", "gradients", "moments", "activations"}
    trainable, total = trainer.num_parameters
    assert trainable == sum(t.numel for u in trainer.engine.state.adapters for t in u.tensors) < total


def test_bf16_states_round_stochastically_and_reproducibly() -> None:
    """50 small updates in bf16 without a master follow float32; rounding to nearest would not move at all."""
    inputs, targets = batch(4, 6, [6, 6, 6, 6])
    losses = {}
    for name, options in {"bf16": {"dtype": "bf16", "m_dtype": "bf16", "v_dtype": "bf16"}, "fp32": {}}.items():
        trainer = make(rows=4, **options)
        for _ in range(50):
            trainer.step(inputs, targets)
            losses[name] = trainer.update(lr=2e-3)["loss"]
    start = make(rows=4).validate(inputs, targets)["loss"]
    assert losses["fp32"] < start - 1
    # the same fall within a tenth of it: 50 rounded updates are a random walk around float32's
    assert abs(losses["bf16"] - losses["fp32"]) < 0.1 * (start - losses["fp32"])


def test_same_seed_same_bits() -> None:
    runs = []
    for _ in range(2):
        trainer = make(method="lora", lora_dropout=0.5, lora_rank=2, accumulation=2)
        for seed in range(3):
            trainer.step(*batch(1, 6, [4], seed))
            runs.append((trainer.update(lr=1e-2), weights(trainer)))
    half = len(runs) // 2
    for (told_a, weights_a), (told_b, weights_b) in zip(runs[:half], runs[half:], strict=True):
        assert told_a == told_b and torch.equal(weights_a, weights_b)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_spoilt_parameters_are_seen(method: str) -> None:
    trainer = make(method=method)
    assert trainer.parameters_finite()
    next(iter(trainer.engine.state.trained.values())).param[3] = float("nan")
    assert not trainer.parameters_finite()


def test_queries() -> None:
    trainer = make()
    assert trainer.gpu_info() == [dict.fromkeys(FIELDS)]
    trainer.step(*batch(1, 6, [4]))
    assert trainer.stack_info(0)["logits"] == 2 * 31 * 4  # a quarter of six rows, rounded up
    allocations = trainer.allocations(0)
    assert allocations["weights"]["pageable"] >= trainer.num_parameters[1] * 4
    assert (trainer.world_size, trainer.batch_size, trainer.seq_len) == (1, 1, 6)


def test_peak_memory_where_the_kernel_does_not_reset_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError

    trainer = make()
    monkeypatch.setattr(Path, "write_text", refuse)
    assert trainer.peak_memory() > 2**20


PEAKS = """
import numpy as np
import torch
from fullstride.trainer.telemetry import PeakMemory

peak_memory = PeakMemory(torch.device("cpu"))
print(peak_memory())
gib = np.ones(2**27, dtype=np.float64)
del gib
print(peak_memory(), peak_memory())
"""


def test_peak_memory_sees_what_was_allocated_and_freed() -> None:
    # a process of its own: the peak belongs to the whole process, and the kernel may refuse to reset it in some
    result = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True, timeout=120)
    before, during, after = map(int, result.stdout.split())
    assert during > before + 0.9 * 2**30
    assert after < before + 0.5 * 2**30  # the peak since the last question


# ---- export


def test_weights_round_trip_and_tied_export_in_shards(tmp_path: Path) -> None:
    trainer = make()
    trainer.export_model(tmp_path / "model")
    inputs, targets = batch(1, 6, [4])
    with Trainer.from_pretrained(
        tmp_path / "model", Options(dtype="fp32", device="cpu"), batch_size=1, seq_len=6
    ) as other:
        assert torch.equal(weights(trainer), weights(other))
        assert other.validate(inputs, targets) == trainer.validate(inputs, targets)


# ---- what is refused, and that the trainer is usable after it


def test_misuse_is_named_and_harmless() -> None:
    trainer = make(accumulation=1)
    inputs, targets = batch(1, 6, [4])
    with pytest.raises(ConfigError, match="update needs at least one step"):
        trainer.update(lr=1.0)
    with pytest.raises(ConfigError, match="gradients exist between step and update"):
        trainer.gradients()
    with pytest.raises(ConfigError, match=r"int32 \[1, 6\] .* got int64 \[1, 6\]"):
        trainer.step(inputs.astype(np.int64), targets)
    with pytest.raises(ConfigError, match=r"got int32 \[1, 5\]"):
        trainer.step(inputs[:, :5], targets)
    with pytest.raises(ConfigError, match=r"inputs\[0, 2\] is 31: .* 31 rows"):
        trainer.step(np.where(np.arange(6) == 2, 31, inputs).astype(np.int32), targets)
    with pytest.raises(ConfigError, match=r"targets\[0, 0\] is -1"):
        trainer.step(inputs, np.where(np.arange(6) == 0, -1, targets).astype(np.int32))
    with pytest.raises(ConfigError, match="rank must be below world_size 1, got 3"):
        trainer.allocations(3)
    trainer.step(torch.from_numpy(inputs), torch.from_numpy(targets))
    with pytest.raises(ConfigError, match="call update before the next step"):
        trainer.step(inputs, targets)
    with pytest.raises(ConfigError, match="between step and update"):
        trainer.save_checkpoint("nowhere", 1)
    told = trainer.update(lr=0.0)
    fresh = make()
    fresh.step(inputs, targets)
    assert told == fresh.update(lr=0.0)


def test_no_supervised_token_at_all() -> None:
    trainer = make()
    trainer.step(*batch(1, 6, [0]))
    with pytest.raises(ConfigError, match=r"no supervised token since the last update .* call discard"):
        trainer.update(lr=1.0)
    trainer.discard()
    trainer.step(*batch(1, 6, [4]))
    assert trainer.update(lr=1.0)["tokens"] == 4


@pytest.mark.parametrize(
    "values",
    [
        {"eps": 0.0},
        {"lr": float("nan")},
        {"lr": -1.0},
        {"lr": 1e40},
        {"step": 2**63},
        {"beta1": 1.0},
        {"grad_clip": -1.0},
        {"weight_decay": float("inf")},
    ],
    ids=str,
)
def test_values_that_would_spoil_the_weights(values: dict) -> None:
    trainer = make()
    trainer.step(*batch(1, 6, [4]))
    before = weights(trainer).clone()
    with pytest.raises(ConfigError, match=f"{next(iter(values))} must"):
        trainer.update(**{"lr": 1e-3, **values})
    assert torch.equal(weights(trainer), before)


def test_arrays_of_other_kinds() -> None:
    """Subclasses that hold the same numbers are taken; what would lose its meaning as plain numbers is refused."""
    inputs, targets = batch(1, 6, [4])
    plain, trainer = make(), make()
    plain.step(inputs, targets)
    trainer.step(inputs.view(np.memmap), targets.view(np.recarray))
    assert trainer.update(lr=0.0) == plain.update(lr=0.0)
    for array in (np.ma.masked_array(inputs), torch.from_numpy(inputs).to_sparse()):
        with pytest.raises(ConfigError, match=r"inputs must be .*got .*(MaskedArray|sparse_coo)"):
            trainer.step(array, targets)


def test_arguments_of_the_wrong_kind_are_named(tmp_path: Path) -> None:
    trainer = make()
    inputs, targets = batch(1, 6, [4])
    with pytest.raises(ConfigError, match=r"z_loss must lie in \[0, 1000000.0\], got 1e\+37"):
        trainer.step(inputs, targets, z_loss=1e37)
    with pytest.raises(ConfigError, match=r"z_loss must be a number, got 'a'"):
        trainer.step(inputs, targets, z_loss="a")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"z_loss must lie in"):
        trainer.step(inputs, targets, z_loss=-1.0)
    with pytest.raises(ConfigError, match=r"got bfloat16 \[1, 6\]"):
        trainer.step(torch.from_numpy(inputs).bfloat16(), targets)
    with pytest.raises(ConfigError, match=r"got list"):
        trainer.step([[1]], targets)  # type: ignore[arg-type]
    trainer.step(inputs, targets)
    for value in ("x", None):
        with pytest.raises(ConfigError, match="lr must be a number"):
            trainer.update(lr=value)  # type: ignore[arg-type]
    for step in (0, -1, 1.5):
        with pytest.raises(ConfigError, match="step must be a positive integer"):
            trainer.update(lr=0.0, step=step)  # type: ignore[arg-type]
    trainer.update(lr=0.0)
    with pytest.raises(ConfigError, match=r"dtype must be one of fp32, bf16, got 'fp16'"):
        trainer.export_model(tmp_path / "model", dtype="fp16")
    with pytest.raises(ConfigError, match="step must be an integer of at least 0 below"):
        trainer.save_checkpoint(tmp_path, -1)
    for config, options in (("path", None), (CONFIG, {})):
        with pytest.raises(ConfigError, match=r"takes a ModelConfig and Options"):
            Trainer(config, options, batch_size=1, seq_len=4)  # type: ignore[arg-type]
    assert make(rows=np.int64(2)).batch_size == 2  # type: ignore[arg-type]


def test_a_full_disk_is_an_oserror_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("fullstride.files.save_file", full)
    with pytest.raises(OSError, match=r"safetensors: I/O error: No space left"):
        make(method="lora").export_adapter(tmp_path / "adapter")
    assert not list(tmp_path.iterdir())


def test_a_trainer_without_weights_does_not_train() -> None:
    for method in ("full", "lora"):
        trainer = Trainer(CONFIG, Options(device="cpu", method=method), batch_size=1, seq_len=6)
        for call in (trainer.step, trainer.validate):
            with pytest.raises(ConfigError, match="no weights yet; call import_weights or init_weights"):
                call(*batch(1, 6, [4]))


@pytest.mark.parametrize("place", ["_backward_piece", "_update_piece"])
def test_interrupted_in_a_call(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-step's or an update's first half is done: going on would count its gradients twice."""
    trainer = make()
    inputs, targets = batch(1, 6, [3])

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    target = trainer.engine.stages[0] if place == "_backward_piece" else trainer.engine
    monkeypatch.setattr(target, place, interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.step(inputs, targets)
        trainer.update(lr=1e-3)
    with pytest.raises(ConfigError, match="the trainer is stopped; make a new one"):
        trainer.step(inputs, targets)


def test_stopped_trainer() -> None:
    with make() as trainer:
        pass
    trainer.stop()
    with pytest.raises(ConfigError, match="the trainer is stopped"):
        trainer.step(*batch(1, 6, [4]))


# ---- precision


def test_export_in_float32_has_the_masters_digits(tmp_path: Path) -> None:
    trainer = make(dtype="bf16", master_dtype="fp32")
    trainer.step(*batch(1, 6, [4]))
    trainer.update(lr=1e-3)
    trainer.export_model(tmp_path / "model", dtype="fp32")
    norm = load_file(tmp_path / "model" / "model.safetensors")["model.norm.weight"]
    head = trainer.engine.state.trained["head"]
    assert head.master is not None
    assert torch.equal(norm, head.layout.views(head.master)["final_norm"])
    assert not torch.equal(norm, norm.bfloat16().float())


@pytest.mark.parametrize("options", [{}, {"method": "lora"}, {"zero": 3}, {"offload": ("grads",)}], ids=str)
def test_memory_comes_back_at_once(options: dict[str, Any]) -> None:
    """Without waiting for the garbage collector: the next trainer may need it."""
    gc.collect()
    gc.disable()
    try:
        with Trainer(CONFIG, Options(device="cpu", **options), batch_size=2, seq_len=8) as trainer:
            trainer.init_weights()
            ids = np.zeros((2, 8), np.int32)
            trainer.step(ids, ids)
            trainer.update(lr=1e-3)
            trainer.validate(ids, ids)
            engine = trainer._team.worker.engine  # type: ignore[attr-defined]
            held = [weakref.ref(o) for o in (engine, engine.state, engine.arena, engine.graphs, engine.state.gradients)]
            del engine
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()
