"""Chats and plain rows as token ids, and which of them are labels."""

from __future__ import annotations

import copy
import re
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.conftest import shared
from tests.data.test_rows import read_rows

from fullstride.data.chat import Encoder, nothing_left, spans
from fullstride.data.examples import Example, check_ids
from fullstride.data.render import SPLIT
from fullstride.data.report import Report
from fullstride.data.rows import Row
from fullstride.errors import ConfigError, DataError

NAMES = ["qwen3", "qwen2.5", "smollm2"]
END = "<|im_end|>"
LONG = 100_000


@lru_cache
def load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared("data", "tokenizers", name))


@pytest.fixture(params=NAMES)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return load_tokenizer(request.param)


@pytest.fixture
def smollm2() -> Any:
    return load_tokenizer("smollm2")


@cache  # a deep copy takes seconds
def with_template(tokenizer: Any, template: str | None, **attributes: Any) -> Any:
    # A shallow copy shares the special tokens.
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    for name, value in attributes.items():
        setattr(changed, name, value)
    return changed


def encode_rows(rows: list[Row], tokenizer: Any, seq_len: int, report: Report, **keys: Any) -> list[Example]:
    return Encoder(tokenizer, seq_len, report, **keys).encode(rows)


def encode(row: Row, tokenizer: Any, seq_len: int, report: Report, **keys: Any) -> Example | None:
    """The document of a row that has one, or None."""
    examples = encode_rows([row], tokenizer, seq_len, report, **keys)
    assert len(examples) <= 1
    return examples[0] if examples else None


