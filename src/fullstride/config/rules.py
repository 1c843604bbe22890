"""Which options exclude one another: one table, read whenever options are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fullstride.errors import UsageError

if TYPE_CHECKING:
    from fullstride.config import Options


@dataclass(frozen=True)
class Rule:
    """What may not be: `broken` says so of options `o` and the number of data-parallel ranks (1 where it is not known
    yet), `told` is the rule, what came, and what to set instead, with {o.KEY} and {ranks} for values."""

    broken: Callable[[Options, int], bool]
    told: str


RULES = (
    Rule(
        lambda o, ranks: o.matmul == "fp8",
        "matmul = fp8 does not work yet; what works now is to leave it out (products in dtype)",
    ),
    Rule(
        lambda o, ranks: bool(o.matmul and o.dtype) and o.matmul != o.dtype,
        "matmul = {o.matmul} beside dtype = {o.dtype} does not work yet; "
        "what works now is matmul = {o.dtype}, or leaving it out",
    ),
    Rule(
        lambda o, ranks: o.dtype == "fp32" and o.master_dtype == "bf16",
        "master-dtype = bf16 is coarser than dtype = fp32; set dtype = bf16 or leave it out",
    ),
    Rule(
        lambda o, ranks: o.dtype == "fp32" and o.grad_dtype == "bf16",
        "grad-dtype = bf16 is coarser than dtype = fp32; set dtype = bf16 or leave it out",
    ),
    Rule(
        lambda o, ranks: o.dp not in (0, ranks),
        "dp is what remains of gpus after pp and tp; got dp = {o.dp}, where {ranks} remain; leave dp out",
    ),
    Rule(
        lambda o, ranks: o.pp == 1 and (o.pp_schedule != "1f1b" or o.microbatches > 0),
        "pp-schedule and microbatches concern pipelines, pp = 2 or more; got pp = 1, pp-schedule = {o.pp_schedule}, "
        "microbatches = {o.microbatches}; set pp, or leave them out",
    ),
    Rule(
        lambda o, ranks: (o.pp_chunks == 1) == (o.pp_schedule == "interleaved") and o.pp_chunks > 0,
        "pp-chunks is 2 or more with pp-schedule = interleaved, and 1 else; got pp-chunks = {o.pp_chunks} and "
        "pp-schedule = {o.pp_schedule}; leave pp-chunks out",
    ),
    Rule(
        lambda o, ranks: o.pp_schedule == "zb-h1" and o.tp > 1,
        "pp-schedule = zb-h1 computes weights' gradients later than ranks of tp hold what they exchanged for them; "
        "got tp = {o.tp}; set tp = 1, or pp-schedule = 1f1b",
    ),
    Rule(
        lambda o, ranks: o.pp_schedule == "zb-h1" and bool(o.recompute),
        "pp-schedule = zb-h1 computes weights' gradients later than recompute computes again what they need; "
        "got recompute = {o.recompute}; leave recompute out, or set pp-schedule = 1f1b",
    ),
    Rule(
        lambda o, ranks: o.pp_schedule == "zb-h1" and ((o.zero >= 2 and ranks > 1) or "grads" in o.offload),
        "pp-schedule = zb-h1 needs whole gradients on the GPU, zero = 0 or 1 and no offload; got zero = {o.zero}, "
        "offload = {o.offload}; set zero = 1 and leave offload out, or set pp-schedule = 1f1b",
    ),
    Rule(
        lambda o, ranks: o.pp_schedule == "zb-h1" and o.dtype == "bf16" and o.grad_dtype == "fp32",
        "pp-schedule = zb-h1 adds gradients up in dtype; got grad-dtype = fp32 beside dtype = bf16; "
        "leave grad-dtype out, or set pp-schedule = 1f1b",
    ),
    Rule(
        lambda o, ranks: o.grad_reduce == "all-to-all" and o.zero < 2,
        "grad-reduce = all-to-all exchanges gradients that ranks share out, which they do from zero = 2 on; "
        "got zero = {o.zero}; set zero = 2, or leave grad-reduce out",
    ),
    Rule(
        lambda o, ranks: o.send_by == "copy" and o.grad_reduce != "all-to-all",
        "send-by = copy concerns gradients that are exchanged, grad-reduce = all-to-all; got grad-reduce = "
        "{o.grad_reduce}; set grad-reduce = all-to-all and zero = 2 or 3, or leave send-by out",
    ),
    Rule(
        lambda o, ranks: o.gather_by == "copy" and o.zero < 1,
        "gather-by = copy concerns weights of which ranks update parts, which they do from zero = 1 on; "
        "got zero = {o.zero}; set zero = 1, or leave gather-by out",
    ),
    Rule(
        lambda o, ranks: ranks > 1 and o.zero < 2 and "grads" in o.offload,
        "offload = grads beside several ranks needs shared gradients, zero = 2 or 3; "
        "got zero = {o.zero} and {ranks} ranks; set zero = 2, or leave offload out",
    ),
    Rule(
        lambda o, ranks: ranks > 1 and o.zero < 2 and o.dtype == "bf16" and o.grad_dtype == "fp32",
        "grad-dtype = fp32 beside dtype = bf16 needs shared gradients where there are several ranks, zero = 2 or 3; "
        "got zero = {o.zero} and {ranks} ranks; set zero = 2, or leave grad-dtype out",
    ),
)


def check_rules(options: Options, gpus: int) -> None:
    """Raise UsageError for the first rule that `options` over `gpus` ranks break."""
    model = options.pp * options.tp
    if gpus % model:
        raise UsageError(
            f"gpus must be a multiple of pp x tp; got gpus = {gpus}, pp = {options.pp} and tp = {options.tp}; "
            f"set gpus = {-(-gpus // model) * model}"
        )
    ranks = gpus // model
    for rule in RULES:
        if rule.broken(options, ranks):
            raise UsageError(rule.told.format(o=options, ranks=ranks))


def check_decay(lr: float, weight_decay: float) -> None:
    """Raise UsageError where an update would turn weights round."""
    if lr * weight_decay > 1:
        raise UsageError(
            "lr times weight-decay, which an update takes off a weight, must be at most 1, "
            f"got {lr:g} times {weight_decay:g}; lower one of them"
        )
