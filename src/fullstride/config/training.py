"""The keys of runs: those that all share, those of `finetune`, and those of `train`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

from fullstride.config import DTYPES, LEAST_EPS, MOST_LR, CommandOptions
from fullstride.config.keys import key
from fullstride.config.rules import check_decay
from fullstride.errors import UsageError

SINKS = ("tensorboard", "wandb", "trackio")


@dataclass(frozen=True)
class TrainingConfig(CommandOptions):
    """Keys of every run, before the Trainer's options. Raises UsageError as Options does.

    A command's own class adds what it trains on; `command` is its name.
    """

    command: ClassVar[str]

    model: str = key("", "directory, or Hub id found in the local cache or downloaded", required=True)
    data: str = key("", "what it trains on", required=True)
    eval_data: str = key("", "what it evaluates on")
    out: str = key("", "run directory; automatic: runs/NAME", may_change=True)
    name: str = key("", "name of the run; automatic: MODEL-DATA", may_change=True)
    adapter: str = key("", "PEFT directory to continue from")
    seq_len: int = key(1024, "tokens per row", at_least=2)
    batch_size: int = key(4, "rows per micro-step", at_least=1)
    grad_accum: int = key(4, "micro-steps per update", at_least=1)
    steps: int | None = key(None, "updates, instead of epochs", at_least=1, may_change=True, instead_of="epochs")
    epochs: int | None = key(
        None, "passes over the data; automatic: 3", at_least=1, may_change=True, instead_of="steps"
    )
    lr: float | None = key(None, "learning rate; automatic: 2e-4 for LoRA, 1e-5 for full", above=0, at_most=MOST_LR)
    schedule: str = key("cosine", "how the rate falls", choices=("cosine", "linear", "constant", "wsd"))
    warmup: float = key(0.0, "updates, or a fraction of all updates when below 1; less than the run", at_least=0)
    final_lr_fraction: float = key(0.1, "the last rate as a fraction of lr", at_least=0, at_most=1)
    weight_decay: float = key(0.01, "AdamW's decoupled decay", at_least=0)
    beta1: float = key(0.9, "AdamW", at_least=0, below=1)
    beta2: float = key(0.95, "AdamW", at_least=0, below=1)
    eps: float = key(1e-8, "AdamW", at_least=LEAST_EPS)
    grad_clip: float = key(1.0, "largest global gradient norm; 0: off", at_least=0)
    packing: bool = key(True, "fill rows with whole documents that do not see each other")
    eval_every: int = key(
        0, "updates between evaluations (always at the start and the end)", at_least=0, may_change=True
    )
    save_every: int = key(0, "updates between checkpoints (always at the end)", at_least=0, may_change=True)
    keep: int = key(2, "checkpoints kept", at_least=1, may_change=True)
    keep_best: bool = key(False, "keep the checkpoint with the least eval-loss too", may_change=True)
    resume: int | str = key("auto", "auto (the newest checkpoint, if any), a step, or never", may_change=True)
    export_dtype: str = key("", "precision of the exported model; automatic: dtype", choices=DTYPES)
    profile: int = key(0, "updates that are traced, after a warm-up of three", at_least=0, may_change=True)
    log: tuple[str, ...] = key((), "sinks beside CSV and JSONL", choices=SINKS, may_change=True)
    dry_run: bool = key(False, "show what the rows become; train nothing, write nothing", may_change=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.epochs is not None:
            raise UsageError(f"steps = {self.steps} and epochs = {self.epochs} contradict each other; give one of them")
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "epochs", 3)
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise UsageError(f"warmup must be a whole number of updates, or a fraction below 1, got {self.warmup}")
        check_decay(self.rate, self.weight_decay)
        if isinstance(self.resume, str) and self.resume not in ("auto", "never"):
            raise UsageError(f"resume must be auto, never or a step, got {self.resume!r}")
        if isinstance(self.resume, int) and self.resume < 1:
            raise UsageError(f"resume must be auto, never or a step of at least 1, got {self.resume}")
        if self.adapter and self.method == "full":
            raise UsageError("adapter contradicts method = full; set method = lora or leave it out")
        if self.export_dtype and self.method == "lora":
            raise UsageError("export-dtype concerns method = full; an adapter is saved in the precision it trains in")

    def resolved(self) -> Self:
        """See Options.resolved; the learning rate is decided too."""
        return dataclasses.replace(super().resolved(), lr=self.rate)

    @property
    def rate(self) -> float:
        """The learning rate, also where `lr` is automatic."""
        return self.lr if self.lr is not None else 2e-4 if self.method == "lora" else 1e-5


@dataclass(frozen=True)
class FinetuneConfig(TrainingConfig):
    """Keys of `finetune`."""

    command: ClassVar[str] = "finetune"

    model: str = key("", "directory, or Hub id found in the local cache or downloaded", required=True)
    data: str = key(
        "",
        "JSONL or Parquet files (a.jsonl:0.3,b.jsonl:0.7 weighs them), a directory (trains on its train.jsonl, "
        "evaluates on validation.jsonl, else test.jsonl), sample, a Hub id (OWNER/NAME:CONFIGURATION@REVISION), or ami "
        "(that Hub set: trains on train and validation, evaluates on test)",
        required=True,
    )
    eval_data: str = key("", "rows to evaluate on; automatic: those that the data directory or set has")
    method: str = key("lora", "what trains", choices=("full", "lora"))
    train_on: str = key("all", "supervise every assistant turn, or the last only", choices=("all", "last"))
    thinking: str = key(
        "auto",
        "of models with think blocks, how answers are prompted; auto: on for those that hold thoughts, else off",
        choices=("auto", "on", "off"),
    )
    cache_dir: str = key(
        "", "where tokenised rows are kept; automatic: ~/.cache/fullstride/rows; off: nowhere", may_change=True
    )
    truncate: str = key("prompt-start", "what happens to rows over seq-len", choices=("prompt-start", "drop", "error"))


@dataclass(frozen=True)
class TrainConfig(TrainingConfig):
    """Keys of `train`."""

    command: ClassVar[str] = "train"

    model: str = key("", "directory or Hub id; from scratch also a config.json or a built-in name", required=True)
    data: str = key("", "token files of `fullstride tokenize`: comma-separated, with patterns", required=True)
    eval_data: str = key("", "token files to evaluate on, whole; automatic: eval-fraction of data")
    eval_fraction: float = key(0.0, "part of data's rows that is held out to evaluate on", at_least=0, below=1)
    init: str = key("pretrained", "weights: the model's, or random ones", choices=("pretrained", "scratch"))
    tokenizer: str = key("", "directory whose tokenizer the trained model gets; automatic: the model's, or data's")
    method: str = key("full", "what trains", choices=("full", "lora"))
    lr: float | None = key(
        None,
        "learning rate; automatic: 2e-4 for LoRA, 1e-5 for full, 3e-4 from scratch",
        above=0,
        at_most=MOST_LR,
    )
    packing: bool = key(True, "documents in a row do not see each other")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init == "scratch" and self.method == "lora":
            raise UsageError("init = scratch contradicts method = lora, which needs a trained base; set method = full")
        if self.eval_data and self.eval_fraction:
            raise UsageError("eval-data and eval-fraction contradict each other; give one of them")

    @property
    def rate(self) -> float:
        """See TrainingConfig."""
        return 3e-4 if self.lr is None and self.init == "scratch" else super().rate
