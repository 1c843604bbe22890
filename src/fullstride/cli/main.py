"""`fullstride COMMAND [RUN.toml] [--key value ...]`: find the command, build its configuration, run it.

A command is a module with `Config` (a dataclass of keys), `SUMMARY`, `POSITIONAL` (keys that may come without a name)
and `run(config) -> exit status`. Its module is imported when it is called, and what it needs beyond the standard
library when it runs: `--help` is quick.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from fullstride.errors import ConfigError, UsageError, WorkerError
from fullstride.version import __version__

COMMANDS = (
    "finetune",
    "train",
    "tokenize",
    "generate",
    "merge",
    "export",
    "plot",
    "plan",
    "bench",
    "doctor",
    "import-gguf",
    "demo",
)
DONE, FAILED, WRONG_USAGE, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors that are neither the user's nor the machine's keep their
    traceback."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal's encoding may lack characters of data and answers
            sys.stdout.reconfigure(errors="backslashreplace")
        status = dispatch(argv)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        return failed(str(error), WRONG_USAGE if isinstance(error, UsageError) else FAILED)
    except BrokenPipeError:  # `| head` has seen enough
        drop_output()
        return NO_READER
    except OSError as error:  # a full disk, a missing permission
        drop_output()
        return failed(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except MemoryError as error:
        return failed(f"out of memory ({error}); lower batch-size or seq-len")
    except WorkerError as error:  # its lines are a traceback of another process
        print(f"fullstride: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def drop_output() -> None:
    """What standard output still holds and cannot take must not fail again when Python ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def failed(reason: str, status: int = FAILED) -> int:
    """Say why on one line of standard error."""
    print(f"fullstride: error: {' '.join(reason.split())}", file=sys.stderr)
    return status


def dispatch(argv: list[str]) -> int:
    """As main, but raises."""
    from fullstride.config.keys import help_text, nearest, parse  # in here, where Ctrl-C is seen to

    if not argv or argv[0] in ("--help", "-h", "help"):
        print(usage())
        return DONE if argv else WRONG_USAGE
    if argv[0] == "--version":
        print(f"fullstride {__version__}")
        return DONE
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        raise UsageError(
            f"unknown command {name!r}; the nearest is {nearest(name, COMMANDS)!r}, there are {', '.join(COMMANDS)}"
        )
    command = load(name)
    if "--help" in rest or "-h" in rest:
        print(help_text(command.Config, name, command.SUMMARY, command.POSITIONAL))
        return DONE
    return command.run(parse(command.Config, rest, command.POSITIONAL))


def load(name: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(f"fullstride.cli.{name.replace('-', '_')}")


def usage() -> str:
    """All commands with what they do."""
    lines = [f"  {name:<12} {load(name).SUMMARY}" for name in COMMANDS]
    return "\n".join(
        [
            "usage: fullstride COMMAND [RUN.toml] [--key value ...]",
            "",
            *lines,
            "",
            "fullstride COMMAND --help lists a command's keys; fullstride --version",
        ]
    )
