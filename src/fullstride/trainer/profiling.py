"""A rank's time under torch's profiler."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class ProfileRow:
    """One kernel of a GPU, or on a CPU one operation of torch: how often it ran, and the seconds it took by itself."""

    name: str
    calls: int
    seconds: float


def make_profiler(device: torch.device) -> Any:
    """Of the host, and of a GPU."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own state from an earlier profile
        return profile(activities=activities, acc_events=True)


def on_gpu(profiler: Any) -> Iterator[Any]:
    """The events of torch's profiler that a GPU ran."""
    return (e for e in profiler.events() or () if e.device_type == torch.autograd.DeviceType.CUDA)


def profile_rows(profiler: Any, device: torch.device) -> list[ProfileRow]:
    """What ran, longest first."""
    found: dict[str, ProfileRow] = {}
    if device.type == "cuda":
        for event in on_gpu(profiler):
            row = found.get(event.name, ProfileRow(event.name, 0, 0.0))
            seconds = row.seconds + event.time_range.elapsed_us() * 1e-6
            found[event.name] = ProfileRow(row.name, row.calls + 1, seconds)
        rows = list(found.values())
    else:
        rows = [ProfileRow(e.key, e.count, e.self_cpu_time_total * 1e-6) for e in profiler.key_averages()]
    return sorted(rows, key=lambda row: -row.seconds)
