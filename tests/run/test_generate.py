"""Generation: prompts, sampling, stopping, streaming; transformers is the oracle."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fullstride.config.commands import GenerateConfig
from fullstride.engine.decode import Decoder
from fullstride.errors import ConfigError
from fullstride.run import generate as module
from fullstride.run.generate import TextStream, choose, prompt_ids, stop_ids, tokens
from tests.run.conftest import TINY, damaged, make_model, run


def generate(model: Path, **keys: Any) -> str:
    return module.generate(GenerateConfig(model=str(model), device="cpu", **keys))


def test_greedy_equals_transformers(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
    ids = prompt_ids(tokenizer, "What is 2 and 3?")
    decoder = Decoder.from_pretrained(model_dir, None, torch.float32, torch.device("cpu"))
    ours = list(tokens(decoder, ids, set(), 12, 0.0, 1.0, 0))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    sequence = list(ids)
    for token in ours:
        with torch.no_grad():
            logits = model(torch.tensor([sequence])).logits[0, -1]
        # equal up to rounding: where two tokens tie within it, either is greedy
        assert logits[token] >= logits.max() - 1e-5
        sequence.append(token)
    assert list(tokens(decoder, ids, set(), 12, 0.0, 1.0, 0)) == ours  # the decoder was reset


def test_an_adapter_changes_the_text(model_dir: Path, data_dir: Path, tmp_path: Path, capsys) -> None:
    result = run(model_dir, data_dir, tmp_path / "run", epochs=4, lr=3e-2)
    question = {"prompt": "What is 3 and 0 and 1 and 2?", "max_new_tokens": 8}
    plain = generate(model_dir, **question)
    capsys.readouterr()
    tuned = generate(model_dir, adapter=str(result.adapter), **question)
    captured = capsys.readouterr()
    assert tuned != plain
    assert captured.out == tuned + "\n"
    assert "tokens/s" in captured.err


def test_the_prompt_is_the_chat_template_or_raw(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
    chat = tokenizer.decode(prompt_ids(tokenizer, "hi", "be brief"))
    assert chat == ("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(prompt_ids(tokenizer, "hi", raw=True)) == "hi"
    tokenizer.chat_template += "{% if not enable_thinking %}<think></think>{% endif %}"
    assert (
        tokenizer.decode(prompt_ids(tokenizer, "hi"))
        == tokenizer.decode(prompt_ids(tokenizer, "hi", thinking=True)) + "<think></think>"
    )
    with pytest.raises(ConfigError, match="the prompt has no tokens"):
        prompt_ids(tokenizer, "", raw=True)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template; set raw"):
        prompt_ids(tokenizer, "hi")


def test_stops_at_every_end_token(model_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}), encoding="utf-8")
    assert stop_ids(model, AutoTokenizer.from_pretrained(str(model))) == {2, 7, 9}

    class Counts:
        def reset(self) -> None:
            self.next = 4

        def logits(self, ids: list[int]) -> torch.Tensor:
            self.next += 1
            return torch.nn.functional.one_hot(torch.tensor(self.next), 20).float()

    assert list(tokens(Counts(), [1], {2, 7}, 10, 0.0, 1.0, 0)) == [5, 6, 7]  # type: ignore[arg-type]
    assert list(tokens(Counts(), [1], {2}, 3, 0.0, 1.0, 0)) == [5, 6, 7]  # type: ignore[arg-type]


def test_sampling_follows_the_distribution_and_top_p() -> None:
    p = torch.tensor([0.1, 0.5, 0.15, 0.25])
    generator = torch.Generator().manual_seed(1)
    draws = torch.tensor([choose(p.log(), 1.0, 1.0, generator) for _ in range(4000)])
    shares = torch.bincount(draws, minlength=4) / 4000
    assert torch.allclose(shares, p, atol=4 * (0.25 / 4000) ** 0.5)  # four standard deviations of the widest share
    kept = {choose(p.log(), 1.0, 0.6, generator) for _ in range(300)}
    assert kept == {1, 3}  # 0.5 does not reach 0.6, the token that crosses it is in
    assert {choose(p.log(), 1.0, 0.01, generator) for _ in range(50)} == {1}
    assert choose(p.log(), 0.0, 1.0, generator) == 1
    hot = torch.tensor([choose(p.log(), 0.5, 1.0, generator) for _ in range(4000)])
    sharp = p**2 / (p**2).sum()  # temperature 1/2 squares the probabilities
    assert torch.allclose(torch.bincount(hot, minlength=4) / 4000, sharp, atol=4 * (0.25 / 4000) ** 0.5)


def test_a_seed_is_one_text(model_dir: Path) -> None:
    def text(seed: int) -> str:
        return generate(model_dir, prompt="a", raw=True, max_new_tokens=20, temperature=1.0, seed=seed)

    assert text(1) == text(1) != text(2)


def test_characters_of_several_tokens_come_whole(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
    pieces: list[str] = []
    stream = TextStream(tokenizer, pieces.append)
    for token in tokenizer("né 🙂!")["input_ids"]:
        stream.push(token)
    stream.close()
    assert "".join(pieces) == stream.text == "né 🙂!"
    assert "🙂" in pieces and not any("\ufffd" in piece for piece in pieces)


def test_missing_prompt_file_is_named(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompt-file: nowhere\.txt cannot be read"):
        generate(model_dir, prompt_file="nowhere.txt")


def test_any_temperature_gives_a_token() -> None:
    """As small as a float can be it is the likeliest one; as large, each is as likely as the others."""
    logits = torch.tensor([1.0, 3.0, -1e30, 2.0])
    generator = torch.Generator().manual_seed(1)
    assert {choose(logits, 5e-324, 1.0, generator) for _ in range(20)} == {1}
    assert {choose(logits, 1e308, 1.0, generator) for _ in range(100)} == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_spoilt_logits_are_one_message(temperature: float, value: float) -> None:
    with pytest.raises(ConfigError, match="logits are infinite or NaN; look at its weights"):
        choose(torch.tensor([1.0, value, 2.0]), temperature, 1.0, torch.Generator())


def test_more_tokens_than_the_model_was_made_for_are_noted(tmp_path: Path, capsys) -> None:
    model = make_model(tmp_path / "short", dataclasses.replace(TINY, max_position_embeddings=8))
    capsys.readouterr()
    generate(model, prompt="abc", raw=True, max_new_tokens=5)
    assert "note" not in capsys.readouterr().err
    generate(model, prompt="abc", raw=True, max_new_tokens=6)
    assert "note: prompt (3 tokens) and max-new-tokens (6) exceed the 8 positions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", b"{", r"generation_config\.json: not valid JSON .*; correct or remove it"),
        ("generation_config.json", b"\xff", r"generation_config\.json: not valid JSON"),
        ("generation_config.json", b"[2]", r"generation_config\.json: must hold a JSON object, got \[2\]"),
        (
            "generation_config.json",
            b'{"eos_token_id": "</s>"}',
            r"eos_token_id must be a token's id .*, got \['</s>'\]",
        ),
        ("generation_config.json", b'{"eos_token_id": [2, null]}', r"eos_token_id must be a token's id"),
        ("generation_config.json", b'{"eos_token_id": 2.5}', r"eos_token_id must be a token's id"),
        ("generation_config.json", b'{"eos_token_id": true}', r"eos_token_id must be a token's id"),
        ("tokenizer.json", b"{", "tokenizer does not load"),
        ("tokenizer.json", b"\xff\xfe", "tokenizer does not load"),
        ("tokenizer_config.json", b"{", "tokenizer does not load"),
        ("tokenizer_config.json", b"[]", "tokenizer does not load"),
        (
            "chat_template.jinja",
            b"{% for m in %}",
            "chat template fails .TemplateSyntaxError: .*; correct it, or set raw",
        ),
        ("chat_template.jinja", b"{{ raise_exception('no users') }}", "chat template fails .TemplateError: no users"),
        ("chat_template.jinja", b"{{ messages + 1 }}", "chat template fails .TypeError: "),
    ],
)
def test_odd_files_are_named_in_one_line(
    model_dir: Path, tmp_path: Path, monkeypatch, name: str, content: bytes, message: str
) -> None:
    model = damaged(model_dir, tmp_path / "model")
    (model / name).write_bytes(content)
    monkeypatch.setattr(module, "Decoder", None)  # no weights are loaded
    with pytest.raises(ConfigError, match=message) as error:
        generate(model, prompt="a")
    assert "\n" not in str(error.value)
