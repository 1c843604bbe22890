"""Ways to split one job over this machine, side by side: what `bench` measures of each, in a process of its own.

One process for all would measure what earlier runs leave behind: memory, and a profiler that makes later launches
dearer.
All have the same rows an update, and the same in every micro-step.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fullstride.config import resolve_device
from fullstride.config.commands import BenchConfig
from fullstride.config.keys import dashed, fields_of
from fullstride.engine.step import split_stages
from fullstride.errors import ConfigError, UsageError
from fullstride.run.bench import TOKENS_PER_UPDATE, check_file, model_config, shown
from fullstride.run.metrics import strategy
from fullstride.trainer.ranks import find_ranks, launched
from fullstride.trainer.setting import Setting

SIZES = ("dp", "pp", "tp")
OF_PIPELINES = ("pp_schedule", "pp_chunks", "microbatches")
COLUMNS = ("tokens_per_sec", "peak_memory_gb", "bubble_predicted", "bubble_measured")


def compare_strategies(config: BenchConfig) -> dict[str, Any]:
    """Measure every one of `config.strategies`; prints a table, returns it as plain data: {"rows_per_update",
    "strategies": {name: what `bench --json` writes, or {"error": why not}}}.

    Raises ConfigError for names and numbers that do not fit, before anything is measured, and when none could be.
    """
    if launched():
        raise UsageError("strategies starts processes by itself; run it without a launcher, with gpus = how many")
    gpus, _ = find_ranks(config.gpus, resolve_device(config.device))
    if config.json:
        check_file(Path(config.json))
    splits = find_splits(config, gpus)
    grad_accum = splits[0].grad_accum
    assert grad_accum is not None
    results: dict[str, Any] = {}
    for split in splits:
        name = strategy(split.resolved())
        if name in results:  # dp2 and dp2-zero1, say, are one
            continue
        print(f"{name} ...", flush=True)
        results[name] = measured_apart(split)
    result = {"model": config.model, "rows_per_update": config.batch_size * grad_accum, "strategies": results}
    print(f"\n{told(result)}")
    if config.json:
        Path(config.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if all("error" in found for found in results.values()):
        raise ConfigError("strategies: none could be measured; what each says is above")
    return result


def find_splits(config: BenchConfig, gpus: int) -> list[BenchConfig]:
    """What each strategy measures. `all` are those that are legal over 1 and over all GPUs."""
    if "all" not in config.strategies:
        return [split_of(config, name, gpus) for name in config.strategies]
    found = []
    for name in every_name(gpus):
        try:
            found.append(split_of(config, name, gpus))
        except ConfigError:  # what is not legal here was not asked for by name
            continue
    return found


def every_name(gpus: int) -> list[str]:
    """All splits over so many GPUs, and over one."""
    names = ["single"]
    for pp in range(1, gpus + 1):
        for tp in range(1, gpus // pp + 1):
            dp, rest = divmod(gpus, pp * tp)
            parts = [f"{key}{n}" for key, n in (("dp", dp), ("pp", pp), ("tp", tp)) if n > 1]
            if not rest and parts:
                names += ["-".join([*parts, zero]) for zero in (("zero1", "zero3") if dp > 1 else ())] or [
                    "-".join(parts)
                ]
    return names


def split_of(config: BenchConfig, name: str, gpus: int) -> BenchConfig:
    """The measurement that a name like `dp2-pp2-zero3` stands for; `zero3` alone is over the rows of all GPUs.

    Raises ConfigError for what is no such name, or cannot be run here.
    """
    parts = re.findall(r"(dp|pp|tp|zero)(\d+)", name)
    sizes = {key: int(number) for key, number in parts}
    if name != "single" and (not parts or "-".join(f"{k}{n}" for k, n in parts) != name or len(sizes) < len(parts)):
        raise UsageError(f"strategies are like single, dp2, zero3, pp2 or dp2-pp2-zero3, or all; got {name!r}")
    if "zero" in sizes and not sizes.keys() & set(SIZES):
        sizes["dp"] = gpus
    dp, pp, tp = (sizes.get(key, 1) for key in SIZES)
    if not 1 <= dp * pp * tp <= gpus:
        raise UsageError(f"strategy {name} takes {dp * pp * tp} GPUs, gpus = {gpus}; set gpus to {dp * pp * tp}")
    if config.batch_size % dp:
        more = -(-config.batch_size // dp) * dp
        raise UsageError(
            f"with strategies, batch-size is of all ranks: strategy {name} cannot deal {config.batch_size} rows to "
            f"{dp} ranks; set batch-size to {more}"
        )
    alone = {f.name: f.default for f in dataclasses.fields(config) if f.name in OF_PIPELINES and pp == 1}
    least = TOKENS_PER_UPDATE if resolve_device(config.device) == "cuda" else 1
    split = dataclasses.replace(
        config,
        **alone,
        dp=dp,
        pp=pp,
        tp=tp,
        gpus=dp * pp * tp,
        zero=sizes.get("zero", config.zero),
        batch_size=config.batch_size // dp,
        grad_accum=config.grad_accum or -(-least // (config.batch_size * config.seq_len)),
        strategies=(),
        json="",
    )
    setting = Setting(split.resolved().options(), split.batch_size, split.seq_len, split.grad_accum or 1)
    model = model_config(config.model)
    split_stages(model, *setting.engine(model))
    return split


def measured_apart(split: BenchConfig) -> dict[str, Any]:
    """What `fullstride bench` finds in a process of its own; {"error": what it says} where it fails."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "result.json"
        run = subprocess.run(
            [sys.executable, "-m", "fullstride", "bench", *words(split), f"--json={file}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if run.returncode or not file.is_file():
            said = run.stderr.strip().removeprefix("fullstride: error: ")
            return {"error": said or f"the process ended with status {run.returncode}"}
        return json.loads(file.read_text(encoding="utf-8"))


def words(split: BenchConfig) -> list[str]:
    """The keys that differ from their defaults, for the command line."""
    given = {f.name: getattr(split, f.name) for f in fields_of(split) if getattr(split, f.name) != f.default}
    return [f"--{dashed(name)}={_text(value)}" for name, value in given.items()]


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def told(result: dict[str, Any]) -> str:
    """The table: a row a strategy."""
    lines = [f"{result['model']}, {result['rows_per_update']} rows an update"]
    lines.append("".join([f"{'strategy':<20}", *(f"{name:>18}" for name in COLUMNS)]))
    for name, found in result["strategies"].items():
        if "error" in found:
            lines.append(f"{name:<20}  {found['error'].splitlines()[-1]}")
            continue
        cells = [found[column] for column in COLUMNS[:2]] + [_percent(found[column]) for column in COLUMNS[2:]]
        lines.append("".join([f"{name:<20}", *(f"{shown(cell):>18}" for cell in cells)]))
    return "\n".join(lines)


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f} %"
