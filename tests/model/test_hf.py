"""Hugging Face directories: configurations, tensors and files, against transformers' own classes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fullstride.errors import ConfigError
from fullstride.model import hf
from fullstride.model.spec import ModelConfig, parameter_table

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# family -> (class prefix in transformers, what differs from SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama3": ("Llama", {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}, "max_position_embeddings": 131072}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32, "rope_parameters": {"rope_theta": 1e6}}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e5}}),
    "qwen2.5": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen2.5-untied": ("Qwen2", {"initializer_range": 0.05}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 32, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen3-untied": ("Qwen3", {"head_dim": 32}),
}


def build(family: str, **changes: Any) -> Any:
    """A tiny transformers model of `family` in which no tensor is all zeros or ones."""
    import transformers

    prefix, differences = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **differences, **changes})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tied Qwen2 directory as transformers writes it."""
    build("qwen2.5").save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def sources(checkpoint: hf.Checkpoint, config: ModelConfig) -> list[hf.Source]:
    names = [place.hf_name for place in hf.parts_of(parameter_table(config))]
    return [(name, checkpoint.shape(name), torch.float32, partial(checkpoint.get, name)) for name in names]


def rewrite(source: Path, out: Path, **keys: Any) -> ModelConfig:
    """Read `source` and write it to `out` with fullstride."""
    config = ModelConfig.from_pretrained(source)
    checkpoint = hf.Checkpoint(source)
    hf.check_tensors(checkpoint, parameter_table(config), config.tie_word_embeddings)
    keys = {"dtype": torch.float32, "tokenizer_from": None, **keys}
    hf.write_model(out, config, sources(checkpoint, config), **keys)
    return config


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12) * 7 % 96
    with torch.no_grad():
        return model(tokens).logits


# ---------------------------------------------------------------------------------------------------------------------
# configurations


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_keeps_config_tensors_and_logits(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = build(family)
    model.save_pretrained(tmp_path / "theirs")
    config = rewrite(tmp_path / "theirs", tmp_path / "ours")
    assert ModelConfig.from_pretrained(tmp_path / "ours") == config

    theirs, ours = (AutoConfig.from_pretrained(tmp_path / side).to_dict() for side in ("theirs", "ours"))
    # where it was read, and what only transformers 4 reads or only some classes have
    for key in ("_name_or_path", "head_dim", "torch_dtype", "rope_scaling", "rope_theta", "sliding_window"):
        theirs.pop(key, None)
        ours.pop(key, None)
    assert ours == theirs
    assert config.head_dim == model.model.layers[0].self_attn.head_dim
    assert config.num_key_value_heads == model.config.num_key_value_heads

    # a pure move: exact
    before, after = load_file(tmp_path / "theirs" / hf.WEIGHTS), load_file(tmp_path / "ours" / hf.WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert torch.equal(logits(reloaded), logits(model))


def test_rope_reads_the_same_from_either_place(tmp_path: Path) -> None:
    """Case 18: transformers 4 keeps theta and scaling at top level, 5 in rope_parameters."""
    from transformers import AutoConfig

    base = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 64}
    old = {**base, "rope_theta": 5e5, "rope_scaling": LLAMA3}
    new = {**base, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    # written by versions before 4.45: the key was called type
    older = {**base, "rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": LLAMA3["rope_type"]}}
    del older["rope_scaling"]["rope_type"]
    read = [ModelConfig.from_dict(raw) for raw in (old, new, older)]
    assert read[0] == read[1] == read[2]
    assert read[0].rope_theta == 5e5 and read[0].rope_scaling is not None and read[0].rope_scaling.factor == 32.0

    for config in (read[0], ModelConfig.from_dict({**base, "rope_theta": 1e6})):
        written = config.to_dict()
        (tmp_path / "config.json").write_text(json.dumps(written))
        five = AutoConfig.from_pretrained(tmp_path)
        scaling = LLAMA3 if config.rope_scaling else {"rope_type": "default"}
        assert five.rope_parameters == {"rope_theta": config.rope_theta, **scaling}
        # transformers 4 reads these keys and no others
        assert written["rope_theta"] == config.rope_theta
        assert written["rope_scaling"] == (LLAMA3 if config.rope_scaling else None)
        assert written["torch_dtype"] == "bfloat16"
        # each half alone is enough for us
        for dropped in (("rope_parameters",), ("rope_theta", "rope_scaling")):
            assert ModelConfig.from_dict({k: v for k, v in written.items() if k not in dropped}) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"sliding_window": 128}, "sliding_window 128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"num_experts": 128}, "num_experts"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM"),
        ({"architectures": None}, "architecture missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_would_compute_otherwise_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    raw = {**SIZES, "architectures": ["MistralForCausalLM"], "max_position_embeddings": 4096, **change}
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 4096},  # as long as the context
        {"sliding_window": None},
        {"sliding_window": 128, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    ],
)
def test_inactive_sliding_windows_pass(change: dict[str, Any]) -> None:
    raw = {**SIZES, "architectures": ["MistralForCausalLM"], "max_position_embeddings": 4096, **change}
    assert ModelConfig.from_dict(raw).to_dict()["sliding_window"] is None


