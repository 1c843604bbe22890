"""The table of training speed: every configuration of benchmarks/results, each in a process of its own.

A profiler that has once been attached to a process makes every later launch in it dearer, and the driver's memory
counts what earlier runs left, so one process for all would measure the runs before.

    PYTHONPATH=src python3 benchmarks/speed.py OUT_DIRECTORY [NAME ...]

Each is what `fullstride bench` measures, and its result is OUT/NAME.json; the table is printed last. FlashAttention-4
is used where it is installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LORA = {"model": "qwen3-4b", "method": "lora", "seq_len": 512, "updates": 1}
RUNS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b-full": {"model": "qwen2.5-0.5b", "batch_size": 32, "updates": 2},
    "qwen2.5-1.5b-full": {"model": "qwen2.5-1.5b", "batch_size": 32, "updates": 1},
    "qwen2.5-3b-full": {"model": "qwen2.5-3b", "batch_size": 16, "updates": 1},
    "qwen2.5-7b-full": {"model": "qwen2.5-7b", "batch_size": 8, "updates": 1},
    "qwen3-4b-lora": {**LORA, "batch_size": 32},
    "qwen3-4b-lora-12gb": {**LORA, "batch_size": 8, "recompute": "block", "head_chunks": 8},
    "qwen3-4b-lora-11gb": {**LORA, "batch_size": 4, "recompute": "block", "head_chunks": 8},
}


def row(name: str, told: dict[str, Any]) -> str:
    """One line of the table."""
    size = f"{told['batch_size']} x {told['seq_len']}"
    rates = f"{told['tokens_per_sec']:,.0f} | {told['ceiling_tokens_per_sec']:,.0f} | {told['share_of_ceiling']:.1%}"
    memory = f"{told['peak_memory_gb']:.1f} | {told['device_memory_gb']:.1f}"
    return f"| {name} | {size} | {rates} | {told['mfu']:.1%} | {memory} | {told['host_ms_per_micro_step']:.2f} |"


def main(out: str, *names: str) -> None:
    Path(out).mkdir(parents=True, exist_ok=True)
    rows = []
    for name in names or RUNS:
        result = Path(out) / f"{name}.json"
        keys = [f"--{key.replace('_', '-')}={value}" for key, value in RUNS[name].items()]
        subprocess.run([sys.executable, "-m", "fullstride", "bench", *keys, f"--json={result}"], check=True)
        rows.append(row(name, json.loads(result.read_text())))
    print("\n| run | B x T | tokens/s | ceiling | share | MFU | peak GB | GB by the driver | host ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
