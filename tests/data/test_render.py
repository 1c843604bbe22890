"""Chat templates that render a turn otherwise once others follow, and what generation would prompt with."""

from __future__ import annotations

from typing import Any

import pytest
from tests.conftest import shared
from tests.data.test_chat import END, LONG, chat, encode_rows, labels, load_tokenizer, with_template
from tests.data.test_rows import read_rows

from fullstride.data.examples import Example
from fullstride.data.render import EMPTY, NOT_PROMPTED, SPLIT, UNTHOUGHT, render
from fullstride.data.report import Report
from fullstride.data.rows import Row
from fullstride.run.generate import chat_ids

THOUGHT = "<think>\nSome {0} thought.\n</think>\n\n"


def documents(row: Row, tokenizer: Any, report: Report | None = None, **keys: Any) -> list[Example]:
    return encode_rows([row], tokenizer, LONG, report or Report(), **keys)


def spoken(examples: list[Example], tokenizer: Any) -> list[str]:
    """The text of all labels."""
    return [label for example in examples for label in labels(example, tokenizer)]


def prompts(examples: list[Example]) -> list[list[int]]:
    """The ids before each run of labels."""
    found = []
    for example in examples:
        starts = [i for i in range(1, len(example.ids)) if example.supervised[i] and not example.supervised[i - 1]]
        found += [example.ids[:start].tolist() for start in starts]
    return found


def conversation(num_turns: int, thoughts: bool, system: str | None = None) -> tuple[Row, list[str]]:
    answers = [THOUGHT.format(i) * thoughts + f"Answer {i}: it is {i * 7}." for i in range(num_turns)]
    row = chat(*[text for i, answer in enumerate(answers) for text in (f"Question {i}?", answer)], system=system)
    return row, answers


def check(row: Row, answers: list[str], tokenizer: Any, thinking: bool, end: str = END, **keys: Any) -> list[Example]:
    """Labels are exactly the answers and their end tokens, and what stands before each is generation's prompt."""
    examples = documents(row, tokenizer, **keys)
    assert spoken(examples, tokenizer) == [answer + end for answer in answers]
    assert row.messages is not None
    turns = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"][-len(answers) :]
    assert prompts(examples) == [chat_ids(tokenizer, row.messages[:turn], thinking) for turn in turns]
    return examples


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("num_turns", [1, 2, 4])
@pytest.mark.parametrize("thoughts", [False, True])
def test_qwen3_thinking_on_and_off(num_turns: int, thoughts: bool, system: str | None) -> None:
    qwen3 = load_tokenizer("qwen3")
    row, answers = conversation(num_turns, thoughts, system)
    assert len(check(row, answers, qwen3, thinking=thoughts)) == num_turns  # auto
    check(row, answers[-1:], qwen3, thinking=thoughts, supervise="last")


@pytest.mark.parametrize("num_turns", [1, 2, 4])
@pytest.mark.parametrize("thoughts", [False, True])
@pytest.mark.parametrize("thinking", ["on", "off"])
def test_qwen3_prompted_one_way_whatever_the_answers(num_turns: int, thoughts: bool, thinking: str) -> None:
    qwen3 = load_tokenizer("qwen3")
    row, answers = conversation(num_turns, thoughts)
    report = Report()
    examples = documents(row, qwen3, report, thinking=thinking)
    if thinking == "off":  # thoughts have no place there
        answers = [answer.rpartition("</think>\n\n")[2] for answer in answers]
        assert (UNTHOUGHT in {event["reason"] for event in report.events()}) == thoughts
    assert spoken(examples, qwen3) == [answer + END for answer in answers]
    assert row.messages is not None
    expected = [chat_ids(qwen3, row.messages[:turn], thinking == "on") for turn in range(1, 2 * num_turns, 2)]
    assert prompts(examples) == expected
    # Without thoughts, and without the block that says there are none, a turn stands the same wherever it is.
    assert len(examples) == (1 if thinking == "on" and not thoughts else num_turns)
    assert (SPLIT in {event["reason"] for event in report.events()}) == (len(examples) > 1)


def test_every_prompt_of_a_real_chat_is_that_of_generation() -> None:
    qwen3 = load_tokenizer("qwen3")
    for row in read_rows(shared("data", "chat", "validation.jsonl"), Report()):
        assert row.messages is not None
        turns = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        check(row, [row.messages[i]["content"] for i in turns], qwen3, thinking=False)


