"""fullstride train: as a plain PyTorch loop, over ranks, resumed, on what is held out; what it refuses."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullstride import ConfigError, DataError, ModelConfig, Options, Trainer, UsageError, tokenize, train
from fullstride.cli.main import main
from fullstride.config.training import TrainConfig
from fullstride.data.documents import Place
from fullstride.data.loader import Loader
from fullstride.data.report import Report
from fullstride.data.token_parts import Parts
from fullstride.data.token_rows import TokenRows
from fullstride.data.tokens import TokenFile
from fullstride.engine.checkpoint import find_checkpoint
from fullstride.engine.lr import learning_rate
from fullstride.model.hf import Checkpoint
from fullstride.run.metrics import read_events, read_metrics
from tests.conftest import shared
from tests.run.conftest import TINY, exact, tree, write_tokenizer

SMALL = {"seq_len": 32, "batch_size": 2, "grad_accum": 2, "device": "cpu", "steps": 6, "lr": 1e-2}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty documents of 10 to 100 tokens, as token file; its tokenizer is beside it."""
    directory = tmp_path_factory.mktemp("tokens")
    write_tokenizer(directory / "tokenizer")
    rows = [{"text": " ".join(str(i * k) for k in range(3 + i % 20))} for i in range(40)]
    (directory / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tokenize(model=directory / "tokenizer", data=directory / "a.jsonl", out=directory / "a.tokens").out


def keys(model: Path, tokens: Path, out: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(model), "data": str(tokens), "out": str(out), **SMALL, **more}


def test_it_follows_a_plain_loop(tmp_path: Path) -> None:
    """20 updates on real text from scratch, float32, 4 layers: losses as transformers' model and torch's AdamW."""
    from transformers import AutoModelForCausalLM

    steps, lr = 20, 3e-3
    write_tokenizer(tmp_path / "bytes")
    text = shared("data", "tinyshakespeare", "input.txt")
    made = tokenize(model=tmp_path / "bytes", data=text, out=tmp_path / "x.tokens")
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    (tmp_path / "sizes.json").write_text(json.dumps(TINY.to_dict() | sizes))
    more = {"steps": steps, "lr": lr, "batch_size": 4, "seq_len": 64, "weight_decay": 0.1, "init": "scratch"}
    train(**keys(tmp_path / "sizes.json", made.out, tmp_path / "run", **more))
    rows = read_metrics(tmp_path / "run" / "metrics.csv")

    with Trainer(
        ModelConfig.from_pretrained(tmp_path / "sizes.json"), Options(device="cpu"), batch_size=1, seq_len=8
    ) as trainer:
        trainer.init_weights(seed=42)
        trainer.export_model(tmp_path / "start")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float32)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    plain = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    loader = Loader(TokenRows([TokenFile(made.out)], 64, packing=True), 4, 42, 0)
    for step, row in enumerate(rows, 1):
        total, count = torch.zeros(()), 0
        for batch in loader.next_window(2):
            logits = model(torch.from_numpy(batch.inputs).long(), use_cache=False).logits.flatten(0, 1)
            labels = torch.from_numpy(batch.targets).long().flatten()  # one document: nothing to separate
            total, count = (
                total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum"),
                count + batch.supervised,
            )
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate("cosine", step, steps, lr)
        optimizer.step()
        optimizer.zero_grad()
        assert float(row["loss"]) == pytest.approx((total / count).item(), abs=1e-4)
    assert len(rows) == steps and float(rows[-1]["loss"]) < float(rows[0]["loss"]) - 1


def test_from_scratch(tokens: Path, tmp_path: Path) -> None:
    """By a config.json; the model is whole, has the tokenizer, and goes on from there."""
    (tmp_path / "tiny.json").write_text(json.dumps(TINY.to_dict()))
    first = train(**keys(tmp_path / "tiny.json", tokens, tmp_path / "run", init="scratch", eval_fraction=0.1))
    assert first.model is not None and first.eval_loss is not None and first.eval_loss_before is not None
    assert first.eval_loss < first.eval_loss_before
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= tree(first.model)
    more = train(**keys(first.model, tokens, tmp_path / "more", eval_fraction=0.1, steps=2))
    assert more.eval_loss_before == pytest.approx(first.eval_loss, rel=1e-5)  # the same rows are held out
    events = read_events(tmp_path / "run" / "log.jsonl")
    assert [e["event"] for e in events][:2] == ["start", "evaluation"]
    assert "seed" in (tmp_path / "run" / "run.toml").read_text()


