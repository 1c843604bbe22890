"""The keys of a run. One dataclass field is one key, under one name in TOML, on the command line, in Python and logs.

Field metadata carries what is known about a key: its meaning, the values it may take, and (`now`) those that work in
this version; everything is checked at construction, so a configuration that exists can be run.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Self

from fullstride.config.keys import check_fields, dashed, key
from fullstride.config.rules import check_rules
from fullstride.errors import ConfigError, UsageError

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RECOMPUTE = ("swiglu", "norm", "ffn", "qkv", "att", "block")
OFFLOAD = ("master", "m", "v", "grads", "weights", "residual")
DTYPES = ("fp32", "bf16")
LEAST_CAPABILITY = (8, 0)  # of a GPU: Ampere
FLASH4_VERSION = "4.0.0b36"  # whose functions kernels/flash4 calls; they are not settled yet
# AdamW divides by sqrt(v) + eps in float32, where squares of gradients under 1e-22 are 0: eps has to outweigh those
LEAST_EPS = 1e-20
MOST_LR = 1000.0  # AdamW's steps are of about this size: weights stay finite in float32 and bf16


def default_dtype(device: str) -> str:
    """The precision of weights and activations that is best on `cuda` or `cpu`."""
    return "bf16" if device == "cuda" else "fp32"


def resolve_device(device: str) -> str:
    """`cuda` or `cpu` for `auto`, `cuda` or `cpu`. Raises ConfigError for a GPU that is missing or too old."""
    import torch

    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError("device = cuda, but torch sees no NVIDIA GPU here; set device = cpu or auto")
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        raise ConfigError(
            f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}; "
            "8.0 (Ampere) is the least that is supported; set device = cpu"
        )
    return "cuda"


def resolve_attention(attention: str, device: str, dtype: str) -> str:
    """`torch` or `flash4` for "" (automatic), `torch` or `flash4`. Raises ConfigError for a flash4 that cannot be."""
    if attention == "torch" or (not attention and (device != "cuda" or dtype == "fp32")):
        return "torch"
    obstacle = _flash4_obstacle(device, dtype)
    if attention and obstacle:
        raise ConfigError(f"attention = flash4 {obstacle}; set attention = torch or leave it out")
    return "torch" if obstacle else "flash4"


def _flash4_obstacle(device: str, dtype: str) -> str:
    """What stands against FlashAttention-4 here; "" for nothing."""
    import torch

    if device != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        return "needs a GPU of compute capability 9.0 (Hopper): it was tested on no other"
    if dtype == "fp32":
        return "has no fp32"
    try:
        found = version("flash-attn-4")
    except PackageNotFoundError:
        found = "none"
    needs = f"needs flash-attn-4 {FLASH4_VERSION} (pip install 'fullstride[flash4]'), here is {found}"
    return "" if found == FLASH4_VERSION else needs


@dataclass(frozen=True)
class Options:
    """What the Trainer needs beyond the model: method, LoRA, precision, memory, splitting, device, seed.

    Raises UsageError for a value that is not legal, does not work yet, or contradicts another. "", 0 and None mean
    automatic where the help says so; `resolved()` replaces them.
    """

    method: str = key("full", "what trains", choices=("full", "lora"))
    lora_rank: int = key(16, "rank of the adapters", at_least=1)
    lora_alpha: float = key(32.0, "adapters are scaled by alpha / rank", above=0)
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
    offload: tuple[str, ...] = key((), "what lives in host memory", choices=OFFLOAD, now=((), ("grads",)))
    zero: int = key(1, "what data-parallel ranks share out (0 to 3)", at_least=0, at_most=3, may_change=True)
    dp: int = key(0, "data-parallel ranks; automatic: what remains of gpus", at_least=0, may_change=True)
    tp: int = key(1, "tensor-parallel ranks, which share out every layer", at_least=1, may_change=True)
    pp: int = key(1, "ranks of a pipeline, among which layers are dealt out", at_least=1, may_change=True)
    pp_schedule: str = key(
        "1f1b", "order of a pipeline's work", choices=("1f1b", "gpipe", "interleaved", "zb-h1"), may_change=True
    )
    pp_chunks: int = key(0, "stages a rank, with pp-schedule = interleaved; automatic: 2", at_least=0, may_change=True)
    microbatches: int = key(
        0, "micro-batches per micro-step, in a pipeline; automatic: batch-size", at_least=0, may_change=True
    )
    grad_reduce: str = key("reduce-scatter", "how gradients are reduced", choices=("reduce-scatter", "all-to-all"))
    gather_by: str = key(
        "nccl", "what gathers weights that ranks share out: NCCL, or copy engines", choices=("nccl", "copy")
    )
    send_by: str = key(
        "nccl", "what exchanges gradients under all-to-all: NCCL, or copy engines", choices=("nccl", "copy")
    )
    deterministic: bool = key(False, "the same run gives the same bits on a GPU too (on a CPU always)")
    attention: str = key(
        "",
        "attention on a GPU: torch's alone, or FlashAttention-4 where faster; automatic: flash4 if installed",
        choices=("torch", "flash4"),
        may_change=True,
    )
    graphs: bool = key(True, "on a GPU, micro-steps and updates run as CUDA graphs")
    head_chunks: int = key(0, "pieces of the LM head; 0: automatic", at_least=0)
    async_save: bool = key(
        False, "checkpoints are copied to host memory, and written while training goes on", may_change=True
    )
    device: str = key("auto", "where it runs", choices=("auto", "cuda", "cpu"), may_change=True)
    seed: int = key(42, "seed of everything random", at_least=0, below=2**63)

    def __post_init__(self) -> None:
        check_fields(self)
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
        check_rules(self, self._ranks())

    @property
    def ranks(self) -> int:
        """All of them, of resolved options."""
        return self.dp * self.pp * self.tp

    def _ranks(self) -> int:
        """As far as these keys tell."""
        return (self.dp or 1) * self.pp * self.tp

    def resolved(self) -> Self:
        """The same configuration with everything automatic decided (this looks at the machine)."""
        device = resolve_device(self.device)
        if "copy" in (self.gather_by, self.send_by) and sys.platform != "linux":
            raise ConfigError(
                f"gather-by and send-by = copy need memory that processes share as on Linux, this is {sys.platform}; "
                "set nccl for both, or leave them out"
            )
        decided = self.decided(device)
        return dataclasses.replace(decided, attention=resolve_attention(self.attention, device, decided.dtype))

    def decided(self, device: str) -> Self:
        """As `resolved` for a machine with `device` (cuda, cpu), without looking at it; attention stays as it is."""
        dtype = self.dtype or default_dtype(device)
        return dataclasses.replace(
            self,
            device=device,
            dtype=dtype,
            dp=self._ranks() // (self.pp * self.tp),
            pp_chunks=(self.pp_chunks or 2) if self.pp_schedule == "interleaved" else 1,
            matmul=self.matmul or dtype,
            grad_dtype=self.grad_dtype or dtype,
            master_dtype=self.master_dtype or ("fp32" if self.method == "lora" else dtype),
            m_dtype=self.m_dtype or "fp32",
            v_dtype=self.v_dtype or "fp32",
        )


@dataclass(frozen=True)
class CommandOptions(Options):
    """Options of a command, which makes the Trainer and so says over how many GPUs."""

    gpus: int = key(1, "GPUs, or with device = cpu workers (0: all)", at_least=0, may_change=True, instead_of="dp")

    def _ranks(self) -> int:
        return self.gpus or super()._ranks()

    def options(self) -> Options:
        """The part that the Trainer takes."""
        return Options(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Options)})
