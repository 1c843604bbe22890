"""The share of all ranks' time in which a pipeline leaves them idle: simulated before a run, and measured in one."""

from __future__ import annotations

from collections.abc import Sequence

from fullstride.engine.pipeline_plan import PipelinePlan, Work, plan_pipeline
from fullstride.model.spec import ModelConfig
from fullstride.run.flops import adapter_elements
from fullstride.trainer.setting import Setting


def planned_pipeline(setting: Setting, model: ModelConfig | None) -> PipelinePlan:
    """The schedule of one update: accumulation's micro-steps pass the pipeline one after another without a drain."""
    o, work = setting.options, None
    if model is not None:
        adapters = adapter_elements(model, o)
        work = Work(model, adapters, setting.tokens, setting.rows * setting.seq_len**2)
    return plan_pipeline(o.pp_schedule, o.pp, setting.grad_accum * setting.microbatches, o.pp_chunks, work)


def measured_bubble(times: Sequence[tuple[float, float]]) -> float:
    """From every rank's seconds at work and from its first to its last action (Trainer.action_times) of one update.

    Ranks have no common clock; but the first stage's rank begins first, and where weights' gradients are not put off it
    ends last: so the longest of the spans is the time that all of them take.
    """
    busy, spans = zip(*times, strict=True)
    return 1 - sum(busy) / (len(times) * max(spans))
