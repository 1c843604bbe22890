"""plan: memory, stages, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import fullstride as fs
from fullstride.cli.main import main
from fullstride.config import Options
from fullstride.engine.plan import predict
from fullstride.errors import ConfigError, UsageError
from fullstride.model.flops import head_flops, layer_flops, lora_parameters
from fullstride.model.presets import preset
from fullstride.trainer.setting import Setting
from tests.run.conftest import TINY

FITS = re.compile(r"fits +no: [^-]*; (--.*) would fit: about")


def test_memory_is_what_the_engine_would_allocate(model_dir: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "plan.json"
    keys = {"method": "lora", "seq_len": 32, "batch_size": 2, "gpus": 2, "zero": 2, "grad_accum": 3, "json": str(file)}
    result = fs.plan(model=str(model_dir), device="cpu", **keys)
    assert json.loads(file.read_text(encoding="utf-8")) == result
    setting = Setting(Options(method="lora", zero=2, dp=2, device="cpu").resolved(), 2, 32, 3)
    expected = predict(TINY, *setting.engine(TINY), "cpu", ranks=2).device
    assert result["memory"]["segments"] == expected
    assert result["memory"]["total"] == sum(expected.values())
    assert expected[result["memory"]["limited_by"]] == max(expected.values())
    assert result["pipeline"] is None and result["memory"]["fits"] is None
    assert (result["run"]["gpus"], result["run"]["tokens_per_update"]) == (2, 2 * 3 * 2 * 32)
    told = capsys.readouterr().out
    for name in (*expected, "total", "limited_by"):
        assert re.search(rf"^  {name} +\S", told, re.MULTILINE)


def test_a_gpu_that_is_not_here(capsys) -> None:
    """bf16 on a GPU, whatever this machine has; 7.6e9 weights, gradients, and moments of 8 bytes."""
    result = fs.plan(model="qwen2.5-7b", gpu_memory=141)
    assert result["run"]["dtype"] == "bf16" and result["memory"]["fits"] is True
    assert result["memory"]["segments"]["moments"] == pytest.approx(8 * 7.616e9, rel=1e-3)
    assert re.search(r"^  fits +yes$", capsys.readouterr().out, re.MULTILINE)


def test_what_does_not_fit_comes_with_what_would(capsys) -> None:
    memory = fs.plan(model="qwen2.5-0.5b", batch_size=16, gpu_memory=16)["memory"]
    assert memory["fits"] is False
    flags = FITS.search(capsys.readouterr().out)
    assert flags is not None and "--batch-size" in flags[1]
    words = flags[1].replace("--", "").split()
    instead = {"batch_size": 16} | {k.replace("-", "_"): v for k, v in zip(words[::2], words[1::2], strict=True)}
    typed = {k: int(v) if str(v).isdecimal() else v for k, v in instead.items()}
    assert fs.plan(model="qwen2.5-0.5b", gpu_memory=16, **typed)["memory"]["fits"] is True


def test_stages_weigh_what_their_flops_are() -> None:
    """Every layer is there; the last stage has fewer, as it has the head too, whose forward comes with the backward;
    forward and backward of full training cost 1 : 2."""
    config = preset("qwen3-4b")
    pipeline = fs.plan(model="qwen3-4b", pp=4, batch_size=8, microbatches=4, seq_len=512)["pipeline"]
    bounds = [stage["layers"] for stage in pipeline["stages"]]
    assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])] and bounds[-1][1] == 36
    sizes = [end - start for start, end in bounds]
    assert sizes[-1] < min(sizes[:-1])
    layer = layer_flops(config, None, 2 * 512, 2 * 512**2)
    head = head_flops(config, True, 2 * 512)
    for size, stage in zip(sizes, pipeline["stages"], strict=True):
        extra = (0, head[0] + head[1], head[2]) if stage is pipeline["stages"][-1] else (0, 0, 0)
        assert stage["flops"] == [size * a + b for a, b in zip(layer, extra, strict=True)]
        assert layer[1] + layer[2] == 2 * layer[0]
    assert [stage["peak_live"] for stage in pipeline["stages"]] == [4, 3, 2, 1]
    # 3 of 7, were the stages even; they differ by 2 % of their work
    assert pipeline["bubble"] == pytest.approx(3 / 7, rel=0.02)


def test_adapters_cost_little_in_the_backward_for_the_weights() -> None:
    adapters = lora_parameters(preset("qwen3-4b"), 8, ("q_proj", "v_proj"))
    result = fs.plan(model="qwen3-4b", pp=2, method="lora", lora_rank=8, lora_targets="q_proj,v_proj", seq_len=64)
    first = result["pipeline"]["stages"][0]
    layers = first["layers"][1]
    assert first["flops"][2] == layers * 2 * adapters * 64
    passes = [sum(stage["flops"][i] for stage in result["pipeline"]["stages"]) for i in range(3)]
    assert sum(passes) * 4 == pytest.approx(result["run"]["flops_per_update"], rel=1e-12)


def test_the_schedule_alone(capsys) -> None:
    """As the published formulas have it: (p-1) / (m + p-1); a forward costs 1, a backward 2."""
    assert main(["plan", "--pp", "4", "--microbatches", "8", "--show-schedule"]) == 0
    told = capsys.readouterr().out
    assert len(re.findall(r"^rank \d [0-9<>.]+$", told, re.MULTILINE)) == 4
    assert "bubble 27.3 %; peak live micro-batches by rank: 4, 3, 2, 1" in told
    assert max(map(len, told.splitlines())) <= 120


@pytest.mark.parametrize(
    ("keys", "bubble"),
    [
        ({"pp_schedule": "gpipe"}, 3 / 11),
        ({"grad_accum": 2}, 3 / 19),  # one pipeline, not two
        ({"pp_schedule": "interleaved"}, 3 / 19),
        ({"pp_schedule": "interleaved", "pp_chunks": 3}, 3 / 27),
        ({"pp_schedule": "zb-h1"}, 3 / 27),
        ({"pp": 1, "microbatches": 0}, 0),
    ],
)
def test_bubbles(keys: dict, bubble: float) -> None:
    result = fs.plan(**{"pp": 4, "microbatches": 8, "show_schedule": True, **keys})
    # divisions by chunks round
    assert result["pipeline"]["bubble"] == pytest.approx(bubble, abs=1e-12)


def test_gpus_are_stages_times_data_parallel_ranks() -> None:
    for keys in ({"gpus": 6}, {"dp": 3}, {"gpus": 6, "dp": 3}):
        run = fs.plan(pp=2, show_schedule=True, **keys)["run"]
        assert (run["gpus"], run["pp"], run["dp"]) == (6, 2, 3)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({}, UsageError, r"model is missing"),
        ({"pp": 4, "gpus": 6}, UsageError, r"gpus = 6, pp = 4 and tp = 1; set gpus = 8"),
        ({"pp": 4, "gpus": 4, "dp": 2}, UsageError, r"got dp = 2, where 1 remain"),
        ({"model": "qwen3-4b", "microbatches": 2}, UsageError, r"concern pipelines.* got pp = 1"),
        (
            {"model": "qwen3-4b", "pp": 2, "batch_size": 8, "microbatches": 3},
            ConfigError,
            r"batch-size 8 does not divide into 3 micro-batches; set microbatches to 2",
        ),
        ({"model": "qwen3-4b", "pp_chunks": 3}, UsageError, r"got pp-chunks = 3 and pp-schedule = 1f1b"),
        ({"show_schedule": True, "gpu_memory": 80}, UsageError, r"gpu-memory needs a model"),
        ({"model": "qwen3-4b", "pp": 37}, ConfigError, r"36 layers .* 37 pipeline stages; set pp to at most 36"),
        (
            {"model": "qwen3-4b", "pp": 19, "pp_schedule": "interleaved"},
            ConfigError,
            r"36 layers .* 38 pipeline stages; set pp to at most 18",
        ),
        ({"model": "qwen9"}, ConfigError, r"no built-in name"),
        ({"model": "qwen3-4b", "json": "no/r.json"}, ConfigError, r"json: no/r\.json must be a file in a directory"),
        ({"model": "qwen3-4b", "seq_len": 2**30}, ConfigError, r"at most 2,147,483,647 tokens"),
        ({"model": "qwen3-4b", "tp": 3}, ConfigError, r"tp 3 must divide .* set tp to 2"),
    ],
)
def test_refused_with_what_would_do(keys: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        fs.plan(**keys)
