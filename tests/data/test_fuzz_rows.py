"""Files that were damaged at random: each ends in rows and a report, or in one message."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data.test_chat import load_tokenizer

from fullstride.cli.main import main
from fullstride.config.keys import dump_toml, parse
from fullstride.config.training import FinetuneConfig
from fullstride.data.chat import Encoder
from fullstride.data.readers import JsonlFile
from fullstride.data.report import Report
from fullstride.data.rows import rows_of
from fullstride.errors import ConfigError

CHAT = [{"role": "user", "content": "Say hello.\u2028"}, {"role": "assistant", "content": "Hello \U0001f600"}]
ROWS: list[dict[str, Any]] = [
    {"prompt": "Two and two is", "completion": " four."},
    {"messages": [{"role": "system", "content": "Be brief."}, *CHAT, *CHAT]},
    {"dialogue": "A: hi\nB: ho", "summary": "They met."},
    {"prompt": CHAT[:1], "completion": CHAT[1:], "tools": None},
]
STRANGE = (
    None,
    0,
    -1.5,
    True,
    "",
    "x",
    "\x1b[2J",
    "\ud83d",
    [],
    {},
    [None],
    [[]],
    {"role": "user"},
    float("nan"),
    10**99,
)
SPICE = (*(bytes([i]) for i in b'\0\r\n"{}[]\xff'), b"\xef\xbb\xbf", b"\\u0000", b"\\ud800", b"NaN", b"[" * 5000)


def damaged(text: bytes, dice: random.Random) -> bytes:
    """Bytes flipped, cut out, put in, doubled or swapped, some times."""
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(len(text) + 1)
        end = min(len(text), at + dice.randint(1, 40))
        what = dice.randrange(5)
        if what == 0 and at < len(text):
            text = text[:at] + bytes([text[at] ^ (1 << dice.randrange(8))]) + text[at + 1 :]
        elif what == 1:
            text = text[:at] + text[end:]
        elif what == 2:
            text = text[:at] + dice.choice(SPICE) + text[at:]
        elif what == 3:
            text = text[:end] + text[at:]
        else:
            text = text[:at] + dice.randbytes(end - at) + text[end:]
    return text


def retyped(value: Any, dice: random.Random) -> Any:
    """One place of a value replaced by something else."""
    if isinstance(value, dict) and value and dice.random() < 0.8:
        name = dice.choice(sorted(value))
        if dice.random() < 0.1:
            return {key: item for key, item in value.items() if key != name}
        return {**value, name: retyped(value[name], dice)}
    if isinstance(value, list) and value and dice.random() < 0.8:
        at = dice.randrange(len(value))
        return [*value[:at], retyped(value[at], dice), *value[at + 1 :]]
    return dice.choice(STRANGE)


def jsonl(dice: random.Random) -> bytes:
    rows = [retyped(row, dice) if dice.random() < 0.4 else row for row in ROWS * 2]
    text = "\n".join(json.dumps(row) for row in rows).encode()
    return damaged(text, dice) if dice.random() < 0.8 else text


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.sampled_from(["auto", "on", "off"]), st.sampled_from([1, 16, 64]))
def test_damaged_rows(tmp_path: Path, dice: random.Random, thinking: Any, seq_len: int) -> None:
    path, report = tmp_path / "a.jsonl", Report()
    path.write_bytes(jsonl(dice))
    encoder = Encoder(load_tokenizer("qwen3"), seq_len, report, thinking=thinking)
    try:
        examples = encoder.encode(rows_of(JsonlFile(path).records(), str(path), report))
    except ConfigError as error:
        assert str(path) in str(error)
        return
    lines = path.read_bytes().split(b"\n")
    used = {example.line for example in examples}
    told = {line for event in report.events() for line in event["lines"]}
    blank = {i for i, line in enumerate(lines, 1) if not line.decode(errors="replace").lstrip("\ufeff").strip()}
    assert used | told | blank == set(range(1, len(lines) + 1))  # no line is lost in silence
    for example in examples:
        assert 2 <= len(example.ids) <= seq_len and example.supervised.any() and not example.supervised[0]


RUN = dump_toml(FinetuneConfig(model="m", data="a.jsonl:0.3,b.jsonl:0.7")).encode()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_damaged_run_files(tmp_path: Path, dice: random.Random) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(damaged(RUN, dice))
    try:
        assert isinstance(parse(FinetuneConfig, [str(file)]), FinetuneConfig)
    except ConfigError as error:
        assert str(error)


def test_damaged_run_files_are_one_line_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(30):
        file = tmp_path / f"{seed}.toml"
        file.write_bytes(damaged(RUN, random.Random(seed)))
        assert main(["finetune", str(file), "--model", str(tmp_path / "none")]) in (1, 2)
        said = capsys.readouterr().err
        assert said.startswith("fullstride: error: ") and said.count("\n") == 1
