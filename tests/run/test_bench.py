"""bench, built-in model sizes and FLOP counts."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from fullstride.config import Options
from fullstride.config.commands import BenchConfig
from fullstride.errors import ConfigError
from fullstride.model.flops import lora_parameters
from fullstride.model.presets import PRESETS, preset
from fullstride.model.spec import ModelConfig, num_parameters, parameter_table
from fullstride.run import bench
from fullstride.run.bench import check_trains, model_config, run_bench
from fullstride.run.flops import model_flops, peak_flops
from fullstride.run.kinds import KINDS, TimeByKind
from fullstride.trainer.setting import Setting
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
        assert result["tokens_per_sec"] > 0
        assert result["dead_gradients"] == 0
        assert result["mfu"] is None and result["loss_last"] < result["loss_first"]
        told = capsys.readouterr().out
        for name in ("tokens_per_sec", "share_of_ceiling", "host_ms_per_micro_step", *KINDS, "dead_gradients"):
            assert re.search(rf"^  {name} +\S", told, re.MULTILINE)
        # on a CPU the keys are there, and say that there is nothing to tell apart
        assert result["time_by_kind_ms"] == result["time_by_kind_share"] == dict.fromkeys(KINDS)
        assert result["host_ms_per_micro_step"] is result["share_of_ceiling"] is None


def test_a_gpus_result_is_described_in_full(model_dir: Path) -> None:
    """Known times give known figures: medians over medians, shares of the profiled update, ratio to the ceiling."""
    config = BenchConfig(model=str(model_dir), seq_len=8, batch_size=2, device="cpu").resolved()
    kinds = TimeByKind(dict(zip(KINDS, (0.4, 0.2, 0.1, 0.05, 0.1, 0.2), strict=True)), 1.0, 0.05, ("spooky",))
    metrics = [{"loss": 2.0, "grad_norm": 1.0}, {"loss": 1.0, "grad_norm": 3.0}]
    rounds = [[1.0, 9.0, 1.0], [2.0, 2.0, 2.0], [4.0, 4.0, 0.0]]
    measured = bench.Measured(rounds, metrics, 3 * 10**9, [], None, 4 * 10**9, [0.5e-3, 7.0, 0.6e-3], kinds)
    setting = Setting(Options(device="cpu").resolved(), config.batch_size, config.seq_len, 4)
    result = bench.described(config, TINY, setting, measured, (7, 9), ceiling=64.0)
    assert result["seconds_per_update"] == [1.0, 2.0, 4.0]
    assert result["tokens_per_sec"] == 4 * 2 * 8 / 2.0 and result["share_of_ceiling"] == 0.5
    assert result["host_ms_per_micro_step"] == pytest.approx(0.6)
    assert (result["peak_memory_gb"], result["device_memory_gb"]) == (3.0, 4.0)
    assert result["time_by_kind_ms"] == pytest.approx(dict(zip(KINDS, (400, 200, 100, 50, 100, 200), strict=True)))
    assert result["time_by_kind_share"]["attention"] == pytest.approx(0.2)
    assert (result["overlap_ms"], result["profiled_update_ms"]) == pytest.approx((50, 1000))
    assert json.loads(json.dumps(result)) == result
    told = bench.table(result)
    assert re.search(r"products +400.00 ms +40.0 %", told) and re.search(r"unrecognised_kernels +spooky", told)
    assert re.search(r"share_of_ceiling +0.5$", told, re.MULTILINE)
    # nothing is left out of what a person sees
    shown = {name for name in result if not name.startswith("time_by_kind")}
    assert shown == set(re.findall(r"^  (\w+)", told, re.MULTILINE)) - set(KINDS)


def test_host_time_begins_with_an_idle_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before every micro-step that is timed the device has nothing to do, and no window grows beyond an update's."""
    calls: list[str] = []

    class Device:
        def step(self, inputs: str, targets: str) -> None:
            calls.append("step")

        def discard(self) -> None:
            calls.append("discard")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    times = bench.issue_times(Device(), [("a", "b")] * 3)  # type: ignore[arg-type, list-item]
    assert len(times) == bench.HOST_STEPS and min(times) >= 0
    assert calls.count("step") == len(times)
    assert all(calls[i - 1] == "wait" for i, call in enumerate(calls) if call == "step")
    windows = "".join(call[0] for call in calls).replace("w", "").strip("d").split("d")
    assert {len(window) for window in windows[:-1]} == {3} and calls[-1] == "discard"


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
    missing = tmp_path / "missing" / "result.json"
    for file, remedy in ((missing, f"make {missing.parent} first"), (tmp_path, "name a file in it")):
        with pytest.raises(ConfigError, match=rf"json: {file} must be a file in a directory that is there; {remedy}"):
            run_bench(BenchConfig(model=str(model_dir), device="cpu", json=str(file)))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ConfigError, match=rf"json: no permission to write in {tmp_path}"):
        run_bench(BenchConfig(model=str(model_dir), device="cpu", json=str(tmp_path / "result.json")))


@pytest.mark.gpu
def test_bench_on_a_gpu_accounts_for_its_time(capsys) -> None:
    result = run_bench(BenchConfig(model="smollm2-135m", batch_size=8, seq_len=512, updates=1))
    with capsys.disabled():
        print(f"\n{bench.table(result)}")
    ms, share = result["time_by_kind_ms"], result["time_by_kind_share"]
    assert sum(ms.values()) == pytest.approx(result["profiled_update_ms"] + result["overlap_ms"], rel=1e-6)
    assert result["unrecognised_kernels"] == [] and ms["other"] == 0
    assert min(ms[kind] for kind in KINDS if kind != "other") > 0
    assert share["products"] > share["optimizer"] and share["element_wise"] > share["optimizer"]
    # what the profiler adds is launch overhead: the account is of an update as it was timed
    assert result["profiled_update_ms"] < 2e3 * min(result["seconds_per_update"])
    # 16 micro-steps an update: were waiting counted, this would be a micro-step's whole time
    assert 0 < result["host_ms_per_micro_step"] < 0.5 * 1e3 * min(result["seconds_per_update"]) / result["grad_accum"]


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
        layer = lora_parameters(TINY, 3, ("q_proj", "down_proj"))
        assert trainer.num_parameters[0] == TINY.num_hidden_layers * layer


def test_peaks_of_known_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(dtype="bf16", device="cuda", matmul="bf16")
    for name, peak in (("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA Unheard Of", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert peak_flops(options) == peak
    assert peak_flops(Options(device="cpu")) is None
