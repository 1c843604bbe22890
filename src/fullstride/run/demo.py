"""The demonstration: a small real model learns to write meeting summaries in a house style."""

from __future__ import annotations

import textwrap
from pathlib import Path

import torch

from fullstride.config import default_dtype, resolve_device
from fullstride.config.training import FinetuneConfig
from fullstride.data.report import Report
from fullstride.data.rows import Row, rows_of
from fullstride.data.sources import find_parts
from fullstride.engine.decode import Decoder
from fullstride.run.finetune import run_finetune
from fullstride.run.generate import chat_ids, stop_ids, tokens
from fullstride.run.gguf import import_gguf, packaged_smollm2
from fullstride.run.metrics import read_metrics
from fullstride.run.plot import sketch
from fullstride.run.source import load_tokenizer
from fullstride.run.training import RunResult
from fullstride.trainer.trainer import DTYPES

CPU_STEPS = 19  # about 8,100 tokens: a minute or two on two cores
GPU_EPOCHS = 2
MOST_NEW_TOKENS = 90


def demo(out: str, device: str) -> RunResult:
    """Import the packaged model into `out`/demo-model, fine-tune it into `out`/demo-DEVICE, and show what changed.

    Raises ConfigError when the packages that carry the model and read it are missing.
    """
    device = resolve_device(device)
    model = Path(out) / "demo-model"
    if not model.exists():
        print(f"importing SmolLM2-135M-Instruct into {model}", flush=True)
        import_gguf(packaged_smollm2(), model)
    held_out = find_parts("sample", "eval")
    assert held_out, "the sample has held-out meetings"
    rows = list(rows_of(held_out[0].sources[0].records(), "sample", Report()))
    before = summary(model, None, rows[0], device)
    result = run_finetune(
        FinetuneConfig(
            model=str(model),
            data="sample",
            out=str(Path(out) / f"demo-{device}"),
            seq_len=256,
            batch_size=2,
            grad_accum=1,
            steps=CPU_STEPS if device == "cpu" else None,
            epochs=None if device == "cpu" else GPU_EPOCHS,
            lr=2e-3,
            schedule="linear",
            warmup=1,
            device=device,
        )
    )
    assert result.adapter is not None
    after = summary(model, result.adapter, rows[0], device)
    print("\n".join(story(rows[0], before, after, result)), flush=True)
    return result


def summary(model: Path, adapter: Path | None, row: Row, device: str) -> str:
    """What the model answers, greedily, to the meeting in `row`."""
    assert row.messages is not None
    tokenizer = load_tokenizer(model)
    decoder = Decoder.from_pretrained(model, adapter, DTYPES[default_dtype(device)], torch.device(device))
    stops = stop_ids(model, tokenizer)
    ids = list(tokens(decoder, chat_ids(tokenizer, row.messages[:-1]), stops, MOST_NEW_TOKENS, 0.0, 1.0, 0))
    text = tokenizer.decode(ids, skip_special_tokens=True).strip()
    return text if ids[-1] in stops else text + " ..."


def story(row: Row, before: str, after: str, result: RunResult) -> list[str]:
    """What the demonstration shows at its end."""
    assert row.messages is not None and result.eval_loss is not None and result.eval_loss_before is not None
    losses = [float(r["loss"]) for r in read_metrics(result.out / "metrics.csv")]
    fall = 100 * (1 - result.eval_loss / result.eval_loss_before)
    return [
        *block("An unseen meeting", row.messages[-2]["content"]),
        *block("Its summary by a person", row.messages[-1]["content"]),
        *block("The model's summary before training", before),
        *block("The model's summary after training", after),
        "",
        f"training loss over {len(losses)} updates (also in {result.out / 'loss.png'})",
        sketch(losses),
        "",
        f"loss on the held-out meetings: {result.eval_loss_before:.4f} -> {result.eval_loss:.4f} ({fall:.0f} % less)",
        f"adapter (PEFT): {result.adapter}",
    ]


def block(title: str, text: str) -> list[str]:
    """A title, and the text indented and wrapped."""
    lines = [textwrap.fill(line, 112, initial_indent="  ", subsequent_indent="    ") for line in text.splitlines()]
    return ["", f"{title}:", *lines]
