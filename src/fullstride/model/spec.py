"""Sizes of a model, and the table of its parameters.

Shape legend, one for the whole project: B rows, T positions, N = B*T tokens, D width (hidden_size), H query heads,
K key/value heads, E head size (head_dim), F feed-forward width (intermediate_size), V vocabulary, R LoRA rank,
L layers. Names of tensors carry it as suffix where it helps: `x_ND`. Gradients start with `d`: `dx_ND`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fullstride.errors import ConfigError

# Hugging Face class name -> our architecture name. Mistral and SmolLM2 are Llama's block.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3's frequency scaling (transformers' `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one dense Llama-family model, under the names of Hugging Face's config.json.

    Raises ConfigError for sizes that do not fit one another.
    """

    architecture: Literal["llama", "mistral", "qwen2", "qwen3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Llama3Rope | None = None
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    # what config.json says beyond the above (token ids, names): carried through to the export, never read by the engine
    extra: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES.values():
            raise ConfigError(
                f"architecture {self.architecture!r} is not supported, only {', '.join(ARCHITECTURES.values())}"
            )
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for name in (*sizes, "num_key_value_heads"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(f"{name} must be a positive integer, got {getattr(self, name)!r}")
        if not self.head_dim:
            if self.hidden_size % self.num_attention_heads:
                raise ConfigError(
                    f"hidden_size {self.hidden_size} does not divide by num_attention_heads "
                    f"{self.num_attention_heads}: set head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if not isinstance(self.head_dim, int) or self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(f"head_dim must be an even positive integer (rotary halves), got {self.head_dim!r}")

    @property
    def qkv_bias(self) -> bool:
        """Whether the q, k and v projections have a bias (Qwen2)."""
        return self.architecture == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are RMS-normalised per head before the rotary embedding (Qwen3)."""
        return self.architecture == "qwen3"

    @property
    def q_size(self) -> int:
        """Width of the queries of one token: H * E."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (and of the values) of one token: K * E."""
        return self.num_key_value_heads * self.head_dim

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelConfig:
        """The configuration in `path`/config.json (or in `path` itself, when it is a file).

        Raises ConfigError, naming what it met, for an unsupported architecture, active sliding window, rope type,
        projection bias or activation.
        """
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"{path}: no config.json there; a model is a directory in Hugging Face's format")
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{file}: not valid JSON ({error})") from None
        return cls.from_dict(raw, where=str(file))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], where: str = "config") -> ModelConfig:
        """The configuration in the dictionary form of config.json; `where` names it in errors."""
        if not isinstance(raw, dict):
            raise ConfigError(f"{where}: a model's configuration is a JSON object, this is a {type(raw).__name__}")
        names = raw.get("architectures") or ["missing"]
        if not isinstance(names, list) or names[0] not in ARCHITECTURES:
            raise ConfigError(
                f"{where}: architecture {names if isinstance(names, str) else ', '.join(map(str, names))} is not "
                f"supported; supported are {', '.join(ARCHITECTURES)}"
            )
        try:
            return cls._read(raw, ARCHITECTURES[names[0]], where)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            if isinstance(error, ConfigError):
                told = str(error)
                raise ConfigError(told if told.startswith(where) else f"{where}: {told}") from None
            raise ConfigError(
                f"{where}: a value there has the wrong form ({error}); download the model again"
            ) from None

    @classmethod
    def _read(cls, raw: dict[str, Any], architecture: str, where: str) -> ModelConfig:
        _refuse_what_we_lack(raw, architecture, where)
        known = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        missing = [name for name in known if name not in raw]
        if missing:
            raise ConfigError(f"{where}: {', '.join(missing)} missing")
        theta, scaling = _read_rope(raw, where)
        head_dim = raw.get("head_dim") or (128 if architecture == "qwen3" else 0)  # Qwen3Config's own default
        return cls(
            architecture=architecture,  # type: ignore[arg-type]
            num_key_value_heads=raw.get("num_key_value_heads", _KV_HEADS.get(architecture))
            or raw["num_attention_heads"],
            head_dim=head_dim,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            # transformers leaves a value out when it equals the class's default: False for all four classes
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
            initializer_range=float(raw.get("initializer_range", 0.02)),
            extra={k: v for k, v in raw.items() if k not in _OWN_KEYS},
            **{name: raw[name] for name in known},
        )

    def to_dict(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """config.json for transformers 4 (rope_theta, torch_dtype at top level) and 5 (rope_parameters, dtype)."""
        rope: dict[str, Any] | None = None
        if self.rope_scaling is not None:
            rope = {"rope_type": "llama3", **vars(self.rope_scaling)}
        class_name = next(k for k, v in ARCHITECTURES.items() if v == self.architecture)
        return {
            **self.extra,
            "architectures": [class_name],
            "model_type": self.architecture,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope,
            "rope_parameters": {"rope_theta": self.rope_theta, **(rope or {"rope_type": "default"})},
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            "sliding_window": None,
            "torch_dtype": dtype,
            "dtype": dtype,
        }


# the transformers classes' own defaults, which count where config.json leaves the key out
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}

_OWN_KEYS = frozenset(
    {
        "architectures",
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "tie_word_embeddings",
        "max_position_embeddings",
        "initializer_range",
        "torch_dtype",
        "dtype",
    }
)


