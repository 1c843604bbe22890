"""Model FLOPs of a step, and the share of a GPU's peak that they amount to."""

from __future__ import annotations

from fullstride.config import Options
from fullstride.model.flops import head_flops, layer_flops, lora_parameters
from fullstride.model.spec import ModelConfig

# Dense bf16 FLOP/s from the vendor's data sheets. The first name that is part of the device's name counts.
PEAKS = (
    ("H100 PCIe", 756e12),
    ("H200", 989e12),
    ("H100", 989e12),
    ("GH200", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
)


def model_flops(config: ModelConfig, options: Options, tokens: int, squared_lengths: int) -> float:
    """FLOPs that one update needs, recomputation not counted (model/flops has the formulas).

    `squared_lengths` is the sum of n^2 over the documents of n tokens.
    """
    layer = layer_flops(config, adapter_elements(config, options), tokens, squared_lengths)
    return config.num_hidden_layers * sum(layer) + sum(head_flops(config, options.method == "full", tokens))


def adapter_elements(config: ModelConfig, options: Options) -> int | None:
    """Elements of a layer's adapters; None where there are none."""
    return lora_parameters(config, options.lora_rank, options.lora_targets) if options.method == "lora" else None


def peak_flops(options: Options) -> float | None:
    """Peak FLOP/s of this GPU in the precision of `options` (resolved); None for a CPU, float32 or an unknown GPU."""
    if options.device != "cuda" or options.matmul != "bf16":
        return None
    import torch

    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS if part in name), None)
