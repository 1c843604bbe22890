"""The oracle: tiny random transformers models, which compute in float64 when asked to, and our engine beside them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from fullstride.engine.state import Precision
from fullstride.engine.step import Engine, EngineSettings
from fullstride.engine.weights_io import import_weights
from fullstride.model.lora import LoraSettings
from fullstride.model.spec import ModelConfig

VOCABULARY = 89
# odd on purpose: 3 key/value heads, a head size that is not width / heads, a prime feed-forward width
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 42,
    "intermediate_size": 53,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
}


def make_model(family: str, tied: bool, seed: int = 0, **sizes: Any) -> Any:
    """A transformers model, float32, every tensor random (norm weights and biases too), without dropout."""
    name, extra = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        **{**SIZES, **extra, "tie_word_embeddings": tied, "attn_implementation": "sdpa", **sizes}
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.15)
    return model.eval()


def in_float64(model: Any) -> Any:
    """`model` in float64, its norms and rotary embedding too (unpatched they drop to float32; sdpa does not)."""
    model = model.double()
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = _norm64(module)
        elif kind.endswith("RotaryEmbedding"):
            module.forward = _rotary64(module)
    return model


def _norm64(module: Any) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))

    return forward


def _rotary64(module: Any) -> Any:
    config = module.config
    rope, dim = config.rope_parameters, config.head_dim
    frequencies = [rope["rope_theta"] ** (-2 * i / dim) for i in range(dim // 2)]
    if rope["rope_type"] == "llama3":
        frequencies = [_llama3(f, rope) for f in frequencies]

    def forward(x: torch.Tensor, position_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        angle = position_ids[..., None].double() * torch.tensor(frequencies, dtype=torch.float64)
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos(), angle.sin()

    return forward


def _llama3(frequency: float, rope: dict[str, Any]) -> float:
    # one frequency at a time, by cases, as Llama 3's reference code has it
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    if turns > high:
        return frequency
    if turns < low:
        return frequency / rope["factor"]
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * frequency / rope["factor"] + smooth * frequency


def make_engine(
    directory: Path,
    dtype: torch.dtype,
    rows: int,
    seq_len: int,
    lora: LoraSettings | None = None,
    master: torch.dtype | None = None,
    **settings: Any,
) -> Engine:
    """Our engine with the weights of a Hugging Face directory, everything but masters in `dtype`, on the CPU."""
    precision = Precision(dtype, master, dtype, dtype)
    values = {"head_chunks": 3, "grad_accum": 4, **settings}
    engine = Engine(
        ModelConfig.from_pretrained(directory),
        lora,
        EngineSettings(rows, seq_len, precision, **values),
        torch.device("cpu"),
    )
    with torch.no_grad():
        import_weights(engine, directory)
    return engine


def random_batch(rows: int, seq_len: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets), int32; about a third of the targets are ignored."""
    generator = np.random.default_rng(seed)
    inputs = generator.integers(0, VOCABULARY, (rows, seq_len), dtype=np.int32)
    targets = generator.integers(0, VOCABULARY, (rows, seq_len), dtype=np.int32)
    targets[generator.random((rows, seq_len)) < 0.35] = -100
    return inputs, targets


def loss_sum(model: Any, inputs: np.ndarray, targets: np.ndarray, z_loss: float = 0.0) -> torch.Tensor:
    """transformers' logits, and from them the sum over supervised tokens of loss + z_loss * lse ** 2."""
    logits = model(torch.from_numpy(inputs).long()).logits.flatten(0, 1)
    labels = torch.from_numpy(targets).long().flatten()
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    lse = torch.logsumexp(logits, -1)[labels != -100]
    return loss + z_loss * lse.square().sum()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
