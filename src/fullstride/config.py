"""The keys of a run. One dataclass field is one key, under one name in TOML, on the command line, in Python and in logs.

Field metadata carries what is known about a key: its meaning, the values it may take, and (`now`) those that work in
this version; everything is checked at construction, so a configuration that exists can be run. `parse` reads
`[RUN.toml] [--key value ...]` into any such dataclass, `dump_toml` writes one back.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fullstride.errors import ConfigError, UsageError

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RECOMPUTE = ("swiglu", "norm", "ffn", "qkv", "att", "block")
OFFLOAD = ("master", "m", "v", "grads", "weights", "residual")
DTYPES = ("fp32", "bf16")

Config = TypeVar("Config")


def key(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    now: Sequence[Any] = (),
    at_least: float | None = None,
    below: float | None = None,
    required: bool = False,
    may_change: bool = False,
    instead_of: str = "",
) -> Any:
    """A dataclass field that is a key.

    `choices` are its legal values ("" stays legal as "automatic" when it is the default), `now` those that work in
    this version, `at_least` and `below` bounds, `may_change` says that a resumed run may differ in it, `instead_of`
    names a key that a flag for this one replaces in the file.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "help": help,
            "choices": tuple(choices),
            "now": tuple(now),
            "at_least": at_least,
            "below": below,
            "required": required,
            "may_change": may_change,
            "instead_of": instead_of,
        },
    )


def resolve_device(device: str) -> str:
    """`cuda` or `cpu` for `auto`, `cuda` or `cpu`. Raises ConfigError for a GPU that is missing or too old."""
    import torch

    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError("device = cuda, but torch sees no NVIDIA GPU here; set device = cpu or auto")
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        raise ConfigError(
            f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}; "
            "8.0 (Ampere) is the least that is supported; set device = cpu"
        )
    return "cuda"


