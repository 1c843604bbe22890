"""A real model: SmolLM2-135M-Instruct from its GGUF, against values measured with transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fullstride import Options, Trainer
from fullstride.engine.decode import Decoder
from tests.conftest import shared

pytestmark = pytest.mark.xdist_group("smollm2")  # one import of the GGUF serves them all


def first_meeting() -> str:
    with shared("data", "ami", "test.jsonl").open(encoding="utf-8") as lines:
        return json.loads(next(lines))["dialogue"]


def shakespeare() -> str:
    return shared("data", "tinyshakespeare", "input.txt").read_text(encoding="utf-8")


# transformers 5.24, float32, on the same weights: mean negative log-likelihood of tokens 2 to 2,000, and the first ids
REFERENCE = {
    "tinyshakespeare": (shakespeare, 3.605329, [5345, 32062, 42, 198, 6121, 392, 7219, 750]),
    "meeting": (first_meeting, 2.921560, [11126, 27542, 42, 41827, 294, 6799, 294, 6799]),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_likelihood_of_real_text(name: str, smollm2: Path) -> None:
    from transformers import AutoTokenizer

    text, expected, first = REFERENCE[name]
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer(text(), add_special_tokens=False)["input_ids"][:2000]
    assert ids[:8] == first
    tokens = np.array([ids], dtype=np.int32)
    targets = np.append(tokens[:, 1:], [[-100]], axis=1).astype(np.int32)
    options = Options(dtype="fp32", device="cpu")
    with Trainer.from_pretrained(smollm2, options, batch_size=1, seq_len=2000) as trainer:
        told = trainer.validate(tokens, targets)
    assert told["tokens"] == 1999
    assert told["loss"] == pytest.approx(expected, abs=5e-4)


def test_greedy_answer(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert len(ids) == 37
    decoder = Decoder.from_pretrained(smollm2, None, torch.float32, torch.device("cpu"))
    answer, feed = [], ids
    for _ in range(8):
        answer.append(int(decoder.logits(feed).argmax()))
        feed = answer[-1:]
    assert answer == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert tokenizer.decode(answer[:-1]) == "The capital of France is Paris."