def chat(*contents: str, system: str | None = None) -> Row:
    """User and assistant in turn; `system` before them."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return Row("a.jsonl", 1, messages=[{"role": "system", "content": system}] * (system is not None) + turns)


def text_row(prompt: str, completion: str) -> Row:
    return Row("a.jsonl", 1, prompt=prompt, completion=completion)


def encoded(row: Row, tokenizer: Any, seq_len: int = LONG, **keys: Any) -> Example:
    example = encode(row, tokenizer, seq_len, Report(), **keys)
    assert example is not None
    assert example.ids.dtype == np.int32 and example.supervised.dtype == bool
    assert len(example.ids) == len(example.supervised) <= seq_len
    assert not example.supervised[0]
    return example


def labels(example: Example, tokenizer: Any) -> list[str]:
    """The text of each run of supervised tokens."""
    runs = np.split(np.arange(len(example.ids)), np.flatnonzero(np.diff(example.supervised)) + 1)
    return [tokenizer.decode(example.ids[run].tolist()) for run in runs if example.supervised[run[0]]]


def prompt_text(example: Example, tokenizer: Any) -> str:
    """The text before the first label."""
    return tokenizer.decode(example.ids[: int(example.supervised.argmax())].tolist())


@pytest.mark.parametrize("num_turns", [1, 2, 4])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_labels_are_the_answers_and_their_end_tokens(tokenizer: Any, num_turns: int, system: str | None) -> None:
    answers = [f"Answer {i}: it is {i * 7}.\n\n- one\n- two \U0001f600" for i in range(num_turns)]
    row = chat(*[text for i, answer in enumerate(answers) for text in (f"Question {i}?", answer)], system=system)
    examples = encode_rows([row], tokenizer, LONG, Report())
    assert [label for example in examples for label in labels(example, tokenizer)] == [a + END for a in answers]
    assert labels(encoded(row, tokenizer, supervise="last"), tokenizer) == [answers[-1] + END]
    assert row.messages is not None
    text = tokenizer.apply_chat_template(row.messages, tokenize=False)
    assert tokenizer.decode(examples[-1].ids.tolist()) == text.removesuffix("\n")


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_the_prompt_is_that_of_generation(tokenizer: Any, system: str | None) -> None:
    row = chat("What is 2 + 2?", "4", system=system)
    assert row.messages is not None
    prompt = tokenizer.apply_chat_template(
        row.messages[:-1], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    example = encoded(row, tokenizer)
    assert example.ids[: len(ids)].tolist() == ids
    assert example.supervised.tolist() == [False] * len(ids) + [True] * 2  # "4" and the end token


def test_the_think_block_of_the_template_is_prompt_and_that_of_the_row_is_answer() -> None:
    qwen3 = load_tokenizer("qwen3")
    inserted = encoded(chat("Hi", "Hello"), qwen3)
    assert prompt_text(inserted, qwen3).endswith("assistant\n<think>\n\n</think>\n\n")
    thought = "<think>\nA greeting.\n</think>\n\nHello"
    assert labels(encoded(chat("Hi", thought), qwen3), qwen3) == [thought + END]
    # The template drops the thoughts of turns before the last question, where a document of its own keeps them.
    first, last = encode_rows([chat("Hi", thought, "Bye", "Ciao")], qwen3, LONG, Report())
    assert labels(first, qwen3) == [thought + END] and labels(last, qwen3) == ["Ciao" + END]
    assert "greeting" not in prompt_text(last, qwen3)


@pytest.mark.parametrize("answer", ["\nyes", "\n\n  yes", " yes", "\t- yes", "\u00e9", "e\u0301"])
def test_an_answers_first_token_is_never_left_out(tokenizer: Any, answer: str) -> None:
    example = encoded(chat("Say yes.", answer), tokenizer)
    first = int(example.supervised.argmax())
    prompt = prompt_text(example, tokenizer)
    # The tokens before the first label hold nothing of the answer ...
    assert prompt.endswith(("assistant", "assistant\n", "</think>\n\n", "</think>"))
    # ... and all the rest is label.
    assert example.supervised[first:].all()
    assert labels(example, tokenizer)[0].strip() in ("yes" + END, "- yes" + END, "\u00e9" + END, "e\u0301" + END)


def test_the_token_that_merges_answer_and_template_is_a_label() -> None:
    qwen = load_tokenizer("qwen2.5")
    example = encoded(chat("Say yes.", "\nyes"), qwen)
    merged = qwen("\n\n", add_special_tokens=False)["input_ids"]
    assert len(merged) == 1
    assert example.ids[example.supervised][0] == merged[0]
    assert prompt_text(example, qwen).endswith("<|im_start|>assistant")


def test_a_special_token_in_text_does_not_end_a_turn(tokenizer: Any) -> None:
    user = f"What does {END} do? And {END}\n<|im_start|>assistant\nthis?"
    answer = f"It writes {END} at the end."
    examples = encode_rows([chat(user, answer, user, "Yes.")], tokenizer, LONG, Report())
    assert [label for example in examples for label in labels(example, tokenizer)] == [answer + END, "Yes." + END]


def test_an_answer_that_is_also_the_prompt_or_the_sentinel(tokenizer: Any) -> None:
    for text in ("yes", "SENTINELANSWER", "SENTINELANSWERX", "<|im_start|>assistant\n", f"a{END}", f"a{END}\n"):
        examples = encode_rows([chat(text, text, text, text)], tokenizer, LONG, Report())
        assert [label for example in examples for label in labels(example, tokenizer)] == [text + END] * 2


def test_only_the_completion_of_a_conversational_row_is_label(tokenizer: Any) -> None:
    messages = chat("a?", "first", "b?", "second").messages
    example = encoded(Row("a.jsonl", 1, messages=messages, first_answer=3), tokenizer)
    assert labels(example, tokenizer) == ["second" + END]


TRIMS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
SPACE_BEFORE_END = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} <|im_end|>{% endif %}{% endfor %}"
)
NO_END = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
LAST_ANSWER_ONLY = (
    "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content }}\n{% endif %}{% endfor %}"
)
REFUSES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% for m in messages %}{{ m.content }} {% endfor %}"
)


def test_a_template_that_trims(smollm2: Any) -> None:
    tokenizer = with_template(smollm2, TRIMS)
    example = encoded(chat(" a? ", "\n\n yes \n", "b?", " no", "c?", "\n\nmaybe"), tokenizer)
    # The template's own two newlines stand before "maybe": they are not those of the answer, which were trimmed.
    assert labels(example, tokenizer) == ["yes" + END, "no" + END, "maybe" + END]


def test_white_space_before_the_end_token_is_learned_with_it(smollm2: Any) -> None:
    tokenizer = with_template(smollm2, SPACE_BEFORE_END)
    example = encoded(chat("a?", "yes", "b?", "no"), tokenizer)
    assert [label.strip() for label in labels(example, tokenizer)] == ["yes " + END, "no " + END]


def test_a_template_without_end_token_gets_the_tokenizers(smollm2: Any) -> None:
    tokenizer = with_template(smollm2, NO_END)
    example = encoded(chat("a?", "yes", "b?", "no"), tokenizer)
    # The special token that begins the next turn is not taken for the end of this one.
    assert [label.strip() for label in labels(example, tokenizer)] == ["yes", "no" + END]
    assert example.ids[-1] == tokenizer.eos_token_id
    with pytest.raises(ConfigError, match="no end token"):
        encode(chat("a?", "yes"), with_template(smollm2, NO_END, eos_token=None), LONG, Report())


def test_an_answer_that_the_template_takes_out_of_later_turns_has_a_document_of_its_own(smollm2: Any) -> None:
    tokenizer = with_template(smollm2, LAST_ANSWER_ONLY)
    report = Report()
    first, last = encode_rows([chat("a?", "yes", "b?", "no")], tokenizer, LONG, report)
    assert tokenizer.decode(first.ids.tolist()).split() == ["a?", "yes" + END]
    assert tokenizer.decode(last.ids.tolist()).split() == ["a?", "b?", "no" + END]
    assert [(event["reason"], event["count"]) for event in report.events()] == [(SPLIT, 1)]


def test_a_row_that_the_template_refuses_is_dropped_and_counted(smollm2: Any) -> None:
    report = Report()
    rows = [chat("a?", "yes", system="s"), chat("a?", "yes")]
    assert len(encode_rows(rows, with_template(smollm2, REFUSES), LONG, report)) == 1
    assert [event["reason"] for event in report.events()] == ["refused by the chat template: roles must alternate"]


@pytest.mark.parametrize("stumble", ["1 // 0", "messages[0].content + 3", "messages[0].content.split(9)"])
def test_a_row_that_the_template_stumbles_over_is_dropped_and_counted(smollm2: Any, stumble: str) -> None:
    template = "{% if messages|length > 2 %}{{ " + stumble + " }}{% endif %}" + smollm2.chat_template
    report = Report()
    rows = [chat("a?", "yes", system="s"), chat("a?", "yes")]
    assert len(encode_rows(rows, with_template(smollm2, template), LONG, report)) == 1
    assert report.events()[0]["reason"].startswith("refused by the chat template: ")


def test_tokenizers_that_cannot_do_it_are_refused(smollm2: Any) -> None:
    bare = with_template(smollm2, None)
    with pytest.raises(ConfigError, match=r"chat template.*chat_template\.jinja"):
        encode(chat("a?", "yes"), bare, LONG, Report())
    assert labels(encoded(text_row("a?", " yes"), bare), bare) == [" yes" + END]
    with pytest.raises(ConfigError, match="no character offsets"):
        encode(chat("a?", "yes"), SimpleNamespace(is_fast=False), LONG, Report())


@pytest.mark.parametrize(
    ("prompt", "completion", "label"),
    [
        ("Two plus two is", " four.", " four."),
        ("Two plus two is ", "four.", " four."),  # " four" is one token, which the completion's characters are part of
        ("Q: hel", "lo", "hello"),
        ("line\n", "\nline", None),
        ("Q:", f" done{END}", " done"),  # its own end token is not doubled
        ("", "Once upon a time", None),
    ],
)
def test_prompt_and_completion_are_one_text(smollm2: Any, prompt: str, completion: str, label: str | None) -> None:
    example = encoded(text_row(prompt, completion), smollm2)
    assert smollm2.decode(example.ids.tolist()) == prompt + completion.removesuffix(END) + END
    assert example.ids[-1] == smollm2.eos_token_id and example.supervised[-1]
    assert example.ids[-2] != smollm2.eos_token_id
    if label is not None:
        assert labels(example, smollm2)[0].strip() == label.strip() + END


def test_a_tokenizer_that_adds_a_beginning_token_gets_one_for_plain_text(smollm2: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    adds_bos = copy.deepcopy(smollm2)
    bos = adds_bos.bos_token
    adds_bos._tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, adds_bos.bos_token_id)]
    )
    assert adds_bos("a")["input_ids"][0] == adds_bos.bos_token_id
    example = encoded(text_row("", "yes"), adds_bos)
    assert adds_bos.decode(example.ids.tolist()) == bos + "yes" + END
    assert example.supervised.tolist() == [False] + [True] * (len(example.ids) - 1)
    ids = encoded(text_row(f"{bos}a", "b"), adds_bos).ids.tolist()
    assert ids.count(adds_bos.bos_token_id) == 1  # not doubled
    chat_ids = encoded(chat("a?", "yes"), adds_bos).ids
    np.testing.assert_array_equal(chat_ids, encoded(chat("a?", "yes"), smollm2).ids)


def words(num: int) -> str:
    """A text of `num` tokens, for SmolLM2 and a text that begins with it or follows it."""
    return " the" * num


def test_a_long_prompt_loses_its_beginning(smollm2: Any) -> None:
    report = Report()
    whole = encoded(text_row(" begin" + words(59), " end" + words(3)), smollm2)
    assert len(whole.ids) == 60 + 5
    example = encode(text_row(" begin" + words(59), " end" + words(3)), smollm2, 48, report)
    assert example is not None
    np.testing.assert_array_equal(example.ids, whole.ids[-48:])
    assert example.supervised.tolist() == [False] * 43 + [True] * 5
    assert [(event["reason"], event["lines"]) for event in report.events()] == [("truncated", [1])]


@pytest.mark.parametrize("num_completion", [46, 47, 48, 49, 200])
def test_a_completion_as_long_as_the_row_leaves_no_prompt(smollm2: Any, num_completion: int) -> None:
    """`num_completion` counts the end token; a row has 48."""
    example = encoded(text_row(" begin" + words(9), " end" + words(num_completion - 2)), smollm2, 48)
    ids = smollm2(" begin" + words(9) + " end" + words(num_completion - 2))["input_ids"] + [smollm2.eos_token_id]
    begin = max(len(ids) - max(48, num_completion), 0)
    assert example.ids.tolist() == ids[begin : begin + 48]
    # The row's first token has nothing before it that could predict it.
    assert example.supervised.sum() == min(num_completion, 47)


def test_a_long_chat_keeps_its_last_answer(tokenizer: Any) -> None:
    row = chat("a? " * 50, "first " * 50, "b? " * 50, "Yes, it is.")
    example = encode_rows([row], tokenizer, 64, Report())[-1]
    assert len(example.ids) == 64
    assert labels(example, tokenizer)[-1] == "Yes, it is." + END
    example = encode_rows([row], tokenizer, 4, Report())[-1]
    assert example.supervised.tolist() == [False, True, True, True]
    assert tokenizer.decode(example.ids.tolist()).lstrip() in ("Yes, it is", "Yes, it is.")


def test_truncate_drop_and_error(smollm2: Any) -> None:
    rows = [text_row("a", " b"), Row("a.jsonl", 2, prompt=words(60), completion=" b")]
    report = Report()
    assert [example.line for example in encode_rows(rows, smollm2, 48, report, truncate="drop")] == [1]
    assert [(event["reason"], event["lines"]) for event in report.events()] == [("over seq-len", [2])]
    with pytest.raises(DataError, match=r"a\.jsonl line 2: 62 tokens, but seq-len is 48"):
        encode_rows(rows, smollm2, 48, Report(), truncate="error")


def test_a_row_without_any_label_is_dropped(smollm2: Any) -> None:
    tokenizer = with_template(smollm2, "{{ messages[0].content }}")  # a template that leaves answers out
    rows = [Row("a.jsonl", line, prompt="a", completion=" b") for line in range(1, 8)]
    lost = Row("a.jsonl", 8, messages=chat("a?", "yes").messages)
    report = Report()
    assert len(encode_rows([*rows, lost], tokenizer, 48, report)) == 7
    assert [(event["reason"], event["lines"]) for event in report.events()] == [("no supervised token left", [8])]
    # One position: the only token of each row is its first, which nothing predicts.
    report = Report()
    assert encode_rows(rows, tokenizer, 1, report) == []
    assert [(event["reason"], event["count"]) for event in report.events()] == [("no supervised token left", 7)]
    words = r"no data rows left with seq-len 1: a\.jsonl: 7 rows: no supervised token left .*raise seq-len"
    assert re.match(words, str(nothing_left(1, report)))
    assert "the files hold no rows" in str(nothing_left(1, Report()))


def test_ids_that_the_model_does_not_have(smollm2: Any) -> None:
    example = Example(np.array([5, 49_152, 6], dtype=np.int32), np.array([False, True, True]), "a.jsonl", 3)
    with pytest.raises(DataError, match=r"a\.jsonl line 3: token id 49152, but the model has 49152 embedding rows"):
        check_ids([encoded(chat("a?", "yes"), smollm2), example], len(smollm2))
    check_ids([example], 49_153)
    check_ids([encoded(chat("a?", "yes"), smollm2)], len(smollm2) + 128)


def test_spans_are_cut_where_labels_begin_and_end(smollm2: Any) -> None:
    example = encoded(chat("a?", "yes", "b?", "no", system="s"), smollm2)
    assert "".join(f"«{text}»" if label else text for text, label in spans(example, smollm2)) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n"
        "<|im_start|>user\nb?<|im_end|>\n<|im_start|>assistant\n«no<|im_end|>»"
    )


@pytest.mark.parametrize("file", ["chat/validation", "ami/test"])
def test_shared_rows_have_their_answers_as_labels(tokenizer: Any, file: str) -> None:
    rows = read_rows(shared("data", f"{file}.jsonl"), Report())
    report = Report()
    examples = encode_rows(rows, tokenizer, LONG, report)
    assert {event["reason"] for event in report.events()} <= {SPLIT}
    assert len(examples) == len(rows) or report.total
    for row in rows:
        assert row.messages is not None
        answers = [message["content"] for message in row.messages if message["role"] == "assistant"]
        found = [label for example in examples if example.line == row.line for label in labels(example, tokenizer)]
        # Surrounding white space may merge with, or be trimmed by, the template.
        assert [label.strip() for label in found] == [answer.strip() + END for answer in answers]


def test_rows_are_the_same_alone_and_together(smollm2: Any) -> None:
    rows = read_rows(shared("data", "chat", "train.jsonl"), Report())[:300]  # more than one call of the tokenizer
    together = encode_rows(rows, smollm2, 128, Report())
    alone = [encoded(row, smollm2, 128) for row in rows]
    assert [(e.ids.tolist(), e.supervised.tolist(), e.line) for e in together] == [
        (e.ids.tolist(), e.supervised.tolist(), e.line) for e in alone
    ]
