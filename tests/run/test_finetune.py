"""Fine-tuning runs from end to end, on a tiny model: files, resume, interruption, refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import fullstride as fs
from fullstride.config.keys import parse
from fullstride.config.training import FinetuneConfig
from fullstride.errors import ConfigError, DataError, UsageError
from fullstride.run import training as module
from fullstride.run.finetune import run_finetune
from fullstride.run.metrics import COLUMNS, read_events, read_metrics
from tests.run.conftest import TINY, VOCABULARY, damaged, exact, make_model, run, tree, write_rows

HEADER = (
    "strategy,epoch,step,loss,tokens_per_sec,step_time_sec,peak_vram_gb,lr,"
    "grad_norm,tokens,supervised_tokens,mfu,eval_loss"
)


# ---- what a run leaves


def test_lora_run_leaves_what_the_interface_says(model_dir: Path, data_dir: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    result = run(model_dir, data_dir, out, epochs=2, lora_rank=4, save_every=4)

    text = (out / "metrics.csv").read_text(encoding="utf-8").split("\n")
    assert text[0] == HEADER == ",".join(COLUMNS)
    rows = read_metrics(out / "metrics.csv")
    assert [int(row["step"]) for row in rows] == list(range(1, 11))
    assert [int(row["epoch"]) for row in rows] == [1] * 5 + [2] * 5
    assert {row["strategy"] for row in rows} == {"single"}
    assert {row["mfu"] for row in rows} == {""}  # unknown on a CPU
    assert [bool(row["eval_loss"]) for row in rows] == [False] * 9 + [True]
    assert all(float(row["peak_vram_gb"]) > 0 for row in rows)

    files = tree(out)
    assert {"run.toml", "metrics.csv", "log.jsonl", "loss.png", "checkpoints/latest"} <= files
    for adapter in ("adapters/epoch_1", "adapters/epoch_2", "adapter"):
        assert {
            f"{adapter}/{n}" for n in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json")
        } <= files
    assert not [name for name in files if ".new" in name or ".partial" in name or ".old" in name]
    assert result.adapter == out / "adapter" and result.model is None and result.steps == 10
    assert result.eval_loss is not None and result.eval_loss_before is not None
    assert result.eval_loss < result.eval_loss_before
    newest, last = (load_file(out / name / "adapter_model.safetensors") for name in ("adapter", "adapters/epoch_2"))
    assert all(torch.equal(newest[name], last[name]) for name in newest)

    printed = capsys.readouterr().out
    assert "updates: 10 (2 epochs of 5), 4 rows each" in printed
    assert "parameters: " in printed and " train of " in printed
    assert "evaluation at step 0" in printed and "evaluation at step 10" in printed
    events = read_events(out / "log.jsonl")
    assert all({"event", "time"} <= set(event) for event in events)
    assert [e["step"] for e in events if e["event"] == "update"] == list(range(1, 11))
    assert [e["step"] for e in events if e["event"] == "evaluation"] == [0, 10]


def test_adapter_loads_in_peft_and_gives_the_evaluation_loss(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    result = run(model_dir, data_dir, tmp_path / "run", epochs=2)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(result.adapter))
    tokenizer = AutoTokenizer.from_pretrained(str(result.adapter))
    total = count = 0.0
    for line in (data_dir / "validation.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
        messages = json.loads(line)["messages"]
        prompt, whole = (
            tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=a)
            for m, a in ((messages[:1], True), (messages, False))
        )
        ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
        start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)  # what follows the end token is not supervised
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, start - 1 : end - 1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(ids[start:end]), reduction="sum").item()
        count += end - start
    assert result.eval_loss == pytest.approx(total / count, rel=1e-5)  # float32 sums in another order


def test_full_run_exports_a_model_for_transformers(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run(model_dir, data_dir, out, method="full", steps=3, lr=1e-3, export_dtype="bf16")
    assert result.model == out / "model" and result.adapter is None and not (out / "adapter").exists()
    assert result.eval_loss is not None and result.eval_loss_before is not None
    assert result.eval_loss < result.eval_loss_before
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json"} <= tree(out / "model")
    assert {t.dtype for t in load_file(out / "model" / "model.safetensors").values()} == {torch.bfloat16}
    AutoModelForCausalLM.from_pretrained(out / "model")


def test_packed_and_unpacked_evaluation_are_one_number(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    losses = [run(model_dir, data_dir, tmp_path / str(p), steps=1, packing=p).eval_loss_before for p in (True, False)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # float32 sums in another order


def test_continues_from_an_adapter(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    first = run(model_dir, data_dir, tmp_path / "first", steps=3)
    second = run(model_dir, data_dir, tmp_path / "second", steps=1, adapter=first.adapter)
    assert second.eval_loss_before == first.eval_loss  # the same numbers in the same order
    with pytest.raises(ConfigError, match="rank 16 instead of 4"):
        run(model_dir, data_dir, tmp_path / "third", steps=1, adapter=first.adapter, lora_rank=4)
    assert not (tmp_path / "third").exists()


def test_python_and_toml_give_one_run(model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    fs.finetune(model=str(model_dir), data="data", steps=1, seq_len=96, device="cpu", name="first")
    config = parse(FinetuneConfig, ["runs/first/run.toml"])
    assert config == config.resolved()  # nothing automatic is left in run.toml
    assert (config.out, config.data) == (str(tmp_path / "runs" / "first"), str(data_dir))
    monkeypatch.chdir("/")
    again = parse(FinetuneConfig, [str(tmp_path / "runs/first/run.toml"), "--out", str(tmp_path / "second")])
    run_finetune(again)
    assert exact(tmp_path / "second") == exact(tmp_path / "runs" / "first")


def test_default_name_is_model_and_data(model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = fs.finetune(model=str(model_dir), data="data/train.jsonl", steps=1, seq_len=96, device="cpu")
    assert result.out == tmp_path / "runs" / "tiny-train"
    assert result.eval_loss is None  # a plain file has no evaluation rows


def test_case_3_short_windows_and_every_row_in_every_epoch(
    model_dir: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """9 rows, batch 2, accumulation 2, 3 epochs: 9 updates, stated, and every row is trained on 3 times."""
    data = write_rows(tmp_path / "nine.jsonl", 9)
    seen: list[bytes] = []
    steps: list[int] = []
    original = fs.Trainer.step

    def step(self: fs.Trainer, inputs: np.ndarray, targets: np.ndarray, documents: Any = None) -> None:
        steps.append(len(inputs))
        seen.extend(row.tobytes() for row, labels in zip(inputs, targets, strict=True) if (labels != -100).any())
        original(self, inputs, targets, documents)

    monkeypatch.setattr(fs.Trainer, "step", step)
    run(model_dir, data, tmp_path / "run", epochs=3)
    assert "updates: 9 (3 epochs of 3), 4 rows each, 1 in the last of an epoch" in capsys.readouterr().out
    assert len(steps) == 3 * (2 + 2 + 1)
    assert len(set(seen)) == 9 and all(seen.count(row) == 3 for row in set(seen))
    tokens = [int(row["tokens"]) for row in read_metrics(tmp_path / "run" / "metrics.csv")]
    assert sum(tokens[:3]) == sum(tokens[3:6]) == sum(tokens[6:])


def test_case_3_a_short_window_weighs_as_a_long_one(model_dir: Path, tmp_path: Path) -> None:
    """Five equal micro-batches, accumulation 2: three updates with equal loss and gradient norm."""
    line = write_rows(tmp_path / "one.jsonl", 1).read_text(encoding="utf-8")
    (tmp_path / "ten.jsonl").write_text(line * 10, encoding="utf-8")
    # a rate of (nearly) nothing, so that the three updates see the same weights
    run(model_dir, tmp_path / "ten.jsonl", tmp_path / "run", epochs=1, lr=1e-30, weight_decay=0)
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert len(rows) == 3
    for name in ("loss", "grad_norm"):
        values = [float(row[name]) for row in rows]
        assert values == pytest.approx([values[0]] * 3, rel=1e-6)  # float32, one product more or less in the sum


def test_rows_longer_than_the_model_was_made_for_are_noted(data_dir: Path, tmp_path: Path, capsys) -> None:
    model = make_model(tmp_path / "short", dataclasses.replace(TINY, max_position_embeddings=64))
    note = "seq-len 96 exceeds the 64 positions of the model (max_position_embeddings)"
    run(model, data_dir, tmp_path / "run", steps=1)
    assert f"note: {note}\n" in capsys.readouterr().out
    assert [e["text"] for e in read_events(tmp_path / "run" / "log.jsonl") if e["event"] == "note"] == [note]
    run(model, data_dir, tmp_path / "fits", steps=1, seq_len=64)
    assert "note" not in capsys.readouterr().out


def test_any_name_can_be_plotted(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    """Fonts lack characters, and matplotlib reads dollars as formulas; warnings are errors here."""
    assert (run(model_dir, data_dir, tmp_path / "会議 $x_$", steps=1).out / "loss.png").is_file()


# ---- the data's report


def test_data_report_is_printed_and_logged(model_dir: Path, tmp_path: Path, capsys) -> None:
    data = write_rows(tmp_path / "rows.jsonl", 9)
    with data.open("a", encoding="utf-8") as file:
        file.write('{"messages": [{"role": "user"\n{"messages": []}\n{"prompt": "a", "completion": ""}\n')
    run(model_dir, data, tmp_path / "run", steps=1)
    printed = capsys.readouterr().out
    events = [e for e in read_events(tmp_path / "run" / "log.jsonl") if e["event"] == "data"]
    assert [(e["count"], e["lines"]) for e in events] == [(1, [10]), (1, [11]), (1, [12])]
    assert len({e["reason"] for e in events}) == 3
    assert all(e["file"].endswith("rows.jsonl") and e["reason"] in printed for e in events)


def test_dry_run_shows_rows_and_writes_nothing(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    with (data_dir / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write("{broken\n")
    monkeypatch.setattr(module, "Trainer", None)  # no weights are loaded
    before = tree(tmp_path)
    run(model_dir, data_dir, tmp_path / "run", dry_run=True)
    assert tree(tmp_path) == before
    printed = capsys.readouterr().out
    assert "20 documents" in printed and "% padding" in printed and "supervised" in printed
    assert "1 row: broken JSON (line 21)" in printed
    assert "«It is" in printed and "<|im_end|>»" in printed


# ---- bad input: one clear line, nothing written


def without_tensor(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def with_unknown_tensor(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    save_file(weights | {"model.layers.0.extra.weight": torch.zeros(1)}, model / "model.safetensors", {"format": "pt"})


def truncated(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_tensor, r"model\.layers\.1\.mlp\.up_proj\.weight"),
        (with_unknown_tensor, r"model\.layers\.0\.extra\.weight"),
        (truncated, r"model\.safetensors"),
        (lambda model: (model / "model.safetensors").unlink(), "no weights|model.safetensors"),
        (lambda model: (model / "config.json").unlink(), r"no config\.json"),
        (lambda model: (model / "tokenizer.json").write_text("{}", encoding="utf-8"), "tokenizer does not load"),
        (
            lambda model: [(model / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")],
            "no tokenizer there",
        ),
        (lambda model: shutil.rmtree(model), "no such directory"),
    ],
)
def test_damaged_models_are_refused_by_name(
    model_dir: Path, data_dir: Path, tmp_path: Path, damage: Any, message: str
) -> None:
    model = damaged(model_dir, tmp_path / "model")
    damage(model)
    with pytest.raises(ConfigError, match=message) as error:
        run(model, data_dir, tmp_path / "run", steps=1)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_larger_than_the_model_is_refused(data_dir: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "small", dataclasses.replace(TINY, vocab_size=VOCABULARY - 1))
    with pytest.raises(ConfigError, match="tokenizer has 259 tokens, the model only 258 embedding rows"):
        run(model, data_dir, tmp_path / "run", steps=1)
    assert not (tmp_path / "run").exists()


def test_no_rows_left_is_refused(model_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "completion": ""}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"^data=.*rows\.jsonl: no data rows left with seq-len 96"):
        run(model_dir, data, tmp_path / "run", steps=1)
    good, empty = write_rows(tmp_path / "good.jsonl", 3), tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(DataError, match=r"^eval-data=.*empty\.jsonl: no data rows left"):
        run(model_dir, good, tmp_path / "run", steps=1, eval_data=empty)
    with pytest.raises(ConfigError, match="no such file"):
        run(model_dir, tmp_path / "missing.jsonl", tmp_path / "run", steps=1)
    with pytest.raises(UsageError, match="has a weight, and nothing to weigh it against"):
        run(model_dir, Path(f"{data}:0.5"), tmp_path / "run", steps=1)
    with pytest.raises(ConfigError, match=r"no adapter_config\.json"):
        run(model_dir, write_rows(data, 3), tmp_path / "run", steps=1, adapter=tmp_path)
    assert not (tmp_path / "run").exists()


def test_warmup_must_end_within_the_run(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    for steps, warmup in ((1, 50), (4, 4), (1, 1), (2, 0.9)):
        with pytest.raises(ConfigError, match=rf"warmup = {warmup} does not end within the {steps} updates; lower it"):
            run(model_dir, data_dir, tmp_path / "run", steps=steps, warmup=warmup)
    assert not (tmp_path / "run").exists()
    rates = [run_rates(model_dir, data_dir, tmp_path / str(w), warmup=w) for w in (3, 0.5)]
    assert rates[0][2] == rates[1][1] == 1e-2


def run_rates(model: Path, data: Path, out: Path, **more: Any) -> list[float]:
    run(model, data, out, steps=4, schedule="constant", **more)
    return [float(row["lr"]) for row in read_metrics(out / "metrics.csv")]


def test_a_place_that_cannot_be_written_is_refused_before_training(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(module, "Trainer", None)  # no weights are loaded
    with pytest.raises(ConfigError, match=r"out: .*train\.jsonl is a file, so it cannot hold run"):
        run(model_dir, data_dir, data_dir / "train.jsonl" / "run", steps=1)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    with pytest.raises(ConfigError, match=rf"out: no permission to write in {tmp_path}; choose another place"):
        run(model_dir, data_dir, tmp_path / "new" / "run", steps=1)


@pytest.mark.parametrize(("batch_size", "told"), [(500, True), (1, False)])
def test_empty_rows_in_every_micro_step_are_noted(
    model_dir: Path, data_dir: Path, batch_size: int, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    fs.finetune(model=str(model_dir), data=str(data_dir), seq_len=96, batch_size=batch_size, dry_run=True)
    assert ("rows of a micro-step are empty; --batch-size" in capsys.readouterr().out) == told
