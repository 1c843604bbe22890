"""bench --strategies: one job split in several ways, each measured in a process of its own."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fullstride.cli.main import main
from fullstride.config.commands import BenchConfig
from fullstride.config.keys import parse
from fullstride.errors import ConfigError, UsageError
from fullstride.parallel.pipeline import ActionTimes
from fullstride.run import strategies
from fullstride.run.bubble import measured_bubble
from fullstride.run.metrics import strategy
from fullstride.run.strategies import compare_strategies, every_name, find_splits, words


def bench(model_dir: Path, *names: str, **more) -> BenchConfig:
    sizes = {"seq_len": 16, "batch_size": 4, "grad_accum": 2, "updates": 1, "device": "cpu"}
    return BenchConfig(model=str(model_dir), strategies=names, **{**sizes, **more})


def test_two_strategies_on_cpu_workers(model_dir: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "result.json"
    config = bench(model_dir, "pp2", "zero3", gpus=2, json=str(file))
    assert main(["bench", *words(config)]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["rows_per_update"] == 8 and set(result["strategies"]) == {"pp2", "dp2-zero3"}
    for found in result["strategies"].values():
        assert found["gpus"] == 2 and found["tokens_per_update"] == 8 * 16
        assert found["tokens_per_sec"] > 0 and found["peak_memory_gb"] > 0 and found["dead_gradients"] == 0
    pipeline, rows = result["strategies"]["pp2"], result["strategies"]["dp2-zero3"]
    # 8 micro-batches over 2 stages of unequal work: at least that of equal ones
    assert 1 / 9 <= pipeline["bubble_predicted"] < 0.5 and 0 < pipeline["bubble_measured"] < 1
    assert rows["bubble_predicted"] is rows["bubble_measured"] is None
    told = capsys.readouterr().out
    assert re.search(r"^pp2 +[\d,.]+ +[\d.]+ +[\d.]+ % +[\d.]+ %$", told, re.MULTILINE)
    assert re.search(r"^dp2-zero3 +[\d,.]+ +[\d.]+ +- +-$", told, re.MULTILINE)


def test_every_split_has_the_same_rows(model_dir: Path) -> None:
    """In every micro-step too; what no GPU count, layer or row allows is left out of `all`."""
    splits = find_splits(bench(model_dir, "all", gpus=4, method="lora"), 4)
    names = [strategy(split.resolved()) for split in splits]
    assert {"single", "dp4-zero1", "dp4-zero3", "dp2-pp2-zero1", "dp2-pp2-zero3"} <= set(names)
    assert "pp4" not in names  # of two layers
    for split in splits:
        c = split.resolved()
        assert c.batch_size * c.dp == 4 and c.grad_accum == 2 and c.ranks == c.gpus and c.method == "lora"
        assert parse(BenchConfig, words(split)) == split  # nothing is lost on the way to the process


def test_names() -> None:
    assert every_name(2) == ["single", "dp2-zero1", "dp2-zero3", "tp2", "pp2"]
    assert {"dp2-pp2-zero3", "pp2-tp2", "dp2-tp2-zero1", "pp4", "tp4"} <= set(every_name(4))


def test_a_pipelines_keys_are_the_pipelines_alone(model_dir: Path) -> None:
    config = bench(model_dir, "pp2", "dp2", gpus=2, pp=2, pp_schedule="gpipe", microbatches=2)
    pipeline, rows = find_splits(config, 2)
    assert (pipeline.pp_schedule, pipeline.microbatches) == ("gpipe", 2)
    assert (rows.pp, rows.pp_schedule, rows.microbatches) == (1, "1f1b", 0)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("fsdp", r"strategies are like single, dp2, .*got 'fsdp'"),
        ("dp2dp2", r"got 'dp2dp2'"),
        ("dp2-dp2", r"got 'dp2-dp2'"),
        ("pp0", r"takes 0 GPUs"),
        ("dp8", r"strategy dp8 takes 8 GPUs, gpus = 4; set gpus to 8"),
        ("dp3", r"cannot deal 4 rows to 3 ranks; set batch-size to 6"),
        ("dp2-zero9", r"zero must be at most 3"),
        ("pp3", r"2 layers cannot be split over 3 pipeline stages"),
    ],
)
def test_refused_before_anything_is_measured(name: str, told: str, model_dir: Path, monkeypatch) -> None:
    monkeypatch.setattr(strategies, "measured_apart", None)
    with pytest.raises(ConfigError, match=told):
        compare_strategies(bench(model_dir, "single", name, gpus=4))


def test_under_a_launcher(model_dir: Path, monkeypatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="run it without a launcher"):
        compare_strategies(bench(model_dir, "single"))


def test_a_strategy_that_fails_is_told_and_the_others_go_on(model_dir: Path, tmp_path: Path, monkeypatch, capsys):
    def run(words: list[str], **_: object) -> SimpleNamespace:
        file = Path(words[-1].removeprefix("--json="))
        if "--pp=2" in words:
            return SimpleNamespace(returncode=1, stderr="fullstride: error: out of memory in weights\n")
        file.write_text(json.dumps(dict.fromkeys(strategies.COLUMNS, 0.5)))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(strategies.subprocess, "run", run)
    result = compare_strategies(bench(model_dir, "pp2", "dp2", "dp2-zero1", gpus=2))
    assert result["strategies"]["pp2"] == {"error": "out of memory in weights"}
    assert list(result["strategies"]) == ["pp2", "dp2-zero1"]  # one by two names is one
    assert re.search(r"^pp2 +out of memory in weights$", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(ConfigError, match="none could be measured"):
        compare_strategies(bench(model_dir, "pp2", gpus=2))


def test_bubble_of_known_times() -> None:
    """Two ranks at work for 3 and 2 of the 4 seconds from the first one's begin to its end: 5 of 8 rank-seconds."""
    assert measured_bubble([(3.0, 4.0), (2.0, 3.0)]) == pytest.approx(3 / 8)


def test_times_of_actions_on_a_cpu() -> None:
    times = ActionTimes(torch.device("cpu"))
    assert times.busy_and_span() == (0.0, 0.0)
    for _ in range(2):  # 20 ms at work, 30 ms between
        times.mark()
        time.sleep(0.02)
        times.mark()
        time.sleep(0.03)
    busy, span = times.busy_and_span()
    assert 0.04 <= busy <= span - 0.03 and span >= 0.07
