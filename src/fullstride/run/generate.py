"""Text from a model: prompt, sampling, streaming."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fullstride.config import default_dtype, resolve_device
from fullstride.config.commands import GenerateConfig
from fullstride.data.render import render
from fullstride.engine.decode import Decoder
from fullstride.errors import ConfigError
from fullstride.model.spec import ModelConfig
from fullstride.run.source import find_model, load_tokenizer
from fullstride.trainer.trainer import DTYPES


def generate(config: GenerateConfig) -> str:
    """Print the continuation of a prompt as it comes, and return it. The rate goes to standard error.

    Raises ConfigError for a model, adapter or prompt that cannot be used.
    """
    c = config
    directory = find_model(c.model)
    model = ModelConfig.from_pretrained(directory)
    tokenizer = load_tokenizer(directory, model)
    stops = stop_ids(directory, tokenizer)
    device = resolve_device(c.device)
    prompt = _read_prompt(Path(c.prompt_file)) if c.prompt_file else c.prompt
    ids = prompt_ids(tokenizer, prompt, c.system, c.raw, c.thinking == "on")
    dtype = DTYPES[c.dtype or default_dtype(device)]
    check_length(model, len(ids), c.max_new_tokens)
    decoder = Decoder.from_pretrained(directory, c.adapter or None, dtype, torch.device(device))
    started, count, text = time.perf_counter(), 0, TextStream(tokenizer, print_piece)
    for token in tokens(decoder, ids, stops, c.max_new_tokens, c.temperature, c.top_p, c.seed):
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


def check_length(model: ModelConfig, prompt: int, new: int) -> None:
    """Say on standard error when the text may outgrow the positions that the model was made for."""
    if prompt + new > model.max_position_embeddings:
        print(
            f"note: prompt ({prompt:,} tokens) and max-new-tokens ({new:,}) exceed the "
            f"{model.max_position_embeddings:,} positions of the model (max_position_embeddings)",
            file=sys.stderr,
        )


def print_piece(piece: str) -> None:
    """Write a piece of text to standard output at once."""
    print(piece, end="", flush=True)


def _read_prompt(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompt-file: {file} cannot be read as UTF-8 text ({error})") from None


def prompt_ids(tokenizer: Any, prompt: str, system: str = "", raw: bool = False, thinking: bool = False) -> list[int]:
    """Token ids of a user's turn in the chat template, up to where the assistant's answer begins; raw: of the text.

    Raises ConfigError for a prompt without tokens, and as `chat_ids`.
    """
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    ids = list(tokenizer(prompt)["input_ids"]) if raw else chat_ids(tokenizer, messages, thinking)
    if not ids:
        raise ConfigError("the prompt has no tokens; give some text")
    return ids


def chat_ids(tokenizer: Any, messages: list[dict[str, str]], thinking: bool = False) -> list[int]:
    """Token ids of messages, up to where the assistant's answer begins: what fine-tuning puts before an answer.

    Raises ConfigError without a chat template, and for one that fails or refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ConfigError("the tokenizer has no chat template; set raw to continue the prompt as it is")
    try:
        text = render(tokenizer, messages, thinking, prompt=True)
    except Exception as error:  # a template is a program of the model's publisher: it may raise anything
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the tokenizer's chat template fails ({type(error).__name__}: {reason}); "
            "correct it, or set raw to continue the prompt as it is"
        ) from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def stop_ids(directory: Path, tokenizer: Any) -> set[int]:
    """End tokens: the tokenizer's, and those that generation_config.json and config.json name.

    Raises ConfigError for a file that is not what it should be.
    """
    found = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    for name in ("generation_config.json", "config.json"):
        if (directory / name).is_file():
            found.update(_end_tokens(directory / name))
    return found


def _end_tokens(file: Path) -> list[int]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error}); correct or remove it") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: must hold a JSON object, got {settings!r:.60}; correct or remove it")
    ids = settings.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(token) is int for token in ids):
        raise ConfigError(f"{file}: eos_token_id must be a token's id or a list of them, got {ids!r:.60}; correct it")
    return ids


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
    Raises ConfigError for logits that are NaN or infinite.
    """
    if not logits_V.max().isfinite():  # the maximum of what holds a NaN is NaN
        raise ConfigError(
            "the model's logits are infinite or NaN; look at its weights and the adapter's, or set dtype = fp32"
        )
    if temperature == 0:
        return int(logits_V.argmax())
    # float64, and the largest made 0: however small the temperature, nothing becomes infinity minus infinity
    logits_V = logits_V.double().cpu()
    p_V, order_V = torch.softmax((logits_V - logits_V.max()) / temperature, 0).sort(descending=True, stable=True)
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