def test_an_answer_of_thoughts_alone_is_no_answer_without_them() -> None:
    report = Report()
    assert documents(chat("Hi", "<think>\nHm.\n</think>\n\n"), load_tokenizer("qwen3"), report, thinking="off") == []
    assert [event["reason"] for event in report.events()] == [UNTHOUGHT, EMPTY]


def test_thoughts_that_the_template_writes_anew_are_answer() -> None:
    qwen3 = load_tokenizer("qwen3")
    row = chat("Hi", "<think>A greeting.</think>Hello")
    assert spoken(documents(row, qwen3), qwen3) == ["<think>\nA greeting.\n</think>\n\nHello" + END]


LLAMA3 = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
    "<|im_start|>system<|sep|>\n\nToday Date: {{ date_string }}\n\n{{ system }}<|im_end|>"
    "{% for m in messages %}<|im_start|>{{ m.role }}<|sep|>\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|sep|>\n\n{% endif %}"
)
MISTRAL = (  # the system's message goes into the last user's turn, and white space follows the prompt
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{{ bos_token }}{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('conversation roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{% set last = rest | selectattr('role', 'equalto', 'user') | list | last %}"
    "[INST] {{ system if m == last else '' }}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
# DeepSeek-R1's kind: thoughts vanish from all answers, and the prompt opens a think block
R1 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>A:{{ m.content.split('</think>')[-1] }}<|im_end|>"
    "{% else %}<|im_start|>U:{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>A:<think>\n{% endif %}"
)
NO_PROMPT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("system", [None, " Be brief. "])
@pytest.mark.parametrize("num_turns", [1, 2, 4])
def test_a_template_like_llama_3s(num_turns: int, system: str | None) -> None:
    tokenizer = with_template(load_tokenizer("qwen2.5"), LLAMA3)  # like Llama 3's, it cuts text after line ends
    row, answers = conversation(num_turns, thoughts=False, system=system)
    assert len(check(row, answers, tokenizer, thinking=False)) == 1
    assert "Today Date: 26 Jul 2024" in render(tokenizer, row.messages or [], False, prompt=False)


@pytest.mark.parametrize(("system", "count"), [(None, 1), ("Be brief.", 4)])
def test_a_template_like_mistrals(system: str | None, count: int) -> None:
    tokenizer = with_template(load_tokenizer("smollm2"), MISTRAL)
    row, answers = conversation(4, thoughts=False, system=system)
    # the space after the prompt is the model's to write
    assert len(check(row, [f" {answer}" for answer in answers], tokenizer, thinking=False)) == count
    report = Report()
    twice = [*(chat("a?", "yes").messages or []), {"role": "assistant", "content": "no"}]
    assert documents(Row("a.jsonl", 7, messages=twice), tokenizer, report) == []
    assert report.events()[0]["reason"] == "refused by the chat template: conversation roles must alternate"


def test_a_think_block_that_the_prompt_opens() -> None:
    tokenizer = with_template(load_tokenizer("smollm2"), R1)
    row = chat("a?", "<think>\nHm.\n</think>\n\nyes", "b?", "no")
    examples = documents(row, tokenizer)
    assert spoken(examples, tokenizer) == ["Hm.\n</think>\n\nyes" + END, "\n</think>\n\nno" + END]
    assert row.messages is not None
    assert prompts(examples) == [chat_ids(tokenizer, row.messages[:turn], True) for turn in (1, 3)]


def test_a_template_without_generation_prompt_is_named() -> None:
    tokenizer = with_template(load_tokenizer("smollm2"), NO_PROMPT)
    row, answers = conversation(2, thoughts=False)
    report = Report()
    (example,) = documents(row, tokenizer, report)
    assert labels(example, tokenizer) == [answer + END for answer in answers]
    assert {event["reason"] for event in report.events()} == {NOT_PROMPTED}


def test_a_template_without_end_tokens() -> None:
    tokenizer = with_template(load_tokenizer("smollm2"), NO_END)
    row, answers = conversation(2, thoughts=False)
    (example,) = documents(row, tokenizer)
    assert [label.strip() for label in labels(example, tokenizer)] == [answers[0], answers[1] + END]


@pytest.mark.parametrize("name", ["qwen3", "qwen2.5", "smollm2"])
def test_empty_turns_of_others_are_no_fault(name: str) -> None:
    tokenizer = load_tokenizer(name)
    row = chat("", "yes", "b?", "no", system="")
    check(row, ["yes", "no"], tokenizer, thinking=False)
