"""Text from a model: prompt, sampling, streaming."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fullstride.config import resolve_device
from fullstride.engine.decode import Decoder
from fullstride.errors import ConfigError
from fullstride.model.spec import ModelConfig
from fullstride.run.source import find_model, load_tokenizer
from fullstride.trainer.trainer import DTYPES


def generate(
    model: str,
    adapter: str = "",
    prompt: str = "",
    prompt_file: str = "",
    system: str = "",
    raw: bool = False,
    max_new_tokens: int = 200,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 42,
    dtype: str = "",
    device: str = "auto",
) -> str:
    """Print the continuation of a prompt as it comes, and return it. The rate goes to standard error.

    Raises ConfigError for a model, adapter or prompt that cannot be used.
    """
    directory = find_model(model)
    tokenizer = load_tokenizer(directory, ModelConfig.from_pretrained(directory))
    device = resolve_device(device)
    if prompt_file:
        prompt = _read_prompt(Path(prompt_file))
    ids = prompt_ids(tokenizer, prompt, system, raw)
    number = DTYPES[dtype or ("bf16" if device == "cuda" else "fp32")]
    decoder = Decoder.from_pretrained(directory, adapter or None, number, torch.device(device))
    started, count, text = time.perf_counter(), 0, TextStream(tokenizer, print_piece)
    stops = stop_ids(directory, tokenizer)
    for token in tokens(decoder, ids, stops, max_new_tokens, temperature, top_p, seed):
        count += 1
        if token not in stops:
            text.push(token)
    text.close()
    print(flush=True)
    seconds = time.perf_counter() - started
    print(
        f"{count} tokens in {seconds:.1f} s: {count / seconds:.1f} tokens/s, prompt {len(ids)} tokens", file=sys.stderr
    )
    return text.text


def print_piece(piece: str) -> None:
    """Write a piece of text to standard output at once."""
    print(piece, end="", flush=True)


def _read_prompt(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompt-file: {file} cannot be read as UTF-8 text ({error})") from None


def prompt_ids(tokenizer: Any, prompt: str, system: str = "", raw: bool = False) -> list[int]:
    """Token ids of a user's turn in the chat template, up to where the assistant's answer begins; raw: of the text.

    Raises ConfigError for a prompt without tokens, and as `chat_ids`.
    """
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    ids = list(tokenizer(prompt)["input_ids"]) if raw else chat_ids(tokenizer, messages)
    if not ids:
        raise ConfigError("the prompt has no tokens; give some text")
    return ids


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of messages, up to where the assistant's answer begins. ConfigError without a chat template."""
    if not tokenizer.chat_template:
        raise ConfigError("the tokenizer has no chat template; set raw to continue the prompt as it is")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def stop_ids(directory: Path, tokenizer: Any) -> set[int]:
    """End tokens: the tokenizer's, and those that generation_config.json and config.json name."""
    found = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        if (directory / name).is_file():
            ids = json.loads((directory / name).read_text(encoding="utf-8")).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [ids])
    return {int(token) for token in found if token is not None}


def tokens(
    decoder: Decoder, prompt: list[int], stops: set[int], most: int, temperature: float, top_p: float, seed: int
) -> Iterator[int]:
    """New tokens one by one, at most `most`, the end token being the last. Starts from an empty cache."""
    generator = torch.Generator().manual_seed(seed)
    decoder.reset()
    new = prompt
    for _ in range(most):
        token = choose(decoder.logits(new), temperature, top_p, generator)
        yield token
        if token in stops:
            return
        new = [token]


def choose(logits_V: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """The likeliest token at temperature 0; else a draw among the likeliest ones that together reach `top_p`.

    Nucleus sampling of Holtzman et al., arXiv 1904.09751; the draw is made on the CPU, so a seed means one text.
    """
    if temperature == 0:
        return int(logits_V.argmax())
    p_V, order_V = torch.softmax(logits_V.float().cpu() / temperature, 0).sort(descending=True, stable=True)
    # the token that crosses top_p is still in; the first one always is
    p_V[1:][p_V.cumsum(0)[:-1] >= top_p] = 0
    return int(order_V[torch.multinomial(p_V, 1, generator=generator)])


class TextStream:
    """Turns tokens into text as they come; a character of several tokens waits until it is whole."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._write = write
        self._ids: list[int] = []

    def push(self, token: int) -> None:
        """Take one token."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            self._emit(text)

    def close(self) -> None:
        """Write what still waits."""
        self._emit(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _emit(self, text: str) -> None:
        self._write(text[len(self.text) :])
        self.text = text
