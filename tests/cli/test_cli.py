"""Commands: exit statuses, messages, signals."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fullstride.cli import main as module
from fullstride.cli.main import COMMANDS, main
from fullstride.run.metrics import read_metrics
from fullstride.version import __version__
from tests.run.conftest import make_model, write_rows


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["fintune"], 2, r"unknown command 'fintune'; the nearest is 'finetune', there are finetune, train"),
        (["train"], 2, r"model is missing"),
        (["tokenize"], 2, r"model is missing"),
        (["finetune"], 2, r"model is missing"),
        (["finetune", "--modle", "x"], 2, r"unknown key 'modle'; the nearest is 'model'"),
        (["finetune", "--model", "x", "--data", "y", "--gpus", "2", "--dp", "1"], 2, r"dp is what remains of gpus"),
        (["finetune", "--model", "/nowhere", "--data", "sample", "--device", "cpu"], 1, r"no such directory: /nowhere"),
        (["finetune", "nowhere.toml"], 1, r"nowhere\.toml: no such file"),
        (["generate", "--model", "x"], 2, r"give either prompt or prompt-file"),
        (["generate", "--model", "x", "--prompt", "a", "--top-p", "0"], 2, r"top-p must be above 0"),
        (["generate", "--model", "x", "--prompt", "a", "--raw", "--system", "b"], 2, r"system contradicts raw"),
        (["import-gguf", "nowhere.gguf", "out"], 1, r"nowhere\.gguf"),
        (["import-gguf", "a", "b", "c"], 2, r"unexpected 'c'"),
        (["bench", "qwen9-1b", "--device", "cpu"], 1, r"no built-in name"),
        (
            ["bench", "qwen3-4b", "--device", "cpu", "--json", "no/r.json"],
            1,
            r"json: no/r\.json must be a file in a dir",
        ),
        (
            ["finetune", "--model", "x", "--data", "y", "--eps", "0"],
            2,
            r"eps must be at least 1e-20, got 0\.0; leave it",
        ),
        (["finetune", "--model", "\udce9", "--data", "y"], 2, r"model must be text without zero bytes and broken"),
        (["finetune", "--model", "a" * 5000, "--data", "y", "--device", "cpu"], 1, r"File name too long"),
    ],
)
def test_errors_are_one_line_and_a_status(
    argv: list[str], status: int, message: str, capsys, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == status
    captured = capsys.readouterr()
    assert re.fullmatch(rf"fullstride: error: .*{message}.*\n", captured.err), captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_help_and_version(capsys) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert f"usage: fullstride {name} [RUN.toml]" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fullstride {__version__}\n"


def test_interrupts_are_130_and_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    def bug(argv: list[str]) -> int:
        raise RuntimeError("ours")

    monkeypatch.setattr(module, "dispatch", interrupted)
    assert main(["finetune"]) == 130
    monkeypatch.setattr(module, "dispatch", bug)
    with pytest.raises(RuntimeError, match="ours"):
        main(["finetune"])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/runs/a"), "/runs/a: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "/runs/a"), "/runs/a: Permission denied"),
        (OSError("several\n  lines"), "several lines"),
        (MemoryError("9 GiB"), r"out of memory \(9 GiB\); lower batch-size or seq-len"),
    ],
)
def test_what_the_machine_refuses_is_one_line(
    error: Exception, message: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(module, "dispatch", refused)
    assert main(["finetune"]) == 1
    assert re.fullmatch(rf"fullstride: error: {message}\n", capsys.readouterr().err)


def help_into(stdout: Any) -> tuple[int, str]:
    """Exit status and standard error of `--help`, whose text Python holds back until it ends."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command("--help"), stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, env=buffered
    )
    return done.returncode, done.stderr


def test_a_full_disk_is_one_line() -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("needs /dev/full, which refuses every byte")
    with Path("/dev/full").open("w") as full:
        assert help_into(full) == (1, "fullstride: error: [Errno 28] No space left on device\n")


def test_a_reader_that_has_gone_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert help_into(writer) == (141, "")  # 128 + SIGPIPE, as shells say it
    os.close(writer)


def test_a_place_that_cannot_be_written_is_one_line(model: Path, tmp_path: Path, capsys) -> None:
    data = write_rows(tmp_path / "rows.jsonl", 6)
    out = str(data / "run")
    argv = ["--model", str(model), "--data", str(data), "--out", out, "--seq-len", "96", "--device", "cpu"]
    assert main(["finetune", *argv]) == 1
    assert re.fullmatch(r"fullstride: error: out: .*rows\.jsonl is a file.*\n", capsys.readouterr().err)


def test_any_encoding_takes_any_text(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "é.jsonl"
    data.write_text('{"prompt": "p", "completion": "日本"}\n', encoding="utf-8")
    argv = ["--model", str(model), "--data", str(data), "--device", "cpu", "--seq-len", "32", "--dry-run"]
    done = subprocess.run(
        command("finetune", *argv),
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u65e5\u672c" in done.stdout


CONSOLE_SCRIPT = "import sys; from fullstride.cli.main import main; sys.exit(main())"


@pytest.mark.parametrize("start", [["-m", "fullstride"], ["-c", CONSOLE_SCRIPT]])
def test_an_interrupt_while_modules_are_imported_is_quiet(start: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *start, "finetune", "--model", "m", "--data", "d"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_hardly_anything_is_imported_where_an_interrupt_would_show() -> None:
    code = "import sys\nimport fullstride.cli.main\nprint(*(name for name in sys.modules if 'fullstride' in name))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = {"fullstride", *(f"fullstride.{name}" for name in ("cli", "cli.main", "errors", "version"))}
    assert set(done.stdout.split()) == names


def test_help_is_quick() -> None:
    """No command's keys need torch."""
    code = (
        "import sys\nfrom fullstride.cli.main import COMMANDS, main\n"
        "assert not any(main([name, '--help']) for name in COMMANDS)\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "fullstride", *argv]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def test_a_whole_run_in_its_own_process(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", 6)
    argv = ["--model", str(model), "--data", str(data), "--out", str(tmp_path / "run"), "--seq-len", "96"]
    done = subprocess.run(
        command("finetune", *argv, "--steps", "2", "--device", "cpu"), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
    question = ["--prompt", "What is 1?", "--max-new-tokens", "4", "--device", "cpu"]
    done = subprocess.run(
        command("generate", "--model", str(model), "--adapter", str(tmp_path / "run" / "adapter"), *question),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "tokens/s" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_signals_save_the_state_and_exit_130(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    data, out = write_rows(tmp_path / "rows.jsonl", 20), tmp_path / "run"
    keys = {"model": model, "data": data, "out": out, "seq-len": 96, "device": "cpu", "schedule": "constant"}
    argv = [word for name, value in keys.items() for word in (f"--{name}", str(value))]
    process = subprocess.Popen(command("finetune", *argv, "--steps", "100000"), stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while len(read_metrics(out / "metrics.csv")) < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, number)
        printed, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    steps = len(read_metrics(out / "metrics.csv"))
    assert f"state of step {steps} is saved; resume with: fullstride finetune {out}/run.toml" in printed

    assert main(["finetune", str(out / "run.toml"), "--steps", str(steps + 2)]) == 0
    assert [int(row["step"]) for row in read_metrics(out / "metrics.csv")] == list(range(1, steps + 3))
