"""Every command on the pages of docs/ runs as it is written there, in order, on a tiny model."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from fullstride.cli.main import main
from tests.run.conftest import SPECIAL, TEMPLATE, TINY, make_model, write_rows

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("chats", "data", "pretraining", "gguf", "runs")


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of a page's blocks that can be run."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^```(sh|python)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """The commands of a block; one that has text of its own (<<'END') with it."""
    return re.findall(r".+<<'END'\n(?:.*\n)*?END\n|.+\n", text)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the pages' Python is short
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(Path("MODEL_DIR"), dataclasses.replace(TINY, max_position_embeddings=512))
    if page == "gguf":
        write_rows(Path("rows.jsonl"), 3)
        make_gguf(Path("model.gguf"))
    found = blocks(page)
    assert found, "a page has something to run"
    for language, text in found:
        if language == "python":
            exec(compile(text, f"{page}.md", "exec"), {})
            continue
        for command in commands(text):
            if command.startswith("fullstride "):
                assert main(shlex.split(command)[1:]) == 0, command
            else:
                path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
                subprocess.run(["bash", "-e", "-c", command], check=True, env=os.environ | {"PATH": path})


def make_gguf(file: Path) -> None:
    """A tiny GGUF file with a tokenizer of bytes and a chat template."""
    from tests.run import test_gguf

    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(pieces) - len(SPECIAL)),
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    embedding = np.random.default_rng(0).normal(size=(len(pieces), 64)).astype(np.float32)
    test_gguf.make(file, "llama-head", meta=meta, tensors={"token_embd.weight": embedding})


def test_pages_are_linked() -> None:
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert all(f"docs/{page}.md" in readme for page in PAGES)
