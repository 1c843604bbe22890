"""Models and tokenizers by name. The Hub is replaced: no test goes to the network."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from fullstride.errors import ConfigError
from fullstride.run.source import find_model, load_tokenizer, padding_id
from tests.run.conftest import TINY


def hub(monkeypatch: pytest.MonkeyPatch, cached: bool, online: bool, directory: Path) -> list[bool]:
    """A Hub with one model; returns the list that its calls (local only?) are noted in."""
    calls: list[bool] = []

    def snapshot_download(name: str, *, local_files_only: bool = False, **_: Any) -> str:
        calls.append(local_files_only)
        if local_files_only and not cached:
            raise LocalEntryNotFoundError("not cached")
        if not local_files_only and not online:
            raise ConnectionError("no route\nto the Hub")
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_directory_wins_and_is_absolute(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = hub(monkeypatch, True, True, model_dir)
    monkeypatch.chdir(model_dir.parent)
    assert find_model("tiny") == model_dir and find_model("./tiny") == model_dir
    assert calls == []


def test_the_local_cache_comes_before_the_network(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = hub(monkeypatch, True, True, model_dir)
    assert find_model("owner/name") == model_dir and calls == [True]
    calls = hub(monkeypatch, False, True, model_dir)
    assert find_model("owner/name") == model_dir and calls == [True, False]


def test_what_nobody_has_is_one_clear_line(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, False, False, model_dir)
    with pytest.raises(ConfigError, match="no such directory: owner/name, and the Hub did not give it") as error:
        find_model("owner/name")
    assert "\n" not in str(error.value)
    for name in ("./missing", "/missing", "a/b/c", "missing", "~nobody-of-this-name/x", str(model_dir / "config.json")):
        with pytest.raises(ConfigError, match="no such directory"):
            find_model(name)


def test_tokenizers(model_dir: Path, tmp_path: Path) -> None:
    assert len(load_tokenizer(model_dir, TINY)) == 259
    with pytest.raises(ConfigError, match="no tokenizer there"):
        load_tokenizer(tmp_path)


def test_padding_is_some_legal_id() -> None:
    assert padding_id(SimpleNamespace(pad_token_id=5, eos_token_id=2)) == 5
    assert padding_id(SimpleNamespace(pad_token_id=None, eos_token_id=2)) == 2
    assert padding_id(SimpleNamespace(pad_token_id=None, eos_token_id=None)) == 0
