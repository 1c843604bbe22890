"""Sizes of public models by a short name, for measuring and planning without their files.

The values are those of each model's published config.json. Vocabulary sizes count embedding rows.
"""

from __future__ import annotations

from fullstride.errors import ConfigError
from fullstride.model.spec import Llama3Rope, ModelConfig


def _qwen25(width: int, ffn: int, layers: int, heads: int, kv_heads: int, tied: bool, vocab: int) -> ModelConfig:
    return ModelConfig(
        architecture="qwen2",
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
    )


def _qwen3(width: int, ffn: int, layers: int, heads: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        vocab_size=151936,
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=tied,
        max_position_embeddings=40960,
    )


def _llama3(width: int, ffn: int, layers: int, heads: int, head_dim: int, factor: float, tied: bool) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=Llama3Rope(factor, 1.0, 4.0, 8192),
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
    )


def _smollm2(width: int, ffn: int, layers: int, heads: int, kv_heads: int, theta: float) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        rope_theta=theta,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )


PRESETS = {
    "qwen2.5-0.5b": _qwen25(896, 4864, 24, 14, 2, True, 151936),
    "qwen2.5-1.5b": _qwen25(1536, 8960, 28, 12, 2, True, 151936),
    "qwen2.5-3b": _qwen25(2048, 11008, 36, 16, 2, True, 151936),
    "qwen2.5-7b": _qwen25(3584, 18944, 28, 28, 4, False, 152064),
    "qwen2.5-14b": _qwen25(5120, 13824, 48, 40, 8, False, 152064),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    "llama3.1-8b": _llama3(4096, 14336, 32, 32, 128, 8.0, False),
    "llama3.2-1b": _llama3(2048, 8192, 16, 32, 64, 32.0, True),
    "llama3.2-3b": _llama3(3072, 8192, 28, 24, 128, 32.0, True),
    "smollm2-135m": _smollm2(576, 1536, 30, 9, 3, 1e5),
    "smollm2-360m": _smollm2(960, 2560, 32, 15, 5, 1e5),
    "smollm2-1.7b": _smollm2(2048, 8192, 24, 32, 32, 1.3e5),
    "mistral-7b": ModelConfig(
        architecture="mistral",
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        max_position_embeddings=32768,
    ),
}


def preset(name: str) -> ModelConfig:
    """The configuration of a built-in name. Raises ConfigError that lists them."""
    if name not in PRESETS:
        raise ConfigError(f"model: {name} is no directory, no file and no built-in name ({', '.join(PRESETS)})")
    return PRESETS[name]
