"""A tiny random model with a real tokenizer, and short chats to train it on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fullstride.config import Options
from fullstride.model.spec import ModelConfig
from fullstride.run.finetune import finetune
from fullstride.run.metrics import read_metrics
from fullstride.run.training import RunResult
from fullstride.trainer.trainer import Trainer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = len(SPECIAL) + 256  # a token for every byte: small heads make quick tests
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY = ModelConfig(
    architecture="qwen3",
    vocab_size=VOCABULARY + 5,  # more embedding rows than tokens is legal
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    tie_word_embeddings=True,
    extra={"eos_token_id": 2},
)


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of bytes with a ChatML template."""
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)


def make_model(directory: Path, config: ModelConfig = TINY) -> Path:
    """A Hugging Face directory of random weights."""
    with Trainer(config, Options(device="cpu"), batch_size=1, seq_len=8) as trainer:
        trainer.init_weights(seed=1)
        trainer.export_model(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def write_rows(file: Path, count: int, first: int = 0) -> Path:
    """`count` chats of unequal length, one JSON object a line."""
    rows = []
    for i in range(first, first + count):
        question = f"What is {i} and {' and '.join(str(k) for k in range(i % 5))}?"
        answer = " ".join(["It is", *(str(i + k) for k in range(1 + i % 4))])
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """20 rows to train on and 3 to evaluate on."""
    directory = tmp_path / "data"
    directory.mkdir()
    write_rows(directory / "train.jsonl", 20)
    write_rows(directory / "validation.jsonl", 3, first=100)
    return directory


def keys(model: Path, data: Path, out: Path, **more: Any) -> dict[str, Any]:
    """A quick run: 20 rows, 2 a micro-step, 2 micro-steps an update."""
    small = {"seq_len": 96, "batch_size": 2, "grad_accum": 2, "packing": False, "lr": 1e-2, "device": "cpu"}
    return {"model": str(model), "data": str(data), "out": str(out), **small, **more}


def run(model: Path, data: Path, out: Path, **more: Any) -> RunResult:
    """fs.finetune with the keys of a quick run."""
    return finetune(**keys(model, data, out, **more))


def tree(directory: Path) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


def exact(run_directory: Path) -> list[tuple[Any, ...]]:
    """The columns of metrics.csv that do not depend on the clock."""
    names = ("epoch", "step", "loss", "lr", "grad_norm", "tokens", "supervised_tokens", "eval_loss")
    return [tuple(row[name] for name in names) for row in read_metrics(run_directory / "metrics.csv")]


def damaged(model_dir: Path, target: Path) -> Path:
    shutil.copytree(model_dir, target)
    return target
