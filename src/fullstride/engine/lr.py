"""Learning-rate schedules: a warm-up, then one of four shapes."""

from __future__ import annotations

import math

from fullstride.errors import UsageError

SCHEDULES = ("cosine", "linear", "constant", "wsd")
DECAY_SHARE = 0.1  # of a wsd run (warmup, stable, decay: Hu et al. 2024, arXiv 2404.06395): its last tenth decays


def warmup_updates(warmup: float, num_steps: int) -> int:
    """The number of updates that warm up: `warmup`, or under 1 that fraction of num_steps."""
    return round(warmup * num_steps) if warmup < 1 else int(warmup)


def learning_rate(
    schedule: str, step: int, num_steps: int, lr: float, warmup: float = 0.0, final_fraction: float = 0.1
) -> float:
    """The rate of update `step` (from 1) of `num_steps`.

    Warm-up is linear over `warmup` updates (under 1: that fraction of num_steps) and reaches lr at its last one. With p
    going from 0 at that update (without warm-up: at the first) to 1 at the last: cosine falls as (1 + cos(pi p)) / 2
    and linear as 1 - p from lr to final_fraction * lr (Loshchilov and Hutter 2017, arXiv 1608.03983); constant stays;
    wsd stays and falls linearly over the last tenth of the run.

    Raises UsageError for an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise UsageError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    warm = warmup_updates(warmup, num_steps)
    if step <= warm:
        return lr * step / warm
    if schedule == "constant":
        return lr
    peak = max(warm, 1)  # the update that has the whole rate
    start = max(peak, num_steps - max(1, round(DECAY_SHARE * num_steps))) if schedule == "wsd" else peak
    progress = min(max(step - start, 0) / max(num_steps - start, 1), 1.0)
    weight = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return lr * (final_fraction + (1 - final_fraction) * weight)