@dataclass(frozen=True)
class Options:
    """What the Trainer needs beyond the model: method, LoRA, precision, memory, splitting, device, seed.

    Raises UsageError for a value that is not legal, does not work yet, or contradicts another. "" and 0 mean
    automatic where the help says so; `resolved()` replaces them.
    """

    method: str = key("full", "what trains", choices=("full", "lora"))
    lora_rank: int = key(16, "rank of the adapters", at_least=1)
    lora_alpha: float = key(32.0, "adapters are scaled by alpha / rank")
    lora_dropout: float = key(0.0, "dropout on the adapters' input", at_least=0, below=1)
    lora_targets: tuple[str, ...] = key(LORA_TARGETS, "projections that get an adapter", choices=LORA_TARGETS)
    rslora: bool = key(False, "scale by alpha / sqrt(rank) instead")
    dtype: str = key(
        "", "precision of weights and activations; automatic: bf16 on a GPU, fp32 on a CPU", choices=DTYPES
    )
    matmul: str = key("", "precision of matrix products; automatic: dtype", choices=(*DTYPES, "fp8"))
    master_dtype: str = key(
        "", "precision of the optimizer's weights; automatic: fp32 for LoRA, else dtype", choices=DTYPES
    )
    m_dtype: str = key("", "precision of the first moment; automatic: fp32", choices=DTYPES)
    v_dtype: str = key("", "precision of the second moment; automatic: fp32", choices=DTYPES)
    grad_dtype: str = key("", "precision of gradients; automatic: dtype", choices=DTYPES)
    recompute: tuple[str, ...] = key((), "what the backward computes again instead of keeping it", choices=RECOMPUTE)
    offload: tuple[str, ...] = key((), "what lives in host memory", choices=OFFLOAD, now=((),))
    zero: int = key(1, "what data-parallel ranks share out (0 to 3)", now=(1,), may_change=True)
    dp: int = key(0, "data-parallel ranks; automatic: what remains of gpus", now=(0, 1), may_change=True)
    tp: int = key(1, "tensor-parallel ranks", now=(1,), may_change=True)
    pp: int = key(1, "pipeline stages", now=(1,), may_change=True)
    pp_schedule: str = key(
        "1f1b", "pipeline schedule", choices=("1f1b", "gpipe", "interleaved", "zb-h1"), now=("1f1b",)
    )
    microbatches: int = key(0, "micro-batches per micro-step; automatic: batch-size", now=(0,), may_change=True)
    grad_reduce: str = key(
        "reduce-scatter",
        "how gradients are reduced",
        choices=("reduce-scatter", "all-to-all"),
        now=("reduce-scatter",),
    )
    gather_by: str = key("nccl", "what gathers weights", choices=("nccl", "copy"), now=("nccl",))
    send_by: str = key("nccl", "what sends between pipeline stages", choices=("nccl", "copy"), now=("nccl",))
    deterministic: bool = key(False, "the same run gives the same bits on a GPU too (on a CPU always)")
    head_chunks: int = key(0, "pieces of the LM head; 0: automatic", at_least=0)
    device: str = key("auto", "where it runs", choices=("auto", "cuda", "cpu"), may_change=True)
    seed: int = key(42, "seed of everything random", at_least=0, below=2**63)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.lora_alpha <= 0:
            raise UsageError(f"lora-alpha must be positive, got {self.lora_alpha}")
        if not self.lora_targets:
            raise UsageError(f"lora-targets must name at least one of {', '.join(LORA_TARGETS)}")
        for name, order in (("lora_targets", LORA_TARGETS), ("recompute", RECOMPUTE), ("offload", OFFLOAD)):
            items = getattr(self, name)
            if len(set(items)) < len(items):
                raise UsageError(f"{dashed(name)} names one thing twice: {','.join(items)}")
            # one order, so that two ways to write a list are one configuration
            object.__setattr__(self, name, tuple(item for item in order if item in items))
        if self.method == "full":
            defaults = {f.name: f.default for f in dataclasses.fields(Options)}
            for name in ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "rslora"):
                if getattr(self, name) != defaults[name]:
                    raise UsageError(f"{dashed(name)} contradicts method = full; set method = lora or leave it out")
        self._check_precision()

    def _check_precision(self) -> None:
        if self.matmul == "fp8":
            raise UsageError("matmul = fp8 does not work yet; what works now is to leave it out (products in dtype)")
        for name in ("matmul", "grad_dtype"):
            value = getattr(self, name)
            if value and self.dtype and value != self.dtype:
                raise UsageError(
                    f"{dashed(name)} = {value} beside dtype = {self.dtype} does not work yet; "
                    f"what works now is {dashed(name)} = {self.dtype}, or leaving it out"
                )
        if self.dtype == "fp32" and self.master_dtype == "bf16":
            raise UsageError("master-dtype = bf16 is coarser than dtype = fp32; set dtype = bf16 or leave it out")

    def resolved(self: Config) -> Config:
        """The same configuration with everything automatic decided (this looks at the machine)."""
        assert isinstance(self, Options)
        device = resolve_device(self.device)
        dtype = self.dtype or ("bf16" if device == "cuda" else "fp32")
        return dataclasses.replace(
            self,
            device=device,
            dtype=dtype,
            dp=self.dp or 1,
            matmul=self.matmul or dtype,
            grad_dtype=self.grad_dtype or dtype,
            master_dtype=self.master_dtype or ("fp32" if self.method == "lora" else dtype),
            m_dtype=self.m_dtype or "fp32",
            v_dtype=self.v_dtype or "fp32",
        )