# ---------------------------------------------------------------------------------------------------------------------
# tensors


@pytest.mark.parametrize("family", ["llama2", "qwen2.5", "qwen3-untied"])
def test_parts_cover_the_merged_tensors(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    config, checkpoint = ModelConfig.from_pretrained(tmp_path), hf.Checkpoint(tmp_path)
    table = parameter_table(config)
    tensors = load_file(tmp_path / hf.WEIGHTS)
    for unit in table:
        for spec in unit.tensors:
            merged = torch.full(spec.shape, torch.nan)
            for part in spec.parts:
                merged[part.start : part.stop] = checkpoint.get(part.hf_name)
            assert torch.equal(merged, torch.cat([tensors.pop(part.hf_name) for part in spec.parts]))
    assert not tensors  # each was read once
    places = hf.parts_of(table)
    assert sorted(place.hf_name for place in places) == sorted(checkpoint.names)
    up = next(place for place in places if place.hf_name == "model.layers.1.mlp.up_proj.weight")
    assert up == ("model.layers.1.mlp.up_proj.weight", 2, "gate_up", 80, 160)


def change_tensors(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Replace, add or (None) drop tensors of a one-file model; `__` stands for a dot in a name."""
    all_tensors: dict[str, Any] = load_file(directory / hf.WEIGHTS)
    for name, tensor in tensors.items():
        all_tensors[name.replace("__", ".")] = tensor
    kept = {name: tensor.clone() for name, tensor in all_tensors.items() if tensor is not None}
    save_file(kept, directory / hf.WEIGHTS, metadata={"format": "pt"})


def check(directory: Path) -> None:
    config = ModelConfig.from_pretrained(directory)
    hf.check_tensors(hf.Checkpoint(directory), parameter_table(config), config.tie_word_embeddings)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model__layers__1__self_attn__k_proj__bias": None}, r"missing: model\.layers\.1\.self_attn\.k_proj\.bias$"),
        ({"model__norm__weight": None, "norm__weight": torch.ones(64)}, r"missing: model\.norm.*unknown: norm\.weight"),
        ({"model__layers__3__mlp__up_proj__weight": torch.ones(80, 64)}, r"unknown: model\.layers\.3\.mlp\.up_proj"),
        ({"model__layers__0__self_attn__o_proj__bias": torch.ones(64)}, r"unknown: .*o_proj\.bias"),
        ({"model__layers__0__mlp__down_proj__weight": torch.ones(80, 64)}, r"\[80, 64\] instead of \[64, 80\]"),
        ({"model__norm__weight": torch.ones(64, dtype=torch.int8)}, r"model\.norm\.weight is I8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(saved: Path, tensors: dict[str, Any], message: str) -> None:
    """Case 19, and its kind: missing, unknown, of another shape, quantised."""
    check(saved)
    change_tensors(saved, **tensors)
    with pytest.raises(ConfigError, match=message):
        check(saved)


def test_many_misfits_are_a_few_names_and_a_count(saved: Path) -> None:
    names = [name for name in load_file(saved / hf.WEIGHTS) if ".mlp." in name]
    change_tensors(saved, **dict.fromkeys(names))
    with pytest.raises(ConfigError, match=r"missing: (\S+, ){2}\S+ and 6 more$"):
        check(saved)


def test_ignorable_tensors(saved: Path) -> None:
    embedding = load_file(saved / hf.WEIGHTS)[hf.EMBEDDING]
    change_tensors(saved, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8), lm_head__weight=embedding)
    check(saved)
    # zero and minus zero compare equal as numbers, and are different bits
    change_tensors(saved, model__embed_tokens__weight=embedding * 0.0, lm_head__weight=embedding * 0.0)
    check(saved)
    change_tensors(saved, lm_head__weight=-0.0 * embedding)
    with pytest.raises(ConfigError, match=r"lm_head\.weight that differs"):
        check(saved)


# ---------------------------------------------------------------------------------------------------------------------
# files


def test_tied_model_in_shards(saved: Path, tmp_path: Path) -> None:
    """Case 20."""
    from transformers import AutoModelForCausalLM

    out = tmp_path / "shards"
    rewrite(saved, out, max_shard_bytes=40_000)
    index = json.loads((out / hf.INDEX).read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3 and [file.name for file in files] == sorted(set(index["weight_map"].values()))
    in_files, total = {}, 0
    for file in files:
        data_start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        assert data_start % 8 == 0
        total += file.stat().st_size - data_start
        assert file.stat().st_size - data_start <= 40_000
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            in_files.update(dict.fromkeys(opened.keys(), file.name))
    assert in_files == index["weight_map"] and hf.LM_HEAD not in in_files
    assert total == index["metadata"]["total_size"]
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (saved, out)]
    assert torch.equal(logits(models[0]), logits(models[1]))

    rewrite(out, tmp_path / "one")  # shards to one file: every tensor again
    before, after = load_file(saved / hf.WEIGHTS), load_file(tmp_path / "one" / hf.WEIGHTS)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)

    files[1].unlink()
    with pytest.raises(ConfigError, match=rf"{files[1].name}: .*missing"):
        hf.Checkpoint(out)


def test_a_tensor_larger_than_a_shard_has_one_to_itself(saved: Path, tmp_path: Path) -> None:
    rewrite(saved, tmp_path / "out", max_shard_bytes=1)
    names = hf.Checkpoint(saved).names
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(names)
    assert set(hf.Checkpoint(tmp_path / "out").names) == set(names)


@pytest.mark.parametrize("kept", [0, 4, 100, 3000, -1])
def test_a_truncated_file_is_named(saved: Path, kept: int) -> None:
    file = saved / hf.WEIGHTS
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=r"model\.safetensors: cut off or damaged"):
        hf.Checkpoint(saved)


def test_a_damaged_header_is_named(saved: Path) -> None:
    file = saved / hf.WEIGHTS
    data = bytearray(file.read_bytes())
    data[8:40] = b"\xff" * 32
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"model\.safetensors: cut off or damaged"):
        hf.Checkpoint(saved)


def test_directories_without_usable_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent: no such directory"):
        hf.Checkpoint(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"no weights there; expected model\.safetensors"):
        hf.Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin.*convert them to safetensors"):
        hf.Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a readable index"),
        ("[]", "not a readable index"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "weight_map"),
        ('{"weight_map": {"a": "part.safetensors", "b": "part.safetensors"}}', r"b should be in part\.safetensors"),
    ],
)
def test_a_wrong_index_is_named(tmp_path: Path, text: str, message: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "part.safetensors")
    (tmp_path / hf.INDEX).write_text(text)
    with pytest.raises(ConfigError, match=message):
        hf.Checkpoint(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# writing


def test_weights_are_rounded_to_the_export_type(saved: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    rewrite(saved, tmp_path / "out", dtype=torch.bfloat16)
    before, after = load_file(saved / hf.WEIGHTS), load_file(tmp_path / "out" / hf.WEIGHTS)
    assert all(torch.equal(after[name], before[name].bfloat16()) for name in before)
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype in (torch.bfloat16, "bfloat16")


def test_pieces_of_a_large_tensor_and_odd_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "_PIECE", 7)
    tensor = torch.arange(35.0).reshape(5, 7).t().requires_grad_()
    hf._write_safetensors(tmp_path / "x", [("x", (7, 5), torch.float32, lambda: tensor)], torch.float16)
    assert torch.equal(load_file(tmp_path / "x")["x"], tensor.detach().half())


def test_tokenizer_and_generation_config(saved: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in (*hf.TOKENIZER_FILES, "generation_config.json", "notes.md"):
        (tokenizer / name).write_text(name)
    rewrite(saved, tmp_path / "with", tokenizer_from=tokenizer)
    copied = (*hf.TOKENIZER_FILES, "generation_config.json")
    assert all((tmp_path / "with" / name).read_text() == name for name in copied)
    assert {file.name for file in (tmp_path / "with").iterdir()} == {*copied, hf.WEIGHTS, "config.json"}

    rewrite(saved, tmp_path / "without")
    made = json.loads((tmp_path / "without" / "generation_config.json").read_text())
    assert made == {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2}
    with pytest.raises(ConfigError, match="absent: no such directory"):
        rewrite(saved, tmp_path / "x", tokenizer_from=tmp_path / "absent")


def test_a_full_directory_is_replaced_only_on_request(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    rewrite(saved, out)  # makes the parents
    (out / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"out is not empty"):
        rewrite(saved, out)
    assert (out / "mine.txt").exists()
    rewrite(out, out, overwrite=True)  # even onto what is being read
    check(out)
    assert not (out / "mine.txt").exists()
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        rewrite(saved, tmp_path / "file", overwrite=True)
    (tmp_path / "empty").mkdir()
    rewrite(saved, tmp_path / "empty")
    check(tmp_path / "empty")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_failure_leaves_nothing_half_written(saved: Path, tmp_path: Path, error: type[BaseException]) -> None:
    config = ModelConfig.from_pretrained(saved)
    tensors = sources(hf.Checkpoint(saved), config)

    def fail() -> torch.Tensor:
        raise error

    broken = [*tensors[:-1], (*tensors[-1][:3], fail)]
    out = tmp_path / "deep" / "out"
    with pytest.raises(error):
        hf.write_model(out, config, broken, dtype=torch.float32, tokenizer_from=None)
    assert not list(out.parent.iterdir())
    rewrite(saved, out)
    kept = (out / hf.WEIGHTS).read_bytes()
    with pytest.raises(error):
        hf.write_model(out, config, broken, dtype=torch.bfloat16, tokenizer_from=None, overwrite=True)
    assert [path.name for path in out.parent.iterdir()] == ["out"] and (out / hf.WEIGHTS).read_bytes() == kept


def test_leftovers_of_a_killed_write_do_not_get_in(saved: Path, tmp_path: Path) -> None:
    for state in ("partial", "replaced"):
        (tmp_path / f".out.{state}").mkdir()
        (tmp_path / f".out.{state}" / "stale").write_text("")
    rewrite(saved, tmp_path / "out")
    assert not (tmp_path / "out" / "stale").exists() and not list(tmp_path.glob(".out.*"))


def test_only_the_tensors_of_the_configuration_are_written(saved: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_pretrained(saved)
    tensors = sources(hf.Checkpoint(saved), config)
    head: hf.Source = (hf.LM_HEAD, (96, 64), torch.float32, lambda: torch.ones(96, 64))
    with pytest.raises(ConfigError, match=r"unknown: lm_head\.weight"):
        hf.write_model(tmp_path / "out", config, [*tensors, head], dtype=torch.float32, tokenizer_from=None)
    with pytest.raises(ConfigError, match=r"missing: model\.norm\.weight"):
        hf.write_model(tmp_path / "out", config, tensors[:-1], dtype=torch.float32, tokenizer_from=None)
    with pytest.raises(ConfigError, match=r"cannot be written as torch\.int8"):
        hf.write_model(tmp_path / "out", config, tensors, dtype=torch.int8, tokenizer_from=None)
    assert not (tmp_path / "out").exists()


MEASURE = """
import sys
from functools import partial
from pathlib import Path
import torch
from fullstride.model import hf
from fullstride.model.spec import ModelConfig, parameter_table

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

config = ModelConfig("llama", 4096, 1024, 4096, 3, 8, 8)
names = [place.hf_name for place in hf.parts_of(parameter_table(config))]
shapes = {p.hf_name: (p.stop - p.start, *s.shape[1:]) for u in parameter_table(config) for s in u.tensors
          for p in s.parts}
made = [(name, shapes[name], torch.float32, partial(torch.full, shapes[name], 0.5)) for name in names]
before = status("VmRSS")
hf.write_model(sys.argv[1] + "/a", config, made, dtype=torch.float32, tokenizer_from=None)
checkpoint = hf.Checkpoint(sys.argv[1] + "/a")
read = [(name, shapes[name], torch.float32, partial(checkpoint.get, name)) for name in names]
hf.write_model(sys.argv[1] + "/b", config, read, dtype=torch.bfloat16, tokenizer_from=None)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_memory_stays_near_one_tensor(tmp_path: Path) -> None:
    """Written, read and written again: 234 MB of weights in 30 tensors, of which the largest has 16.8 MB."""
    # a process of its own: the peak counts mapped pages too, and belongs to the whole process. VmHWM and not
    # ru_maxrss: that one begins at the parent's size
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # what is freed goes back, and does not count
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    # one tensor (16.8 MB), one piece of it in bf16 (8.4), first calls of torch (5): two tensors would be over it
    assert int(result.stdout) < 40e6
