"""Model FLOPs of a step, and the share of a GPU's peak that they amount to."""

from __future__ import annotations

from fullstride.config import Options
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


def lora_parameters(config: ModelConfig, rank: int, targets: tuple[str, ...]) -> int:
    """Elements of all adapters: R * (inputs + outputs) for each target of each layer."""
    width, ffn = config.hidden_size, config.intermediate_size
    sizes = {
        "q_proj": (width, config.q_size),
        "k_proj": (width, config.kv_size),
        "v_proj": (width, config.kv_size),
        "o_proj": (config.q_size, width),
        "gate_proj": (width, ffn),
        "up_proj": (width, ffn),
        "down_proj": (ffn, width),
    }
    return config.num_hidden_layers * rank * sum(sum(sizes[target]) for target in targets)


def model_flops(config: ModelConfig, options: Options, tokens: int, squared_lengths: int) -> float:
    """FLOPs that one update needs, recomputation not counted (PaLM's model FLOPs, arXiv 2204.02311, appendix B).

    Each weight of a matrix product costs 2 FLOPs a token in the forward, the input gradient and the weight gradient; a
    frozen weight has no weight gradient. Causal attention costs 2 * n^2 * H * E a layer in the forward and twice that
    in the backward for a document of n tokens; `squared_lengths` is the sum of n^2 over the documents.
    """
    c = config
    layer = c.hidden_size * (2 * c.q_size + 2 * c.kv_size + 3 * c.intermediate_size)
    weights = c.num_hidden_layers * layer + c.vocab_size * c.hidden_size
    attention = 6 * c.num_hidden_layers * c.q_size * squared_lengths
    if options.method == "full":
        return 6 * weights * tokens + attention
    return (4 * weights + 6 * lora_parameters(c, options.lora_rank, options.lora_targets)) * tokens + attention


def peak_flops(options: Options) -> float | None:
    """Peak FLOP/s of this GPU in the precision of `options` (resolved); None for a CPU, float32 or an unknown GPU."""
    if options.device != "cuda" or options.matmul != "bf16":
        return None
    import torch

    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS if part in name), None)