@dataclass(frozen=True)
class FinetuneConfig(Options):
    """All keys of `finetune`: those of the run, then the Trainer's options. Raises UsageError as Options does."""

    model: str = key("", "directory, or Hub id found in the local cache or downloaded", required=True)
    data: str = key(
        "", "JSONL file(s), directory with train/validation/test.jsonl, ami, sample, or Hub id", required=True
    )
    eval_data: str = key("", "rows to evaluate on; automatic: those that the data directory or set has")
    out: str = key("", "run directory; automatic: runs/NAME", may_change=True)
    name: str = key("", "name of the run; automatic: MODEL-DATA", may_change=True)
    method: str = key("lora", "what trains", choices=("full", "lora"))
    adapter: str = key("", "PEFT directory to continue from")
    train_on: str = key("all", "supervise every assistant turn, or the last only", choices=("all", "last"))
    seq_len: int = key(1024, "tokens per row", at_least=2)
    batch_size: int = key(4, "rows per micro-step", at_least=1)
    grad_accum: int = key(4, "micro-steps per update", at_least=1)
    steps: int = key(0, "updates, instead of epochs; 0: automatic", at_least=0, may_change=True, instead_of="epochs")
    epochs: int = key(0, "passes over the data; automatic: 3", at_least=0, may_change=True, instead_of="steps")
    lr: float = key(0.0, "learning rate; automatic: 2e-4 for LoRA, 1e-5 for full", at_least=0)
    schedule: str = key("cosine", "how the rate falls", choices=("cosine", "linear", "constant", "wsd"))
    warmup: float = key(0.0, "updates, or a fraction of all updates when below 1", at_least=0)
    final_lr_fraction: float = key(0.1, "the last rate as a fraction of lr", at_least=0)
    weight_decay: float = key(0.01, "AdamW's decoupled decay", at_least=0)
    beta1: float = key(0.9, "AdamW", at_least=0, below=1)
    beta2: float = key(0.95, "AdamW", at_least=0, below=1)
    eps: float = key(1e-8, "AdamW", at_least=0)
    grad_clip: float = key(1.0, "largest global gradient norm; 0: off", at_least=0)
    packing: bool = key(True, "fill rows with whole documents that do not see each other")
    truncate: str = key("prompt-start", "what happens to rows over seq-len", choices=("prompt-start", "drop", "error"))
    eval_every: int = key(
        0, "updates between evaluations (always at the start and the end)", at_least=0, may_change=True
    )
    save_every: int = key(0, "updates between checkpoints (always at the end)", at_least=0, may_change=True)
    keep: int = key(2, "checkpoints kept", at_least=1, may_change=True)
    keep_best: bool = key(False, "keep the best by eval-loss too", now=(False,), may_change=True)
    resume: int | str = key("auto", "auto (the newest checkpoint, if any), a step, or never", may_change=True)
    export_dtype: str = key("", "precision of the exported model; automatic: dtype", choices=DTYPES)
    profile: int = key(0, "trace of so many updates", now=(0,))
    log: tuple[str, ...] = key((), "sinks beside CSV and JSONL", now=((),), may_change=True)
    dry_run: bool = key(False, "show what the rows become; train nothing, write nothing", may_change=True)
    gpus: int = key(1, "GPUs (0: all)", now=(1,), may_change=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps and self.epochs:
            raise UsageError(f"steps = {self.steps} and epochs = {self.epochs} contradict each other; give one of them")
        if not self.steps and not self.epochs:
            object.__setattr__(self, "epochs", 3)
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise UsageError(f"warmup must be a whole number of updates, or a fraction below 1, got {self.warmup}")
        if self.final_lr_fraction > 1:
            raise UsageError(f"final-lr-fraction must be at most 1, got {self.final_lr_fraction}")
        if isinstance(self.resume, str) and self.resume not in ("auto", "never"):
            raise UsageError(f"resume must be auto, never or a step, got {self.resume!r}")
        if isinstance(self.resume, int) and self.resume < 1:
            raise UsageError(f"resume must be auto, never or a step of at least 1, got {self.resume}")
        if self.adapter and self.method == "full":
            raise UsageError("adapter contradicts method = full; set method = lora or leave it out")
        if self.export_dtype and self.method == "lora":
            raise UsageError("export-dtype concerns method = full; an adapter is saved in the precision it trains in")

    def options(self) -> Options:
        """The part that the Trainer takes."""
        return Options(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Options)})

    def resolved(self) -> FinetuneConfig:
        """See Options.resolved; the learning rate is decided too."""
        lr = self.lr or (2e-4 if self.method == "lora" else 1e-5)
        return dataclasses.replace(Options.resolved(self), lr=lr)


# ---------------------------------------------------------------------------------------------------------------------
# the machinery: one for TOML, flags and Python


