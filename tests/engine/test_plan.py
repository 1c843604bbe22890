"""Predicted memory: the arena's part exactly, the rest from above and not far."""

from __future__ import annotations

import json
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from fullstride import ModelConfig, Options, Trainer
from fullstride.engine.plan import LIBRARIES, predict
from fullstride.model.presets import preset
from fullstride.ops.matmul import WORKSPACE_BYTES
from fullstride.trainer.setting import Setting
from tests.parity.harness import CONFIG

UNTIED = ModelConfig("qwen2", 61, 40, 56, 3, 4, 2, head_dim=16)  # with biases, without head norms
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

# what decides over buffers: method and its ranks, dropout, targets, precision, recompute, chunks
OPTIONS = {
    "full": {},
    "full, bf16, masters": {"dtype": "bf16", "master_dtype": "fp32", "m_dtype": "bf16"},
    "lora": {"method": "lora", "lora_rank": 3},
    "lora, dropout, two targets": {"method": "lora", "lora_dropout": 0.1, "lora_targets": ("k_proj", "down_proj")},
    "recompute": {"recompute": ("swiglu", "norm", "qkv"), "head_chunks": 7},
    "lora, block": {"method": "lora", "recompute": ("block",), "dtype": "bf16"},
}


def train(trainer: Trainer, updates: int = 1, documents: np.ndarray | None = None) -> None:
    """Evaluations, micro-steps and updates, all positions supervised."""
    shape = trainer.batch_size, trainer.seq_len
    inputs, targets = np.random.default_rng(0).integers(trainer.config.vocab_size, size=(2, *shape), dtype=np.int32)
    for _ in range(updates):
        trainer.validate(inputs, targets, documents)
        for _ in range(trainer.grad_accum):
            trainer.step(inputs, targets, documents)
        trainer.update(lr=1e-3, grad_clip=1.0)


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_arena_holds_exactly_what_was_predicted(config: ModelConfig, options: dict) -> None:
    given = Options(device="cpu", **options).resolved()
    setting = Setting(given, batch_size=3, seq_len=13, grad_accum=2)
    plan = predict(config, *setting.engine(config), "cpu").device
    with Trainer(config, given, batch_size=3, seq_len=13, grad_accum=2) as trainer:
        trainer.init_weights()
        train(trainer)
        assert plan.pop(LIBRARIES) > 0
        assert {name: kinds["pageable"] for name, kinds in trainer.allocations().items()} == plan


def total(plan: dict[str, int]) -> int:
    return sum(plan.values())


def test_predictions_agree_with_what_was_measured() -> None:
    """Peaks of torch's allocator on an H200: never above the prediction, nor below it by more than what it has for
    libraries (the operations of attention differ in what they take, and code is not in the allocator's count)."""
    files = sorted(RESULTS.glob("h200-*-*.json"))
    assert len(files) >= 2
    for file in files:
        told = json.loads(file.read_text(encoding="utf-8"))
        master = "fp32" if told["method"] == "lora" else told["dtype"]
        dtypes = {"dtype": told["dtype"], "master_dtype": master, "m_dtype": "fp32", "v_dtype": "fp32"}
        keys = {
            "head_chunks": told.get("head_chunks", 0),
            "recompute": tuple(filter(None, told["recompute"].split(","))),
        }
        options = Options(method=told["method"], device="cuda", **dtypes, **keys)
        config, setting = preset(told["model"]), Setting(options, told["batch_size"], told["seq_len"], 1)
        plan = predict(config, *setting.engine(config)).device
        assert total(plan) - plan[LIBRARIES] < 1e9 * told["peak_memory_gb"] < total(plan), file.name
        assert total(plan) < 1e9 * told["peak_memory_gb"] * (1.1 if keys["recompute"] else 1.05), file.name


def test_libraries_keep_a_set_of_attention_for_every_shape() -> None:
    """Attention's output and statistics: 16 bf16 columns by 4 heads and 4 float32 for each of 3 layers and 32 tokens;
    once more with every number of documents that has graphs of its own, of one layer with recompute of attention."""
    options = Options(dtype="bf16", master_dtype="bf16", m_dtype="fp32", v_dtype="fp32", device="cuda")

    def libraries(**more) -> int:
        setting = Setting(Options(**{**vars(options), **more.pop("options", {})}), 2, 16, 1)
        return predict(CONFIG, *setting.engine(CONFIG), **more).device[LIBRARIES]

    layer = 32 * (16 * 4 * 2 + 4 * 4)
    assert libraries(shapes=2) - libraries() == 3 * layer
    assert libraries() - libraries(options={"recompute": ("att",)}) == 2 * layer
    assert libraries(shapes=2, options={"graphs": False}) == libraries(options={"graphs": False}) < libraries()
    assert libraries(documents=8) > libraries(documents=2) == libraries()


def test_a_plan_costs_nothing_by_itself() -> None:
    """Terabytes on the device, a gigabyte of rotary tables: planned in the moment that it takes to add them up."""
    setting = Setting(Options(device="cpu").resolved(), batch_size=1, seq_len=2**24, grad_accum=1)
    started = time.perf_counter()
    plan = predict(preset("qwen2.5-7b"), *setting.engine(preset("qwen2.5-7b"))).device
    assert plan["rope"] == 2 * 4 * 2**24 * 64 and total(plan) > 1e13
    assert time.perf_counter() - started < 2.0  # the tables alone would take longer than that


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "packed", "recompute"),
    [*product(("full", "lora"), (False, True), ((),)), ("full", False, ("block",))],
    ids=str,
)
def test_predicted_and_measured_peaks_on_a_gpu(method: str, packed: bool, recompute: tuple[str, ...]) -> None:
    """Never above the prediction; at most 10 % of the arena and what ON_A_GPU holds below it."""
    config = ModelConfig("qwen3", 32000, 1024, 2816, 8, 16, 4, head_dim=64)
    options = Options(method=method, recompute=recompute, device="cuda").resolved()
    documents = np.broadcast_to(np.arange(512, dtype=np.int32) // 100, (16, 512)).copy() if packed else None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    with Trainer(config, options, batch_size=16, seq_len=512, grad_accum=2) as trainer:
        trainer.init_weights()
        train(trainer, updates=4, documents=documents)
        peak = torch.cuda.max_memory_allocated() - before
        taken = free - torch.cuda.mem_get_info()[0]
        setting = Setting(options, 16, 512, 2)
        plan = predict(config, *setting.engine(config), documents=128 if packed else 0).device
        held = sum(kinds["device"] for kinds in trainer.allocations().values())
    assert 0 <= held - (total(plan) - plan[LIBRARIES]) <= WORKSPACE_BYTES
    print(
        f"\n{method} {packed} {recompute}: predicted {total(plan) / 1e9:.3f} GB, libraries {plan[LIBRARIES] / 1e9:.3f};"
    )
    print(f"allocated {peak / 1e9:.3f}, of it outside the arena {(peak - held) / 1e9:.3f}; device {taken / 1e9:.3f}")
    assert peak < total(plan) < 1.1 * peak + 4e8
