"""What a run would take, before it runs and without a GPU: memory by segment, and the pipeline's schedule in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fullstride.config.commands import PlanConfig
from fullstride.config.keys import build
from fullstride.engine.limits import check_sizes
from fullstride.engine.pipeline_plan import PipelinePlan
from fullstride.engine.plan import predict
from fullstride.model.spec import ModelConfig, num_parameters, parameter_table
from fullstride.run.bench import check_file, model_config, shown
from fullstride.run.bubble import planned_pipeline
from fullstride.run.flops import model_flops
from fullstride.trainer.remedy import remedy
from fullstride.trainer.setting import Setting

GIGABYTE = 1e9
UNLIMITED = 2**63  # the host's memory is not known


def plan(**keys: Any) -> dict[str, Any]:
    """Plan as `fullstride plan --key value ...` does; keys as keyword arguments, with underscores.

    Raises ConfigError (with its kind UsageError) for what cannot be run.
    """
    return run_plan(build(PlanConfig, keys))


def run_plan(config: PlanConfig) -> dict[str, Any]:
    """Plan what `config` describes; prints it, returns the result as plain data, bytes and FLOPs as numbers."""
    config = config.resolved()
    if config.json:
        check_file(Path(config.json))
    model = model_config(config.model) if config.model else None
    setting = Setting(config, config.batch_size, config.seq_len, config.grad_accum)
    result: dict[str, Any] = {"run": described(config, model), "memory": None, "pipeline": None}
    if model is not None:
        check_sizes(model, setting.rows, config.seq_len, config.device)
        result["memory"] = memory(setting, model, config.gpu_memory)
    pipeline = planned_pipeline(setting, model) if config.pp > 1 or config.show_schedule else None
    if pipeline is not None:
        result["pipeline"] = described_pipeline(pipeline)
    print(told(result))
    if pipeline is not None and config.show_schedule:
        print(f"\n{pipeline.picture()}")
    if config.json:
        Path(config.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def described(config: PlanConfig, model: ModelConfig | None) -> dict[str, Any]:
    """What would run."""
    keys = {"gpus": config.gpus, "dp": config.dp, "pp": config.pp}
    keys |= {"batch_size": config.batch_size, "grad_accum": config.grad_accum}
    if model is None:
        return keys
    rows = config.batch_size * config.grad_accum * config.dp
    tokens = rows * config.seq_len
    return {
        "model": config.model,
        "method": config.method,
        "dtype": config.dtype,
        "device": config.device,
        **keys,
        "seq_len": config.seq_len,
        "zero": config.zero,
        "recompute": ",".join(config.recompute),
        "offload": ",".join(config.offload),
        "parameters": num_parameters(parameter_table(model)),
        "tokens_per_update": tokens,
        "flops_per_update": model_flops(model, config, tokens, rows * config.seq_len**2),
    }


def memory(setting: Setting, model: ModelConfig, gpu_memory: float) -> dict[str, Any]:
    """Bytes that a rank takes at its peak (of a pipeline's the one that needs most), by segment from the largest, and
    what they mean beside `gpu_memory` GB."""
    options = setting.options
    found = predict(model, *setting.engine(model), options.device, ranks=options.ranks)
    segments = dict(sorted(found.device.items(), key=lambda item: -item[1]))
    total, capacity = sum(segments.values()), int(gpu_memory * GIGABYTE)
    result = {"segments": segments, "total": total, "pinned_in_host": sum(found.pinned.values())}
    result |= {"limited_by": next(iter(segments)), "fits": total <= capacity if capacity else None, "instead": None}
    if capacity and total > capacity:
        result["instead"] = remedy(model, setting, options.device, capacity, UNLIMITED, documents=0, shapes=1)
    return result


def described_pipeline(pipeline: PipelinePlan) -> dict[str, Any]:
    """The stages and what the simulation says of them; FLOPs are a micro-batch's, 1 a pass where there is no model."""
    schedule = pipeline.schedule
    stages: list[dict[str, Any]] = [
        {
            "rank": schedule.rank_of(stage),
            "layers": [pipeline.layers[stage].start, pipeline.layers[stage].stop] if pipeline.layers else None,
            "flops": list(cost),
            "peak_live": pipeline.peak_live[stage],
        }
        for stage, cost in enumerate(pipeline.costs)
    ]
    work = [sum(sum(s["flops"]) for s in stages if s["rank"] == rank) for rank in range(schedule.num_ranks)]
    return {
        "schedule": schedule.name,
        "microbatches_per_update": schedule.microbatches,
        "bubble": pipeline.timeline.bubble,
        "limited_by_rank": work.index(max(work)),
        "stages": stages,
    }


def told(result: dict[str, Any]) -> str:
    """What a person reads."""
    sections = [("what would run", [(name, shown(value)) for name, value in result["run"].items()])]
    if found := result["memory"]:
        rows = [
            (name, f"{size / GIGABYTE:9.3f} GB {100 * size / found['total']:6.1f} %")
            for name, size in found["segments"].items()
        ]
        rows += [(name, f"{found[name] / GIGABYTE:9.3f} GB") for name in ("total", "pinned_in_host")]
        rows.append(("limited_by", found["limited_by"]))
        if found["fits"] is not None:
            rows.append(("fits", "yes" if found["fits"] else f"no: {found['instead']}"))
        sections.append(("memory of each GPU" if result["run"]["device"] == "cuda" else "memory of each worker", rows))
    if found := result["pipeline"]:
        rows = [(name, shown(found[name])) for name in ("schedule", "microbatches_per_update")]
        work = sum(sum(stage["flops"]) for stage in found["stages"])
        rows += [(f"stage {i}", told_stage(stage, work)) for i, stage in enumerate(found["stages"])]
        most = sum(sum(s["flops"]) for s in found["stages"] if s["rank"] == found["limited_by_rank"])
        rows.append(("limited_by", f"rank {found['limited_by_rank']}, {100 * most / work:.1f} % of the work"))
        rows.append(("bubble", f"{100 * found['bubble']:.1f} %"))
        sections.append(("pipeline", rows))
    return "\n\n".join(
        "\n".join([title, *(f"  {name:<24} {value}" for name, value in rows)]) for title, rows in sections
    )


def told_stage(stage: dict[str, Any], work: float) -> str:
    """A stage's rank, layers and share of all stages' `work`."""
    parts = [f"rank {stage['rank']}", f"{100 * sum(stage['flops']) / work:.1f} % of the work"]
    if stage["layers"]:
        first, end = stage["layers"]
        parts.insert(1, f"layer {first}" if end - first == 1 else f"layers {first} to {end - 1}")
    return ", ".join([*parts, f"peak live {stage['peak_live']}"])