def dashed(name: str) -> str:
    """A key as the command line and TOML spell it."""
    return name.replace("_", "-")


def nearest(name: str, names: Iterable[str]) -> str:
    """The one of `names` that is most like `name`."""
    return difflib.get_close_matches(name, list(names), n=1, cutoff=0.0)[0]


def fields_of(config: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a configuration (class or instance): its own first, then those of the class that it extends."""
    own = (config if isinstance(config, type) else type(config)).__annotations__
    return sorted(dataclasses.fields(config), key=lambda f: list(own).index(f.name) if f.name in own else len(own))


def check_fields(config: Any) -> None:
    """Check type, choices, bounds and what works now for every field; lists become tuples. For `__post_init__`."""
    hints = typing.get_type_hints(type(config))
    for f in dataclasses.fields(config):
        value = _typed(f.name, getattr(config, f.name), hints[f.name])
        object.__setattr__(config, f.name, value)
        if "help" in f.metadata:
            _check_value(f, value)


def _check_value(f: dataclasses.Field[Any], value: Any) -> None:
    name, known = dashed(f.name), f.metadata
    for item in value if isinstance(value, tuple) else (value,):
        if known["choices"] and item not in known["choices"] and not (item == "" and f.default == ""):
            raise UsageError(
                f"{name} must be {'among' if isinstance(value, tuple) else 'one of'} {', '.join(known['choices'])}; "
                f"got {item!r} (nearest: {nearest(str(item), known['choices'])})"
            )
    if known["at_least"] is not None and value < known["at_least"]:
        raise UsageError(f"{name} must be at least {known['at_least']}, got {value}")
    if known["below"] is not None and value >= known["below"]:
        raise UsageError(f"{name} must be below {known['below']}, got {value}")
    if known["now"] and value not in known["now"]:
        works = f"{name} = {_shown(known['now'][-1])}" if known["now"][-1] != () else f"to leave {name} out"
        raise UsageError(f"{name} = {_shown(value)} does not work yet; what works now is {works}")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed(name: str, value: Any, hint: Any) -> Any:
    """`value` (from Python or TOML) as the field's type, or UsageError."""
    if isinstance(value, os.PathLike) and hint is str:
        value = os.fspath(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and number and math.isfinite(value):
        return float(value)
    if hint is int and number and isinstance(value, int):
        return value
    if hint == int | str and ((number and isinstance(value, int)) or isinstance(value, str)):
        return int(value) if isinstance(value, str) and value.isdecimal() else value
    if hint == tuple[str, ...]:
        if isinstance(value, str):
            value = [item.strip() for item in value.split(",") if item.strip()]
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
    if hint in (bool, str) and isinstance(value, hint):
        return value
    raise UsageError(f"{dashed(name)} must be {_expected(hint)}, got {value!r}")


def _expected(hint: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
    return names.get(hint, "a comma-separated list" if hint == tuple[str, ...] else "a whole number or a word")


BOOLEANS = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}


def _from_text(name: str, text: str, hint: Any) -> Any:
    """The value of a flag."""
    try:
        if hint is bool:
            return BOOLEANS[text.lower()]
        return hint(text) if hint in (int, float) else _typed(name, text, hint)
    except (KeyError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{dashed(name)} must be {_expected(hint)}, got {text!r}") from None


def _known(cls: type, name: str) -> str:
    """The field that `name` (dashes or underscores) means, or UsageError with the nearest."""
    names = [f.name for f in dataclasses.fields(cls)]
    if (field := name.replace("-", "_")) not in names:
        raise UsageError(f"unknown key {name!r}; the nearest is {dashed(nearest(field, names))!r}")
    return field


def build(cls: type[Config], values: Mapping[str, Any]) -> Config:
    """`cls` from a mapping of keys (dashes or underscores). Raises UsageError for unknown or missing ones."""
    known = {_known(cls, name): value for name, value in values.items()}
    config = cls(**known)
    for f in fields_of(cls):
        if f.metadata.get("required") and not getattr(config, f.name):
            raise UsageError(f"{dashed(f.name)} is missing; give --{dashed(f.name)} ({f.metadata['help']})")
    return config


def read_toml(file: Path) -> dict[str, Any]:
    """The keys of a TOML file; tables are for the reader only and vanish. Raises ConfigError, UsageError."""
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; what comes first is a RUN.toml, keys begin with --")
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid TOML ({error})") from None
    values: dict[str, Any] = {}

    def flatten(table: dict[str, Any]) -> None:
        for name, value in table.items():
            if isinstance(value, dict):
                flatten(value)
            elif (field := name.replace("-", "_")) in values:
                raise UsageError(f"{file}: {name} is given twice; keep one")
            else:
                values[field] = value

    flatten(tree)
    return values


def parse(cls: type[Config], argv: Sequence[str], positional: Sequence[str] = ()) -> Config:
    """`cls` from `[RUN.toml] [--key value ...]`; flags win over the file. `positional` keys may come without a name."""
    file, flags = None, _read_flags(cls, argv, positional)
    if "" in flags:
        file = Path(flags.pop(""))
    values = {_known(cls, name): value for name, value in (read_toml(file) if file else {}).items()}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        other = f.metadata.get("instead_of")
        if other and f.name in flags and other not in flags:
            values.pop(other, None)
    return build(cls, {**values, **flags})


def _read_flags(cls: type, argv: Sequence[str], positional: Sequence[str]) -> dict[str, Any]:
    """Values by field name; the TOML file, if one is named, under ""."""
    hints = typing.get_type_hints(cls)
    flags: dict[str, Any] = {}
    words, unnamed = list(argv), list(positional)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            if word.endswith(".toml") and not flags:
                name = ""
            elif unnamed:
                name = unnamed.pop(0)
            else:
                raise UsageError(f"unexpected {word!r}; after an optional RUN.toml come --key value pairs")
            value: Any = word
        else:
            name, has_value, text = word[2:].partition("=")
            plain, names = name.replace("-", "_"), [f.name for f in dataclasses.fields(cls)]
            if plain not in names and plain.startswith("no_") and hints.get(plain[3:]) is bool and not has_value:
                name, value = plain[3:], False
            else:
                name = _known(cls, name)
                if not has_value:
                    follows = bool(words) and not words[0].startswith("--")
                    if hints[name] is bool and not (follows and words[0].lower() in BOOLEANS):
                        text = "true"
                    elif not follows:
                        raise UsageError(f"--{dashed(name)} needs a value: {_expected(hints[name])}")
                    else:
                        text = words.pop(0)
                value = _from_text(name, text, hints[name])
        if name in flags:
            raise UsageError(f"{dashed(name) or 'RUN.toml'} is given twice; give it once (lists are comma-separated)")
        flags[name] = value
    return flags


def help_text(cls: type, command: str, summary: str, positional: Sequence[str] = ()) -> str:
    """What `fullstride COMMAND --help` prints: every key with its meaning and default."""
    usage = " ".join([f"fullstride {command}", "[RUN.toml]", *(f"[{dashed(p).upper()}]" for p in positional)])
    lines = [f"usage: {usage} [--key value ...]", "", summary, "", "keys (in RUN.toml without the dashes):"]
    for f in fields_of(cls):
        known = f.metadata
        meaning = known["help"] + (f" [{' | '.join(known['choices'])}]" if known["choices"] else "")
        automatic = not f.default and ("automatic" in known["help"] or f.default in ("", ()))
        default = "" if automatic else f" (default {_shown(f.default)})"
        lines.append(f"  --{dashed(f.name):<18} {meaning}{' (required)' if known['required'] else default}")
    return "\n".join(lines)


def dump_toml(config: Any) -> str:
    """`config` as TOML that `parse` reads back to an equal one."""

    def literal(value: Any) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int | float):
            return repr(value)
        if isinstance(value, tuple):
            return f"[{', '.join(literal(item) for item in value)}]"
        # JSON's escapes are TOML's too, but TOML wants DEL escaped as well
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

    return "".join(f"{dashed(f.name)} = {literal(getattr(config, f.name))}\n" for f in fields_of(config))
