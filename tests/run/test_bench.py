"""bench, built-in model sizes and FLOP counts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from fullstride.config import Options
from fullstride.config.commands import BenchConfig
from fullstride.errors import ConfigError
from fullstride.model.presets import PRESETS, preset
from fullstride.model.spec import ModelConfig, num_parameters, parameter_table
from fullstride.run import bench
from fullstride.run.bench import check_trains, model_config, run_bench
from fullstride.run.flops import lora_parameters, model_flops, peak_flops
from fullstride.trainer.trainer import Trainer
from tests.run.conftest import TINY

# what the models' publishers and transformers count
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b": 7_248_023_552,
}


def test_built_in_sizes_are_the_published_models() -> None:
    assert {name: num_parameters(parameter_table(config)) for name, config in PRESETS.items()} == PARAMETERS
    with pytest.raises(ConfigError, match=r"no built-in name .*qwen3-4b"):
        preset("qwen9-1b")


def test_model_may_be_a_directory_or_a_config(model_dir: Path) -> None:
    assert model_config(str(model_dir)) == model_config(str(model_dir / "config.json")) == TINY
    assert model_config("qwen3-4b").num_hidden_layers == 36


def test_bench_on_a_cpu(model_dir: Path, tmp_path: Path, capsys) -> None:
    for method in ("full", "lora"):
        file = tmp_path / f"{method}.json"
        config = BenchConfig(
            model=str(model_dir),
            method=method,
            seq_len=32,
            batch_size=2,
            grad_accum=2,
            updates=1,
            device="cpu",
            json=str(file),
        )
        result = run_bench(config)
        assert json.loads(file.read_text(encoding="utf-8")) == result
        assert result["tokens_per_update"] == 2 * 2 * 32
        assert len(result["seconds_per_update"]) == 5
        assert result["tokens_per_sec"] > 0 and result["host_ms_per_micro_step"] > 0
        assert result["dead_gradients"] == 0
        assert result["mfu"] is None and result["loss_last"] < result["loss_first"]
        assert "tokens_per_sec" in capsys.readouterr().out


def test_training_that_does_not_train_is_an_error() -> None:
    def metrics(*pairs: tuple[float, float]) -> list[dict[str, float]]:
        return [{"loss": loss, "grad_norm": norm} for loss, norm in pairs]

    check_trains(metrics((2.0, 1.0), (1.9, 1.0)), [])
    with pytest.raises(ConfigError, match="loss on a fixed batch does not fall"):
        check_trains(metrics((2.0, 1.0), (2.0, 1.0)), [])
    with pytest.raises(ConfigError, match=r"bench: 5 tensors get no gradient.*: a, b, c, d \.\.\.; .* dtype = fp32"):
        check_trains(metrics((2.0, 1.0), (1.9, 1.0)), list("abcde"))
    for norm in (0.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="gradient norm is zero or not finite"):
            check_trains(metrics((2.0, 1.0), (1.9, norm)), [])


@pytest.mark.parametrize(
    ("method", "dead", "update"),
    [
        ("full", "model.layers.0.self_attn.k_norm.weight", 1),
        ("lora", "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight", 1),
        ("lora", "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight", 2),  # has none in the first
    ],
)
def test_a_tensor_without_gradient_is_named(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, method: str, dead: str, update: int
) -> None:
    original = Trainer.gradients

    def gradients(self: Trainer, rank: int = 0) -> dict[str, torch.Tensor]:
        found = original(self, rank)
        if self.engine.updates == update - 1:
            found[dead].zero_()
        return found

    monkeypatch.setattr(Trainer, "gradients", gradients)
    config = BenchConfig(
        model=str(model_dir), method=method, seq_len=16, batch_size=2, grad_accum=1, updates=1, device="cpu"
    )
    with pytest.raises(ConfigError, match=f"bench: 1 tensors get no gradient, so they do not train: {dead}"):
        run_bench(config)


def test_a_result_that_cannot_be_written_is_refused_before_measuring(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "Trainer", None)
    for file in (tmp_path / "missing" / "result.json", tmp_path):
        with pytest.raises(ConfigError, match=rf"json: {file} must be a file in a directory that is there; make "):
            run_bench(BenchConfig(model=str(model_dir), device="cpu", json=str(file)))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ConfigError, match=rf"json: no permission to write in {tmp_path}"):
        run_bench(BenchConfig(model=str(model_dir), device="cpu", json=str(tmp_path / "result.json")))


def test_flops_of_a_model_by_hand() -> None:
    """One layer, width 2, one head of 2, feed-forward 3, vocabulary 5: q, k, v, o 4 each, three of 6, head 10."""
    config = ModelConfig("llama", 5, 2, 3, 1, 1, 1)
    weights = 4 * 4 + 3 * 6 + 10
    assert model_flops(config, Options(), 7, 0) == 6 * weights * 7
    # one document of 4 tokens: scores and values, 2 FLOPs a pair and width each, half of the 16 pairs, 3 passes
    assert model_flops(config, Options(), 0, 16) == 2 * 2 * 2 * 16 / 2 * 3
    # LoRA: forward and input gradient of frozen weights, three products of the adapters
    adapters = 2 * (4 * 4 + 3 * 5)
    lora = Options(method="lora", lora_rank=2)
    assert model_flops(config, lora, 7, 0) == (4 * weights + 6 * adapters) * 7


def test_lora_parameters_are_what_the_trainer_trains() -> None:
    options = Options(method="lora", lora_rank=3, lora_targets=("q_proj", "down_proj"), device="cpu")
    with Trainer(TINY, options, batch_size=1, seq_len=4) as trainer:
        assert trainer.num_parameters[0] == lora_parameters(TINY, 3, ("q_proj", "down_proj"))


def test_peaks_of_known_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(dtype="bf16", device="cuda", matmul="bf16")
    for name, peak in (("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA Unheard Of", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert peak_flops(options) == peak
    assert peak_flops(Options(device="cpu")) is None
