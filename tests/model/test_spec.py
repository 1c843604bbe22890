"""Configurations that are not what they should be: one message that names the file, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fullstride.errors import ConfigError
from fullstride.model.spec import ModelConfig

GOOD: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_the_good_one_reads() -> None:
    assert ModelConfig.from_dict(GOOD).head_dim == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": "Qwen2ForCausalLM"},
        {"architectures": []},
        {"architectures": [None]},
        {"architectures": {"a": 1}},
        {"rms_norm_eps": None},
        {"rms_norm_eps": "small"},
        {"rope_parameters": "default"},
        {"rope_scaling": ["llama3"]},
        {"rope_theta": "x"},
        {"vocab_size": None},
        {"vocab_size": "10"},
        {"hidden_size": 0},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"num_key_value_heads": "1"},
        {"head_dim": 3},
        {"head_dim": [4]},
        {"layer_types": 3},
        {"max_position_embeddings": "many"},
        {"sliding_window": "x", "use_sliding_window": True},
        {"quantization_config": {"quant_method": "awq"}},
        {"pretraining_tp": 2, "quantization_config": {"quant_method": "gptq"}},
    ],
    ids=str,
)
def test_malformed_values(changes: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GOOD | changes))
    with pytest.raises(ConfigError):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "3", "null", '"x"', "{"])
def test_malformed_files(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config.json"):
        ModelConfig.from_pretrained(tmp_path)


def test_what_old_files_leave_out_is_transformers_default() -> None:
    mistral = {k: v for k, v in GOOD.items() if k != "num_key_value_heads"} | {"architectures": ["MistralForCausalLM"]}
    with pytest.raises(ConfigError, match="sliding_window 4096 is active"):
        ModelConfig.from_dict(mistral | {"max_position_embeddings": 32768})
    config = ModelConfig.from_dict(mistral | {"sliding_window": None, "num_attention_heads": 8, "hidden_size": 16})
    assert config.num_key_value_heads == 8
