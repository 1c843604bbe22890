"""Measured training speed: random weights and tokens through the public Trainer, updates included."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.config import resolve_device
from fullstride.config.commands import BenchConfig
from fullstride.engine.ceiling import bare_ceiling
from fullstride.errors import ConfigError
from fullstride.model.presets import PRESETS, preset
from fullstride.model.spec import ModelConfig
from fullstride.run.bubble import measured_bubble, planned_pipeline
from fullstride.run.directory import check_writable
from fullstride.run.flops import model_flops, peak_flops
from fullstride.run.kinds import KINDS, TimeByKind, gpu_kernels, time_by_kind
from fullstride.run.metrics import strategy
from fullstride.trainer.ranks import find_ranks
from fullstride.trainer.setting import DTYPES, Setting
from fullstride.trainer.trainer import Trainer

ROUNDS = 5  # medians that are reported
WARM_UP = 2  # updates before: compiling, first allocations; in them every tensor's gradient is looked at
FIRST_ZERO = "lora_A.weight"
TOKENS_PER_UPDATE = 65536  # on a GPU, so that the update itself weighs as in practice
HOST_STEPS = 20  # micro-steps whose issuing is timed

# what the table shows, by section; the names are the JSON's
SECTIONS = {
    "what ran": (
        "model",
        "method",
        "dtype",
        "attention_library",
        "device",
        "strategy",
        "gpus",
        "batch_size",
        "seq_len",
        "grad_accum",
        "head_chunks",
        "recompute",
        "offload",
        "tokens_per_update",
        "trainable_parameters",
        "parameters",
    ),
    "speed": (
        "seconds_per_update",
        "tokens_per_sec",
        "ceiling_tokens_per_sec",
        "share_of_ceiling",
        "model_tflops_per_sec",
        "mfu",
        "bubble_predicted",
        "bubble_measured",
        "peak_memory_gb",
        "device_memory_gb",
        "host_ms_per_micro_step",
    ),
    "whether it trains": ("loss_first", "loss_last", "grad_norm_last", "dead_gradients"),
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds per update (all of them, in rounds), what update() returned, peak bytes, the tensors that got no
    gradient; of a pipeline Trainer.action_times of one more update; on one GPU also the bytes that the driver counts as
    used on it, the host's seconds to issue a micro-step, and one more update's time by kind."""

    rounds: list[list[float]]
    metrics: list[dict[str, float]]
    peak_bytes: int
    dead: list[str]
    action_times: list[tuple[float, float]] | None = None
    device_bytes: int | None = None
    host: list[float] | None = None
    kinds: TimeByKind | None = None


