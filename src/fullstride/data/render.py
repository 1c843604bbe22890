"""Chats as the text that generation sees: a prompt, and what the model should say after it.

A chat template may write a turn that is the last one otherwise than the same turn further up: Qwen3's takes the
thoughts out of all answers but the last, and closes an empty think block before that one alone. So a chat is not
rendered once and searched for its answers. For every answer that is supervised, the prompt is what the template gives
for the messages before it, which is what generation would prompt the model with, and the answer follows it. Answers
whose prompt and end stand like that in the text of a later answer are supervised there: one document. The others get
documents of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fullstride.data.report import Report
from fullstride.data.rows import Message, Row
from fullstride.errors import ConfigError

Thinking = Literal["auto", "on", "off"]
Supervise = Literal["all", "last"]

# Letters only, so that no template trims or escapes it.
SENTINEL = "SENTINELANSWER"
THINK, END_OF_THINK = "<think>", "</think>"
# what a chat template's code stumbles over, besides what it raises itself
STUMBLES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
# Llama 3's templates write today's date, unless they are told one: a run that goes on tomorrow must see the same rows.
DATE = "26 Jul 2024"

NOTHING_LEFT = "no supervised token left"
EMPTY = "empty completion"
SPLIT = "several documents, since the chat template writes turns otherwise once others follow"
NOT_PROMPTED = "the chat template does not write in the prompt what stands before the answer"
UNTHOUGHT = "thoughts left out of answers (thinking = off)"


@dataclass
class Rendered:
    """A document: its text, and the characters [start, end) of its answers, in order."""

    row: Row
    text: str
    answers: list[tuple[int, int]] = field(default_factory=list)
    end: str = ""  # what the template writes after the last answer, beside white space

    def holds(self, prompt: str, content: str) -> bool:
        """Whether an answer stands after its prompt as it is, and with the end that the last answer has."""
        begin = len(prompt) + len(content)
        return bool(self.end) and self.text.startswith(prompt + content) and self.text.startswith(self.end, begin)


def render(tokenizer: Any, messages: Sequence[Message], thinking: bool, prompt: bool) -> str:
    """Messages in the tokenizer's chat template; `prompt`: up to where the assistant's answer begins.

    `thinking` is what templates with think blocks call enable_thinking. Raises ConfigError without a template, and
    whatever its code raises.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            "chat rows need a chat template, and this tokenizer has none: use the model's instruct version, put a "
            "chat_template.jinja into the model directory, or give rows of prompt and completion as plain text"
        )
    return tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=prompt, enable_thinking=thinking, date_string=DATE
    )


