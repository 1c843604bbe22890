"""Directories that appear whole or not at all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.files import MACHINE, discard_partial, replace_text, save_tensors, whole_directory


def contents(directory: Path) -> dict[str, str]:
    return {str(p.relative_to(directory)): p.read_text() for p in directory.rglob("*") if p.is_file()}


def test_new_and_replaced(tmp_path: Path) -> None:
    for text in ("one", "two"):
        with whole_directory(tmp_path / "d", overwrite=True) as new:
            (new / "file").write_text(text)
        assert contents(tmp_path) == {"d/file": text}


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    with whole_directory(tmp_path / "d") as new:
        (new / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_directory(tmp_path / "d", overwrite=True) as new:
        (new / "file").write_text("new")
        raise KeyboardInterrupt
    assert contents(tmp_path) == {"d/file": "old"}


def test_a_failed_rename_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with whole_directory(tmp_path / "d") as new:
        (new / "file").write_text("old")
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError("no space")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="no space"), whole_directory(tmp_path / "d", overwrite=True) as new:
        (new / "file").write_text("new")
    assert contents(tmp_path) == {"d/file": "old"}


def test_two_at_a_time_are_each_whole_and_the_last_stays(tmp_path: Path) -> None:
    for there in (False, True):  # before
        with whole_directory(tmp_path / "d", overwrite=True) as last:
            (last / "last").write_text("")
            with whole_directory(tmp_path / "d", overwrite=True) as first:
                (first / "first").write_text("")
            assert contents(tmp_path / "d").keys() == {"first"}, there
        assert contents(tmp_path).keys() == {"d/last"}


def test_only_what_nobody_writes_any_more_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    owners = {"ended": f"{MACHINE}-{ended.pid}", "alive": f"{MACHINE}-{os.getpid()}"}
    owners["elsewhere"] = f"{'0' * 8}-{ended.pid}"
    names = {who: tmp_path / f".d.{owner}-{'a' * 8}.partial" for who, owner in owners.items()}
    for call in (discard_partial, lambda directory: whole_directory(directory, overwrite=True).__enter__()):
        for name in names.values():
            name.mkdir(exist_ok=True)
        call(tmp_path / "d")
        assert [who for who, name in names.items() if name.exists()] == ["alive", "elsewhere"]
    left = tmp_path / f".latest.{owners['ended']}-{'a' * 8}.partial"
    left.write_text("")
    replace_text(tmp_path / "latest", "one")
    assert not left.exists()


def test_what_is_not_to_be_overwritten(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "file").write_text("mine")
    (tmp_path / "f").write_text("a file")
    with pytest.raises(ConfigError, match="is not empty"), whole_directory(tmp_path / "d"):
        pass
    with pytest.raises(ConfigError, match="is a file"), whole_directory(tmp_path / "f", overwrite=True):
        pass


def test_tensors_can_be_read_by_whom_the_directory_can(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    save_tensors({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o640


def test_replaced_text(tmp_path: Path) -> None:
    for text in ("one", "two"):
        replace_text(tmp_path / "latest", text)
        assert contents(tmp_path) == {"latest": text}