def run_bench(config: BenchConfig) -> dict[str, Any]:
    """Measure what `config` describes; prints a table, returns the result as plain data (README says what is what).

    Raises ConfigError when the training that was measured does not train, and before it for a `json` that cannot be
    written.
    """
    ranks, _ = find_ranks(config.gpus, resolve_device(config.device))
    config = dataclasses.replace(config, gpus=ranks).resolved()
    if config.json:
        check_file(Path(config.json))
    model = model_config(config.model)
    grad_accum = config.grad_accum
    if not grad_accum:
        least = TOKENS_PER_UPDATE if config.device == "cuda" else 1
        grad_accum = -(-least // (config.batch_size * config.seq_len))
    options = config.options()
    setting = Setting(options, config.batch_size, config.seq_len, grad_accum)
    sizes = {"batch_size": config.batch_size, "seq_len": config.seq_len, "grad_accum": grad_accum}
    with Trainer(model, options, gpus=ranks, **sizes) as trainer:
        trainer.init_weights(config.seed)
        measured = measure(
            trainer, grad_accum, config.updates, config.lr or (1e-3 if config.method == "lora" else 1e-4)
        )
        parameters = trainer.num_parameters
    check_trains(measured.metrics, measured.dead)

    ceiling = None
    if config.device == "cuda":
        head_chunk = -(-setting.tokens // setting.head_chunks(model))
        work = head_chunk, config.method == "full", DTYPES[config.dtype], config.attention == "flash4"
        ceiling = options.ranks * bare_ceiling(model, config.batch_size, config.seq_len, *work)
    result = described(config, model, setting, measured, parameters, ceiling)
    print(table(result))
    if config.json:
        Path(config.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def described(
    config: BenchConfig,
    model: ModelConfig,
    setting: Setting,
    measured: Measured,
    parameters: tuple[int, int],
    ceiling: float | None,
) -> dict[str, Any]:
    """The result as plain data: what ran, how fast, beside `ceiling` (tokens per second) where there is one."""
    medians = [statistics.median(seconds) for seconds in measured.rounds]
    seconds = statistics.median(medians)
    options, grad_accum = setting.options, setting.grad_accum
    rows = grad_accum * config.batch_size * options.dp
    tokens = rows * config.seq_len
    flops = model_flops(model, options, tokens, rows * config.seq_len**2)
    peak = peak_flops(options)
    return {
        "model": config.model,
        "method": config.method,
        "dtype": config.dtype,
        "attention_library": config.attention,
        "device": device_name(config.device),
        "strategy": strategy(options),
        "gpus": options.ranks,
        "batch_size": config.batch_size,
        "seq_len": config.seq_len,
        "grad_accum": grad_accum,
        "head_chunks": setting.head_chunks(model),
        "recompute": ",".join(options.recompute),
        "offload": ",".join(options.offload),
        "trainable_parameters": parameters[0],
        "parameters": parameters[1],
        "tokens_per_update": tokens,
        "seconds_per_update": medians,
        "tokens_per_sec": tokens / seconds,
        "ceiling_tokens_per_sec": ceiling,
        "share_of_ceiling": None if ceiling is None else tokens / seconds / ceiling,
        "model_tflops_per_sec": flops / seconds / 1e12,
        "mfu": None if peak is None else flops / seconds / (peak * options.ranks),
        "bubble_predicted": planned_pipeline(setting, model).timeline.bubble if options.pp > 1 else None,
        "bubble_measured": None if measured.action_times is None else measured_bubble(measured.action_times),
        "peak_memory_gb": measured.peak_bytes / 1e9,
        "device_memory_gb": None if measured.device_bytes is None else measured.device_bytes / 1e9,
        "host_ms_per_micro_step": None if measured.host is None else 1e3 * statistics.median(measured.host),
        **described_kinds(measured.kinds),
        "loss_first": measured.metrics[0]["loss"],
        "loss_last": measured.metrics[-1]["loss"],
        "grad_norm_last": measured.metrics[-1]["grad_norm"],
        "dead_gradients": len(measured.dead),
    }


def described_kinds(kinds: TimeByKind | None) -> dict[str, Any]:
    """Time by kind as plain data; on a CPU, where no one clock tells the kinds apart, the same keys with None."""
    if kinds is None:
        none = dict.fromkeys(KINDS)
        measured = none, none, None, None, None
    else:
        ms = {kind: 1e3 * kinds.seconds[kind] for kind in KINDS}
        share = {kind: kinds.seconds[kind] / kinds.wall for kind in KINDS}
        measured = ms, share, 1e3 * kinds.overlap, 1e3 * kinds.wall, list(kinds.unrecognised)
    names = "time_by_kind_ms", "time_by_kind_share", "overlap_ms", "profiled_update_ms", "unrecognised_kernels"
    return dict(zip(names, measured, strict=True))


def check_file(file: Path) -> None:
    """Raise ConfigError when `file` cannot be written."""
    if file.is_dir() or not file.parent.is_dir():
        remedy = "name a file in it" if file.is_dir() else f"make {file.parent} first"
        raise ConfigError(f"json: {file} must be a file in a directory that is there; {remedy}")
    check_writable("json", file.parent)


def model_config(name: str) -> ModelConfig:
    """The sizes that a built-in name, directory or config.json stands for."""
    if name not in PRESETS and Path(name).exists():
        return ModelConfig.from_pretrained(name)
    return preset(name)


def measure(trainer: Trainer, grad_accum: int, updates: int, lr: float) -> Measured:
    """Train on one fixed window of random tokens, every position supervised; times exclude the warm-up.

    What looks closer and so disturbs (waiting before every micro-step, profiling) comes after the timed rounds.
    """
    rng = np.random.default_rng(0)
    shape = (trainer.options.dp * trainer.batch_size, trainer.seq_len + 1)
    window = [rng.integers(trainer.config.vocab_size, size=shape, dtype=np.int32) for _ in range(grad_accum)]
    pairs = [(np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])) for ids in window]
    metrics: list[dict[str, float]] = []
    dead: set[str] = set()

    def one_update() -> float:
        started = time.perf_counter()
        for inputs, targets in pairs:
            trainer.step(inputs, targets)
        if len(metrics) < WARM_UP:
            dead.update(dead_gradients(trainer, first=not metrics))
        metrics.append(
            trainer.update(
                lr=lr, beta1=0.9, beta2=0.95, eps=1e-8, step=len(metrics) + 1, weight_decay=0.0, grad_clip=1.0
            )
        )
        return time.perf_counter() - started  # update() has waited for the device

    for _ in range(WARM_UP):
        one_update()
    trainer.peak_memory()
    rounds = [[one_update() for _ in range(updates)] for _ in range(ROUNDS)]
    measured = Measured(rounds, metrics, trainer.peak_memory(), sorted(dead))
    if trainer.options.pp > 1:
        trainer.time_actions()
        one_update()
        measured = dataclasses.replace(measured, action_times=trainer.action_times())
    if trainer.device.type != "cuda" or trainer.world_size > 1:  # what is looked at closer is in this process
        return measured
    device_bytes, host = used_bytes(), issue_times(trainer, pairs)
    return dataclasses.replace(measured, device_bytes=device_bytes, host=host, kinds=profile(one_update))


def used_bytes() -> int:
    """What the driver counts as used on the current GPU: libraries and unused reserves too, and other programs'."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def issue_times(trainer: Trainer, pairs: list[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    """The host's seconds for HOST_STEPS micro-steps: checking and staging a batch and launching its graphs.

    The GPU is idle at the start of each. In training the host runs ahead of it, and the same call then also waits for a
    place in the launch queue or for a staging buffer whose copy is still queued; that time costs nothing.
    """
    import torch

    seconds = []
    for turn in range(HOST_STEPS):
        if turn % len(pairs) == 0:
            trainer.discard()
        torch.cuda.synchronize()
        started = time.perf_counter()
        trainer.step(*pairs[turn % len(pairs)])
        seconds.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    trainer.discard()
    return seconds


def profile(one_update: Callable[[], float]) -> TimeByKind | None:
    """Time by kind of one more update; None where the driver shows no kernels."""
    wall: list[float] = []
    kernels = gpu_kernels(lambda: wall.append(one_update()))
    return time_by_kind(kernels, wall[0]) if kernels else None


def dead_gradients(trainer: Trainer, first: bool) -> list[str]:
    """The trained tensors whose gradient is all zeros. In the `first` update an adapter's A has none: its B is zero."""
    alive: dict[str, bool] = {}
    for rank in range(trainer.world_size):  # each may have a part of them
        for name, grad in trainer.gradients(rank).items():
            alive[name] = alive.get(name, False) or bool(grad.any()) or (first and name.endswith(FIRST_ZERO))
    return [name for name, lives in alive.items() if not lives]


def check_trains(metrics: list[dict[str, float]], dead: list[str]) -> None:
    """Raise ConfigError when the loss on the fixed window does not fall, when a gradient norm is zero or not finite,
    or when there are tensors without a gradient (`dead`)."""
    if dead:
        raise ConfigError(
            f"bench: {len(dead)} tensors get no gradient, so they do not train: {', '.join(dead[:4])}"
            f"{' ...' if len(dead) > 4 else ''}; the speed of such a run means nothing. With dtype = fp32 you see "
            "whether precision is the cause"
        )
    norms = [m["grad_norm"] for m in metrics]
    if not all(0 < norm < float("inf") for norm in norms):
        raise ConfigError(
            f"bench: a gradient norm is zero or not finite ({min(norms)} to {max(norms)}): nothing trains"
        )
    if not metrics[-1]["loss"] < metrics[0]["loss"]:
        raise ConfigError(
            f"bench: the loss on a fixed batch does not fall ({metrics[0]['loss']:.5f} to {metrics[-1]['loss']:.5f}); "
            "lower lr, or set dtype = fp32 to see whether precision is the cause"
        )


def device_name(device: str) -> str:
    """The GPU's name, or `cpu`."""
    if device != "cuda":
        return device
    import torch

    return torch.cuda.get_device_name()


def table(result: dict[str, Any]) -> str:
    """What a person reads: SECTIONS, and time by kind before the last."""
    sections = {title: [(name, shown(result[name])) for name in names] for title, names in SECTIONS.items()}
    kinds = []
    for kind, ms in result["time_by_kind_ms"].items():
        share = result["time_by_kind_share"][kind]
        kinds.append((kind, "-" if ms is None else f"{ms:9.2f} ms {100 * share:6.1f} %"))
    kinds += [(name, shown(result[name])) for name in ("overlap_ms", "profiled_update_ms")]
    if result["unrecognised_kernels"]:
        kinds.append(("unrecognised_kernels", ", ".join(name[:80] for name in result["unrecognised_kernels"])))
    last = sections.popitem()
    sections |= {"time by kind, of one update": kinds, last[0]: last[1]}
    return "\n\n".join(
        "\n".join([title, *(f"  {name:<24} {value}" for name, value in rows)]) for title, rows in sections.items()
    )


def shown(value: Any) -> str:
    """A value of the table."""
    if isinstance(value, list):
        return "  ".join(shown(item) for item in value)
    if isinstance(value, float):
        return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
