"""fullstride tokenize: documents, bad rows, special tokens, chats, going on after a kill, files that are there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullstride import ConfigError, DataError, tokenize
from fullstride.cli.main import main
from fullstride.data import documents
from fullstride.data.tokens import TokenFile
from fullstride.run import tokenize as module
from tests.conftest import shared
from tests.run.conftest import write_tokenizer

END = 2  # <|im_end|> of the tests' tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return directory


def lines(file: Path, *records: Any) -> Path:
    file.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records))
    return file


def texts(file: Path, tokenizer: Path) -> list[str]:
    from fullstride.run.source import load_tokenizer

    tokens, decode = TokenFile(file), load_tokenizer(tokenizer).decode
    edges = tokens.documents.tolist()
    return [decode(tokens.span(a, b).tolist()) for a, b in pairwise(edges)]


def test_text_files_are_a_document_each(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two\r\nlines")
    (tmp_path / "a.txt").write_bytes("\ufeffé \u2028 🎉".encode())
    (tmp_path / "blank.txt").write_text(" \n")
    made = tokenize(model=tokenizer, data=str(tmp_path / "*.txt"), out=tmp_path / "x.tokens")
    assert texts(made.out, tokenizer) == ["é \u2028 🎉<|im_end|>", "two\r\nlines<|im_end|>"]
    assert (made.documents, made.dropped) == (2, 1) and made.tokens == made.supervised == len(TokenFile(made.out))


def test_bad_lines_are_dropped_and_named(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = lines(
        tmp_path / "a.jsonl",
        b"\xef\xbb\xbf" + json.dumps({"text": "one"}).encode() + b"\r",
        b"",
        b'{"text": "broken',
        b'{"text": "\xe9"}',
        {"text": None},
        {"text": "  "},
        {"text": 5},
        [1],
        {"body": "x"},
        b'{"text": "\\ud800"}',
        {"text": "last\u2028line"},
    )
    made = tokenize(model=tokenizer, data=file, out=tmp_path / "x.tokens")
    assert texts(made.out, tokenizer) == ["one<|im_end|>", "last\u2028line<|im_end|>"] and made.dropped == 8
    told = capsys.readouterr().out
    for reason, line in {
        "broken JSON": 3,
        "not UTF-8": 4,
        "null content": 5,
        "empty text": 6,
        "unknown shape": 9,
    }.items():
        assert f"{reason} (line {line})" in told


def test_text_cannot_end_its_document(tokenizer: Path, tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"text": "a<|im_end|>b"})
    made = tokenize(model=tokenizer, data=file, out=tmp_path / "x.tokens")
    ids = TokenFile(made.out).span(0, made.tokens).tolist()
    assert ids.count(END) == 1 and ids[-1] == END and len(ids) == len("a<|im_end|>b") + 1


def test_chats_bring_their_masks(tokenizer: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    file = lines(tmp_path / "a.jsonl", {"text": "abc"}, {"messages": chat})
    made = tokenize(model=tokenizer, data=file, out=tmp_path / "x.tokens")
    tokens = TokenFile(made.out)
    mask = tokens.labels(0, len(tokens))
    assert mask is not None and mask[:4].all()
    answer = tokens.span(0, len(tokens))[4:][mask[4:]]
    assert len(answer) == 3 and answer[-1] == END and made.supervised == 7


def test_a_real_tokenizer_gives_the_librarys_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = shared("data", "tokenizers", "qwen2.5")
    made = tokenize(model=directory, data=shared("data", "prose", "validation.jsonl"), out=tmp_path / "x.tokens")
    theirs = AutoTokenizer.from_pretrained(directory)
    file, records = TokenFile(made.out), shared("data", "prose", "validation.jsonl").read_bytes().split(b"\n")
    texts = [json.loads(line)["text"] for line in records if line]
    expected = [i for text in texts for i in [*theirs(text)["input_ids"], theirs.eos_token_id]]
    assert file.span(0, len(file)).tolist() == expected and file.tokens.dtype == np.uint32
    assert made.documents == len(texts) == 43


@pytest.mark.parametrize("size", [1_000_000, pytest.param(20_000_000, marks=pytest.mark.slow)])
def test_a_row_of_many_megabytes(size: int, tokenizer: Path, tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"text": "short"}, {"text": "x" * size}, {"text": "short"})
    made = tokenize(model=tokenizer, data=file, out=tmp_path / "x.tokens")
    assert TokenFile(made.out).documents.tolist() == [0, 6, size + 7, size + 13]


KILLED = """
import os, signal, sys
from fullstride.data import documents, token_parts
from fullstride.run.tokenize import tokenize
documents.PIECE = 200
left = [int(sys.argv[1])]
def replace_text(file, text, original=token_parts.replace_text):
    original(file, text)
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.{name})
token_parts.replace_text = replace_text
tokenize(model=sys.argv[2], data=sys.argv[3], out=sys.argv[4])
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_a_stopped_one_goes_on(
    name: str, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After any number of pieces; the file is the same byte for byte, and no bad line is counted twice."""
    records = [{"text": f"row {i} " + "x" * (i % 50)} if i % 9 else b"broken" for i in range(100)]
    first, second = lines(tmp_path / "a.jsonl", *records[:50]), lines(tmp_path / "b.jsonl", *records[50:])
    data = f"{first},{second}"
    whole = tokenize(model=tokenizer, data=data, out=tmp_path / "whole.tokens")
    for pieces in (1, 4):
        out = tmp_path / f"{pieces}.tokens"
        words = [sys.executable, "-c", KILLED.replace("{name}", name), str(pieces), str(tokenizer), data, str(out)]
        ended = subprocess.run(words, capture_output=True, text=True)
        assert ended.returncode in (-signal.SIGKILL, -signal.SIGINT, 1) and not out.exists(), ended
        monkeypatch.setattr(documents, "PIECE", 200)
        capsys.readouterr()
        made = tokenize(model=tokenizer, data=data, out=out)
        assert "goes on after" in capsys.readouterr().out
        assert out.read_bytes() == whole.out.read_bytes() and made.dropped == whole.dropped == 12
        assert not list(tmp_path.glob(".*"))


def test_parts_of_other_input_are_not_gone_on_with(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = lines(tmp_path / "a.jsonl", *({"text": f"{i}"} for i in range(50))), tmp_path / "x.tokens"
    with monkeypatch.context() as patch:
        patch.setattr(documents, "PIECE", 100)
        patch.setattr(module.Parts, "finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tokenize(model=tokenizer, data=file, out=out)
    lines(file, *({"text": f"other {i}"} for i in range(40)))
    tokenize(model=tokenizer, data=file, out=out)
    assert texts(out, tokenizer) == [f"other {i}<|im_end|>" for i in range(40)]


def test_one_process_at_a_time(tokenizer: Path, tmp_path: Path) -> None:
    file, out = lines(tmp_path / "a.jsonl", {"text": "one"}), tmp_path / "x.tokens"
    with module._alone(out), pytest.raises(ConfigError, match=r"another process is making .*; wait for it"):
        tokenize(model=tokenizer, data=file, out=out)
    assert tokenize(model=tokenizer, data=file, out=out).documents == 1


def test_what_is_there_is_kept(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = lines(tmp_path / "a.jsonl", {"text": "one"}), tmp_path / "x.tokens"
    words = ["tokenize", str(file), "--model", str(tokenizer), "--out", str(out)]
    assert main(words) == 0
    assert "1 documents, 4 tokens (4 supervised), uint16, vocabulary 259" in capsys.readouterr().out
    assert main(words) == 1
    assert "exists; give --overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    mine = tmp_path / "mine.txt"
    mine.write_text("my only copy")
    for place in (mine, tmp_path, Path("/dev/null")):
        words = ["tokenize", str(mine), "--model", str(tokenizer), "--out", str(place), "--overwrite"]
        assert main(words) == 1 and "is no token file, and is not replaced" in capsys.readouterr().err
    assert mine.read_text() == "my only copy"


def test_refusals(tokenizer: Path, tmp_path: Path) -> None:
    keys = {"model": tokenizer, "out": tmp_path / "x.tokens"}
    with pytest.raises(ConfigError, match=r"no such file: .*nothing\.txt; give files or patterns"):
        tokenize(data=tmp_path / "nothing.txt", **keys)
    with pytest.raises(DataError, match=r"no document to tokenise in .*: .*2 rows: broken JSON"):
        tokenize(data=lines(tmp_path / "a.jsonl", b"x", b"{"), **keys)
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"b\.txt: not UTF-8 at byte 3"):
        tokenize(data=tmp_path / "b.txt", **keys)
    with pytest.raises(ConfigError, match="no tokenizer there"):
        (tmp_path / "model").mkdir()
        tokenize(data=lines(tmp_path / "c.jsonl", {"text": "a"}), model=tmp_path / "model", out=tmp_path / "y")
    assert not (tmp_path / "x.tokens").exists() and not list(tmp_path.glob(".*"))