def _refuse_what_we_lack(raw: dict[str, Any], architecture: str, where: str) -> None:
    """Raise ConfigError for a switch in config.json that would change the computation in a way that we lack."""
    # MistralConfig's own default, which counts where config.json leaves the key out
    window = raw.get("sliding_window", 4096 if architecture == "mistral" else None)
    # Qwen guards its window by use_sliding_window; Mistral's counts whenever it is shorter than the context
    guarded = architecture in ("qwen2", "qwen3") and not raw.get("use_sliding_window", False)
    if window and not guarded and window < raw.get("max_position_embeddings", 1 << 60):
        raise ConfigError(f"{where}: sliding_window {window} is active; sliding-window attention is not supported")
    if "sliding_attention" in (raw.get("layer_types") or []):
        raise ConfigError(f"{where}: layer_types has sliding_attention; sliding-window attention is not supported")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if raw.get(key):
            raise ConfigError(f"{where}: {key} {raw[key]}: mixture-of-experts models are not supported")
    for key in ("mlp_bias", *(("attention_bias",) if architecture != "qwen2" else ())):
        if raw.get(key):
            raise ConfigError(f"{where}: {key} is true; biases are supported on Qwen2's q, k and v only")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    if raw.get("quantization_config"):
        raise ConfigError(f"{where}: quantization_config: quantised weights are not supported; use the original model")


def _read_rope(raw: dict[str, Any], where: str) -> tuple[float, Llama3Rope | None]:
    """(theta, scaling), from rope_theta and rope_scaling at top level or rope_parameters (transformers 5)."""
    parameters = dict(raw.get("rope_parameters") or {})
    scaling = dict(raw.get("rope_scaling") or {}) | parameters
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if float(scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0)) != 1.0:
        raise ConfigError(f"{where}: partial_rotary_factor is not supported")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(f"{where}: rope type {kind!r} is not supported; supported are 'default' and 'llama3'")
    try:
        return theta, Llama3Rope(
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ConfigError(f"{where}: rope type 'llama3' needs {error.args[0]}") from None


# ---------------------------------------------------------------------------------------------------------------------
# the parameter table: plain data, which the engine allocates from, and import and export read


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of one of our (merged) tensors: one tensor of the Hugging Face checkpoint."""

    hf_name: str
    start: int
    stop: int


@dataclass(frozen=True)
class TensorSpec:
    """One of our tensors. `parts` cover its rows in order; `decay` says whether weight decay applies.

    split: the dimension along which tensor parallelism shares it out (0: each part's rows), None for what every rank
    has whole: see model/tensor_parallel.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    decay: bool
    split: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape[0] * (self.shape[1] if len(self.shape) == 2 else 1)


@dataclass(frozen=True)
class Unit:
    """What is gathered, reduced and updated as one: `embedding`, `blocks.0` ..., `head`. Decayed tensors come first."""

    name: str
    tensors: tuple[TensorSpec, ...]


def _merged(
    name: str, hf: list[tuple[str, int]], columns: int | None, decay: bool, split: int | None = None
) -> TensorSpec:
    parts, row = [], 0
    for hf_name, rows in hf:
        parts.append(Part(hf_name, row, row + rows))
        row += rows
    return TensorSpec(name, (row,) if columns is None else (row, columns), tuple(parts), decay, split)


def block_unit(c: ModelConfig, layer: int) -> Unit:
    """The tensors of one block: merged qkv [(H+2K)E, D] and gate_up [2F, D], o [D, HE], down [D, F], norms, bias."""
    p = f"model.layers.{layer}."
    rows = [("q_proj", c.q_size), ("k_proj", c.kv_size), ("v_proj", c.kv_size)]
    qkv = [(f"{p}self_attn.{name}.weight", size) for name, size in rows]
    gate_up = [(f"{p}mlp.{name}.weight", c.intermediate_size) for name in ("gate_proj", "up_proj")]
    tensors = [
        _merged("qkv", qkv, c.hidden_size, True, split=0),
        _merged("o", [(f"{p}self_attn.o_proj.weight", c.hidden_size)], c.q_size, True, split=1),
        _merged("gate_up", gate_up, c.hidden_size, True, split=0),
        _merged("down", [(f"{p}mlp.down_proj.weight", c.hidden_size)], c.intermediate_size, True, split=1),
        _merged("attn_norm", [(f"{p}input_layernorm.weight", c.hidden_size)], None, False),
        _merged("mlp_norm", [(f"{p}post_attention_layernorm.weight", c.hidden_size)], None, False),
    ]
    if c.qkv_bias:
        bias = [(f"{p}self_attn.{name}.bias", size) for name, size in rows]
        tensors.append(_merged("qkv_bias", bias, None, False, split=0))
    if c.qk_norm:
        tensors.append(_merged("q_norm", [(f"{p}self_attn.q_norm.weight", c.head_dim)], None, False))
        tensors.append(_merged("k_norm", [(f"{p}self_attn.k_norm.weight", c.head_dim)], None, False))
    return Unit(f"blocks.{layer}", tuple(tensors))


def parameter_table(c: ModelConfig) -> tuple[Unit, ...]:
    """All units of the model, in the order of the forward: embedding, blocks, head (final norm, untied LM head)."""
    head = [_merged("final_norm", [("model.norm.weight", c.hidden_size)], None, False)]
    if not c.tie_word_embeddings:
        head.insert(0, _merged("lm_head", [("lm_head.weight", c.vocab_size)], c.hidden_size, True, split=0))
    embedding = _merged("embedding", [("model.embed_tokens.weight", c.vocab_size)], c.hidden_size, True, split=0)
    blocks = (block_unit(c, layer) for layer in range(c.num_hidden_layers))
    return (Unit("embedding", (embedding,)), *blocks, Unit("head", tuple(head)))


def num_parameters(table: tuple[Unit, ...]) -> int:
    """Number of elements over all tensors of `table` (a tied head counts once)."""
    return sum(tensor.numel for unit in table for tensor in unit.tensors)