@dataclass(frozen=True)
class Renderer:
    """Rows as documents. What is changed or dropped on the way is counted in `report`.

    `thinking`: `on` and `off` prompt every answer alike; `auto` prompts an answer that holds thoughts as with on, and
    any other as with off, where an empty think block is part of the prompt.
    """

    tokenizer: Any
    thinking: Thinking
    supervise: Supervise
    report: Report

    def documents(self, row: Row) -> list[Rendered]:
        """One for a row in plain text; for a chat as many as its answers need; none where it is dropped."""
        if row.messages is None:
            text = row.prompt + row.completion
            return [Rendered(row, text, [(len(row.prompt), len(text))])]
        from jinja2 import TemplateError

        try:
            return self._chat(row, row.messages)
        except ConfigError:
            raise
        except (TemplateError, *STUMBLES) as error:  # such as roles that do not alternate
            reason = " ".join(str(error).split()) or type(error).__name__
            self.report.add(row.file, f"refused by the chat template: {reason:.200}", row.line)
            return []

    def _chat(self, row: Row, messages: list[Message]) -> list[Rendered]:
        if self.thinking == "off":
            messages = self._without_thoughts(row, messages)
        turns = [i for i, m in enumerate(messages) if i >= row.first_answer and m["role"] == "assistant"]
        turns = turns if self.supervise == "all" else turns[-1:]
        if not all(messages[turn]["content"].strip() for turn in turns):  # it held thoughts only
            self.report.add(row.file, EMPTY, row.line)
            return []
        documents: list[Rendered] = []
        for turn in reversed(turns):
            content = messages[turn]["content"]
            thinking = self.thinking == "on" or (self.thinking == "auto" and END_OF_THINK in content)
            prompt = render(self.tokenizer, messages[:turn], thinking, prompt=True)
            for document in documents:
                if document.holds(prompt, content):
                    document.answers.insert(0, (len(prompt), len(prompt) + len(content)))
                    break
            else:
                self._add(documents, row, prompt, messages[: turn + 1], thinking)
        if len(documents) > 1:
            self.report.add(row.file, SPLIT, row.line)
        if not documents:
            self.report.add(row.file, NOTHING_LEFT, row.line)
        return documents[::-1]

    def _without_thoughts(self, row: Row, messages: list[Message]) -> list[Message]:
        spoken = [
            {**m, "content": m["content"].rpartition(END_OF_THINK)[2].lstrip("\n")} if m["role"] == "assistant" else m
            for m in messages
        ]
        if any(a != b and END_OF_THINK in b["content"] for a, b in zip(spoken, messages, strict=True)):
            self.report.add(row.file, UNTHOUGHT, row.line)
            return spoken
        return messages

    def _add(self, documents: list[Rendered], row: Row, prompt: str, messages: list[Message], thinking: bool) -> None:
        """Supervise the last message in the document that holds it, with its end, else in a new one."""
        parts = self._turn(row, prompt, messages, thinking)
        if parts is None:
            return
        prompt, answer, tail = parts
        text = prompt + answer + tail
        for document in documents:
            if document.text.startswith(text):
                break
        else:
            documents.append(document := Rendered(row, text, end=tail.strip()))
        document.answers.insert(0, (len(prompt), len(prompt) + len(answer)))

    def _turn(self, row: Row, prompt: str, messages: list[Message], thinking: bool) -> tuple[str, str, str] | None:
        """Prompt, last message and what ends it, as text; None where the template leaves the message out.

        The prompt is that of generation. White space that the template writes after it is the model's to write, and so
        are thoughts that the answer holds, and the end of a think block that the prompt has opened. An empty think
        block that the template writes before an answer without thoughts is left out: generation has none there.
        """
        history, content = messages[:-1], messages[-1]["content"]
        thinks = END_OF_THINK in content
        whole = render(self.tokenizer, messages, thinking, prompt=False)
        follows = whole.startswith(prompt)
        if follows and whole.startswith(content, len(prompt)):  # most templates, most answers
            end = len(prompt) + len(content)
            return prompt, content, whole[end:]
        found = self._find_answer(whole, history, content, thinking)
        if found is None:
            return None
        start, end = found
        answer, tail, opened = whole[start:end], whole[end:], prompt.rstrip().endswith(THINK)
        if follows and (thinks or opened or not whole[len(prompt) : start].strip()):
            return prompt, whole[len(prompt) : end], tail
        if opened:  # the template knows no thoughts in an answer: they go on where the prompt has begun them
            return prompt, content.partition(THINK)[2].lstrip("\n") if thinks else f"\n{END_OF_THINK}\n\n{answer}", tail
        if follows and prompt == render(self.tokenizer, history, thinking, prompt=False):
            self.report.add(row.file, NOT_PROMPTED, row.line)
            return whole[:start], answer, tail
        return prompt, answer, tail

    def _find_answer(self, whole: str, history: list[Message], content: str, thinking: bool) -> tuple[int, int] | None:
        """The characters of `whole` that stand for the last message's content; None if the template leaves it out.

        The chat is rendered again with a sentinel as that content. What comes before and after the sentinel is the
        template's and the other messages'; what `whole` has instead of the sentinel is the answer, whatever the
        template has trimmed.
        """
        sentinel = SENTINEL
        while sentinel in whole:
            sentinel += "X"
        messages = [*history, {"role": "assistant", "content": sentinel}]
        head, found, tail = render(self.tokenizer, messages, thinking, prompt=False).partition(sentinel)
        if not found:
            return None
        start = _common_prefix(whole, head)
        end = len(whole) - _common_prefix(whole[start:][::-1], tail[::-1])
        return start, end


def _common_prefix(a: str, b: str) -> int:
    """Number of characters that two texts begin with alike."""
    length = min(len(a), len(b))
    codes = [np.frombuffer(text[:length].encode("utf-32-le"), dtype=np.uint32) for text in (a, b)]
    differ = np.flatnonzero(codes[0] != codes[1])
    return int(differ[0]) if differ.size else length