def test_a_run_file_runs_again(tokens: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [w for k, v in keys(model_dir, tokens, Path("run")).items() for w in (f"--{k.replace('_', '-')}", str(v))]
    assert main(["train", *words]) == 0
    monkeypatch.chdir("/")
    assert main(["train", str(tmp_path / "run" / "run.toml"), "--steps", "8"]) == 0
    assert [int(row["step"]) for row in read_metrics(tmp_path / "run" / "metrics.csv")] == list(range(1, 9))


def test_over_two_ranks(tokens: Path, model_dir: Path, tmp_path: Path) -> None:
    """Every row once an epoch, the uneven end included."""
    once = {"steps": None, "epochs": 2, "eval_fraction": 0.05}
    train(**keys(model_dir, tokens, tmp_path / "one", **once))
    train(**keys(model_dir, tokens, tmp_path / "two", **once, batch_size=1, gpus=2))
    one, two = (read_metrics(tmp_path / name / "metrics.csv") for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-5) and a["tokens"] == b["tokens"]
    rows = TokenRows([TokenFile(tokens)], 32, packing=True).split(0.05, 42)[0]
    assert sum(int(row["tokens"]) for row in two) == 2 * rows.num_tokens


def test_lora_goes_on_with_text(tokens: Path, model_dir: Path, tmp_path: Path) -> None:
    made = train(**keys(model_dir, tokens, tmp_path / "run", method="lora", steps=2))
    assert made.adapter is not None and "adapter_model.safetensors" in tree(made.adapter)


def killed_run(words: list[str], out: Path, seconds: float) -> None:
    """`fullstride train`, killed some seconds after its first update."""
    process = subprocess.Popen([sys.executable, "-m", "fullstride", "train", *words], stdout=subprocess.DEVNULL)
    while process.poll() is None and not (out / "metrics.csv").is_file():
        time.sleep(0.01)
    time.sleep(seconds)
    process.kill()
    process.wait()


def check_kills(kills: int, tokens: Path, model_dir: Path, tmp_path: Path) -> None:
    more = {"steps": None, "epochs": 3, "save_every": 2, "eval_every": 5, "eval_fraction": 0.05}
    train(**keys(model_dir, tokens, tmp_path / "whole", **more))
    out = tmp_path / "killed"
    told = {k: v for k, v in keys(model_dir, tokens, out, **more).items() if v is not None}
    words = [w for k, v in told.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    generator = random.Random(1)
    for _ in range(kills):
        killed_run(words, out, generator.uniform(0, 0.4))
        if (out / "checkpoints" / "latest").is_file():
            find_checkpoint(out / "checkpoints")
    train(**keys(model_dir, tokens, out, **more))
    assert exact(out) == exact(tmp_path / "whole")
    weights = [Checkpoint(tmp_path / name / "model") for name in ("whole", "killed")]
    assert all(torch.equal(weights[0].get(name), weights[1].get(name)) for name in weights[0].names)


def test_killed_and_resumed(tokens: Path, model_dir: Path, tmp_path: Path) -> None:
    check_kills(2, tokens, model_dir, tmp_path)


@pytest.mark.slow
def test_killed_at_20_moments_and_resumed(tokens: Path, model_dir: Path, tmp_path: Path) -> None:
    check_kills(20, tokens, model_dir, tmp_path)


def test_refusals(tokens: Path, model_dir: Path, tmp_path: Path) -> None:
    def told(error: type[Exception], match: str, **more: Any) -> None:
        with pytest.raises(error, match=match):
            train(**keys(more.pop("model", model_dir), more.pop("data", tokens), tmp_path / "run", **more))
        assert not (tmp_path / "run").exists()

    told(ConfigError, "is a built-in name, which stands for sizes and no weights; set init = scratch", model="qwen3-4b")
    told(UsageError, "init = scratch contradicts method = lora", init="scratch", method="lora")
    told(UsageError, "eval-data and eval-fraction contradict", eval_data=str(tokens), eval_fraction=0.1)
    nothing = tmp_path / "unlabelled" / "nothing.tokens"
    parts = Parts(nothing, TokenFile(tokens).origin, {})
    parts.resume(Report())
    parts.append([np.arange(50)], [np.zeros(50, bool)], Place(1), Report())
    parts.finish()
    with pytest.raises(ConfigError, match="the evaluation rows have no supervised token"):
        train(**keys(model_dir, tokens, tmp_path / "other-run", eval_data=str(nothing)))
    told(ConfigError, "data: no such file", data=tmp_path / "*.tokens")
    told(ConfigError, "eval-data: no such file", eval_data=str(tmp_path / "no.tokens"))
    (tmp_path / "text.tokens").write_text("to be or not to be")
    told(ConfigError, "is no token file", data=tmp_path / "text.tokens")
    told(DataError, "leaves no row to train on", eval_fraction=0.999)
    told(DataError, "no row to train on; give longer files, or lower seq-len", seq_len=4096, eval_fraction=0.5)
    other = tmp_path / "other"
    write_tokenizer(other)
    changed = json.loads((other / "tokenizer.json").read_text())
    vocabulary = changed["model"]["vocab"]
    vocabulary["!"], vocabulary['"'] = vocabulary['"'], vocabulary["!"]
    (other / "tokenizer.json").write_text(json.dumps(changed))
    told(ConfigError, "whose vocabulary is not that of .*other; make it again with this one", tokenizer=str(other))
    (tmp_path / "a.txt").write_text("some words")
    made = tokenize(model=other, data=tmp_path / "a.txt", out=tmp_path / "b.tokens")
    told(ConfigError, "with another, that of", data=f"{tokens},{made.out}")
    small = tmp_path / "small.json"
    small.write_text(json.dumps(TINY.to_dict() | {"vocab_size": 100}))
    told(ConfigError, "vocabulary of 259, but the model has 100 embedding rows", model=small, init="scratch")


def test_rates() -> None:
    needed = {"model": "m", "data": "d"}
    assert TrainConfig(**needed).rate == 1e-5 and TrainConfig(**needed, method="lora").rate == 2e-4
    assert (
        TrainConfig(**needed, init="scratch").rate == 3e-4 and TrainConfig(**needed, init="scratch", lr=1.0).rate == 1
    )
