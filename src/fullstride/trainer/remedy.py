"""After a failed allocation: settings that would fit, found by predicting the memory of one after another.

In the order of what they cost the training. A smaller batch-size with as many more micro-steps keeps every update as it
was, and costs little while micro-steps are not small; more pieces of the head, gradients in host memory and recompute
cost time; sharing more among ranks (ZeRO 3) costs their connection; a shorter seq-len cuts rows; LoRA is another
training, and only named when nothing else fits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator

from fullstride.engine.plan import predict
from fullstride.memory.arena import in_bytes
from fullstride.model.spec import ModelConfig
from fullstride.trainer.setting import Setting

MORE_CHUNKS = 4  # times as many pieces of the head, where memory is short
LEAST_SEQ_LEN = 128  # shorter rows are not proposed
FEW_TOKENS = 2048  # in smaller micro-steps a GPU's products lose more time than recompute costs
MARGIN = 0.05  # of the device that stays free: allocators round up and leave gaps


def remedy(
    config: ModelConfig, setting: Setting, device: str, capacity: int, host: int, documents: int, shapes: int
) -> str:
    """What the user of `setting`, which did not fit, should set instead. There were `capacity` bytes of `device` (cuda,
    cpu), and beside a GPU `host` bytes of host memory.

    documents, shapes: as in engine/plan.predict, of what the run has met so far.
    """

    @functools.cache
    def need(s: Setting) -> float:
        """Predicted bytes; infinite where the host cannot hold its part."""
        places = -(-documents * s.batch_size // setting.batch_size)
        try:
            plan = predict(config, *s.engine(config), device, places, shapes, s.options.ranks)
        except MemoryError:
            return float("inf")
        # the ranks of one machine share its memory
        return sum(plan.device.values()) if s.options.ranks * sum(plan.pinned.values()) <= host else float("inf")

    failed = need(setting)
    # what did not fit shows how much is too much, also where the prediction is too low
    limit = (1 - MARGIN) * min(capacity, failed)
    found, least = search(config, setting, need, limit)
    told = [f"the run needs {f'about {in_bytes(failed)}' if failed < float('inf') else 'more than this machine has'}"]
    if found is None or found.options.method != setting.options.method:
        tight = f"fits {in_bytes(capacity)}" if failed > capacity else "needs clearly less"
        nothing = f"nothing that trains the same {tight}"
        told.append(f"{nothing}: {least.flags(setting)} needs about {in_bytes(need(least))}" if least else nothing)
    if found is None:
        told.append("take a smaller model or a larger device")
    else:
        told.append(f"{found.flags(setting)} would fit: about {in_bytes(need(found))} of {in_bytes(capacity)}")
    return "; ".join(told)


def search(
    config: ModelConfig, setting: Setting, need: Callable[[Setting], float], limit: float
) -> tuple[Setting | None, Setting | None]:
    """(the first candidate that needs at most `limit`, the one of the same method that needs least)."""
    least: Setting | None = None
    for group in candidates(config, setting):
        smallest = group[-1]  # whether this one fits says whether any does
        if smallest.options.method == setting.options.method and (least is None or need(smallest) < need(least)):
            least = smallest
        if need(smallest) <= limit:
            return next(s for s in group if need(s) <= limit), least
    return None, least


def candidates(config: ModelConfig, s: Setting) -> Iterator[list[Setting]]:
    """Groups of settings to try in turn; in a group, batch sizes from the largest. Never `s` itself."""
    divisors = [b for b in range(1, math.isqrt(s.batch_size) + 1) if s.batch_size % b == 0]
    sizes = sorted({*divisors, *(s.batch_size // b for b in divisors)}, reverse=True)
    lengths = [s.seq_len]
    while lengths[-1] // 2 >= LEAST_SEQ_LEN:
        lengths.append(lengths[-1] // 2)
    methods = [s.options]
    if s.options.method == "full":  # the adapters' masters have a default of their own
        methods.append(dataclasses.replace(s.options, method="lora", master_dtype="").resolved())
    shared = [s.options.zero] if s.options.dp == 1 else sorted({s.options.zero, 3})
    levels = [dataclasses.replace(options, zero=zero) for options in methods for zero in shared]
    for options in levels:
        for seq_len in lengths:
            large = [b for b in sizes if b * seq_len >= FEW_TOKENS]
            small = [b for b in sizes if b not in large]
            for batch_sizes, flags in itertools.product((large, small), recompute_levels(options.recompute)):
                now = dataclasses.replace(options, recompute=flags)
                plain = [Setting(now, b, seq_len, s.grad_accum * (s.batch_size // b)) for b in batch_sizes]
                plain = [x for x in plain if x.head_chunks(config) <= x.tokens]
                for group in offload_levels(plain) + offload_levels([more_chunks(x, config) for x in plain]):
                    if others := [x for x in group if x != s]:
                        yield others


def more_chunks(s: Setting, config: ModelConfig) -> Setting:
    """`s` with more pieces of the head, at most one a token."""
    chunks = min(MORE_CHUNKS * s.head_chunks(config), s.tokens)
    return dataclasses.replace(s, options=dataclasses.replace(s.options, head_chunks=chunks))


def offload_levels(group: list[Setting]) -> list[list[Setting]]:
    """`group` as it is, and with gradients on the other side: in host memory (on a CPU that is the device's) where
    they may be there, or back on the device."""
    o = group[0].options if group else None
    if o is None or (not o.offload and (o.device == "cpu" or (o.dp > 1 and o.zero < 2))):
        return [group]
    other = () if o.offload else ("grads",)
    return [group, [dataclasses.replace(s, options=dataclasses.replace(s.options, offload=other)) for s in group]]


def recompute_levels(flags: tuple[str, ...]) -> list[tuple[str, ...]]:
    """`flags` as they are, with SwiGLU and norms, and with the whole block, which contains all others."""
    if "block" in flags:
        return [flags]
    cheap = {*flags, "swiglu", "norm"}
    return [flags, *([tuple(cheap)] if cheap != set(flags) else []), ("block",)]
