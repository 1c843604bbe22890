"""Adapters in PEFT's format: both ways, whole, and the same function."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from fullstride import ConfigError, Options, Trainer
from fullstride.engine.decode import Decoder
from fullstride.model.lora import PROJECTIONS, read_peft_config
from tests.oracle import distance, make_model, random_batch


@pytest.fixture
def base(tmp_path: Path) -> Path:
    make_model("qwen3", tied=True).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def trained(base: Path, **options) -> Trainer:
    """A LoRA trainer after five updates, so that B is not zero."""
    values = {"dtype": "fp32", "device": "cpu", "method": "lora", "lora_rank": 4, "lora_alpha": 6.0, **options}
    trainer = Trainer.from_pretrained(base, Options(**values), batch_size=2, seq_len=13)
    for seed in range(5):
        trainer.step(*random_batch(2, 13, seed))
        trainer.update(lr=3e-2)
    return trainer


@pytest.mark.parametrize("targets", [PROJECTIONS, ("v_proj", "q_proj"), ("down_proj",)], ids="+".join)
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_loads_ours_and_computes_the_same(base: Path, targets: tuple, rslora: bool, tmp_path: Path) -> None:
    import transformers

    trainer = trained(base, lora_targets=targets, rslora=rslora)
    trainer.export_adapter(tmp_path / "adapter")
    model = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    result = loaded.load_adapter(tmp_path / "adapter", "again")
    assert not result.missing_keys and not result.unexpected_keys
    ids = random_batch(1, 13)[0][0].tolist()
    with torch.no_grad():
        theirs = loaded(torch.tensor([ids])).logits[0, -1]
        plain = model(torch.tensor([ids])).logits[0, -1]
    ours = Decoder.from_pretrained(base, tmp_path / "adapter", torch.float32, torch.device("cpu")).logits(ids)
    assert distance(ours, theirs) < 1e-5
    with loaded.disable_adapter(), torch.no_grad():
        plain = loaded(torch.tensor([ids])).logits[0, -1]
    assert distance(plain, theirs) > 1e-2  # the adapter does something


def test_continue_from_our_own_export(base: Path, tmp_path: Path) -> None:
    trainer = trained(base)
    trainer.export_adapter(tmp_path / "adapter")
    other = Trainer.from_pretrained(base, trainer.options, batch_size=2, seq_len=13)
    other.import_adapter(tmp_path / "adapter")
    batch = random_batch(2, 13)
    assert trainer.validate(*batch) == other.validate(*batch)


def test_bf16_export_keeps_the_masters_digits(base: Path, tmp_path: Path) -> None:
    """Adapters trained in bf16 have float32 masters: what is exported continues exactly."""
    trainer = trained(base, dtype="bf16")
    trainer.export_adapter(tmp_path / "adapter")
    other = Trainer.from_pretrained(base, trainer.options, batch_size=2, seq_len=13)
    other.import_adapter(tmp_path / "adapter")
    for name, unit in trainer.engine.state.trained.items():
        theirs = other.engine.state.trained[name]
        assert unit.master is not None and theirs.master is not None
        assert torch.equal(unit.master, theirs.master) and torch.equal(unit.param, theirs.param)
        assert not torch.equal(unit.master, unit.param.float())


def test_fresh_adapter_changes_nothing_and_starts_like_pefts(base: Path) -> None:
    batch = random_batch(2, 13)
    options = {"dtype": "fp32", "device": "cpu"}
    lora = Trainer.from_pretrained(base, Options(method="lora", **options), batch_size=2, seq_len=13)
    full = Trainer.from_pretrained(base, Options(**options), batch_size=2, seq_len=13)
    assert lora.validate(*batch)["loss"] == pytest.approx(full.validate(*batch)["loss"], rel=1e-6)
    a = lora.engine.state.views["blocks.0.adapter"]["qkv.a"]
    assert a.abs().max() <= 42**-0.5
    assert a.std() == pytest.approx(42**-0.5 / 3**0.5, rel=0.1)  # of a uniform distribution


def test_only_adapters_cost_gradients(base: Path) -> None:
    trainer = Trainer.from_pretrained(base, Options(method="lora", device="cpu"), batch_size=2, seq_len=13)
    segments = trainer.allocations()
    adapters = segments["adapters"]["pageable"]
    assert segments["gradients"]["pageable"] == adapters  # float32, like the adapters
    assert segments["moments"]["pageable"] == 2 * adapters


@pytest.mark.slow
def test_dropout_is_right_on_average(base: Path) -> None:
    """dB is linear in the mask while B = 0, and E[mask / (1 - p)] = 1: its mean over seeds is that without dropout."""
    batch = random_batch(2, 13)
    name = "base_model.model.model.layers.2.mlp.down_proj.lora_B.weight"

    def gradient(dropout: float, seed: int) -> torch.Tensor:
        options = {"method": "lora", "lora_rank": 4, "lora_targets": ("down_proj",), "lora_dropout": dropout}
        settings = Options(dtype="fp32", device="cpu", seed=seed, **options)
        with Trainer.from_pretrained(base, settings, batch_size=2, seq_len=13) as trainer:
            trainer.engine.state.views["blocks.2.adapter"]["down.a"].fill_(0.1)  # A is drawn by the seed too
            trainer.step(*batch)
            return trainer.gradients()[name]

    reference = gradient(0.0, 0)
    draws = torch.stack([gradient(0.25, seed) for seed in range(100)])
    deviation = (draws.mean(0) - reference) / (draws.std(0) / 10)  # in standard errors
    assert draws.std(0).min() > 0
    assert deviation.abs().max() < 5 and deviation.pow(2).mean() < 2


def edited(directory: Path, **changes) -> Path:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return directory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 8}, "rank 8 instead of 4"),
        ({"target_modules": ["q_proj"]}, "targets"),
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": "all-linear"}, "target_modules 'all-linear'"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    ],
    ids=str,
)
def test_other_adapters_are_refused_by_name(base: Path, changes: dict, message: str, tmp_path: Path) -> None:
    trainer = trained(base)
    trainer.export_adapter(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=message):
        trainer.import_adapter(edited(tmp_path / "adapter", **changes))


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"peft_type": "LORA", "target_modules": ["q_proj"]}', '{"peft_type": "LORA"}']
)
def test_a_malformed_configuration_is_one_message(text: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"adapter_config.json: "):
        read_peft_config(tmp_path)


def test_missing_tensor_or_directory(base: Path, tmp_path: Path) -> None:
    trainer = trained(base)
    with pytest.raises(ConfigError, match=r"no adapter_config.json"):
        trainer.import_adapter(tmp_path / "nowhere")
    trainer.export_adapter(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    lost = next(iter(tensors))
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file)
    with pytest.raises(ConfigError, match=f"missing: {lost}"):
        trainer.import_adapter(tmp_path / "adapter")


def test_settings_come_back(base: Path, tmp_path: Path) -> None:
    trainer = trained(base, lora_targets=("v_proj", "q_proj"), rslora=True, lora_dropout=0.1)
    trainer.export_adapter(tmp_path / "adapter")
    settings = read_peft_config(tmp_path / "adapter")
    assert (settings.rank, settings.alpha, settings.dropout, settings.rslora) == (4, 6.0, 0.1, True)
    assert settings.targets == ("q_proj", "v_proj")
    assert np.isclose(settings.scale, 6.0 / 2.0)


def test_the_bases_tokenizer_goes_with_the_adapter(base: Path, tmp_path: Path) -> None:
    (base / "tokenizer.json").write_text("{}")
    trainer = trained(base)
    trainer.export_adapter(tmp_path / "adapter")
    names = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
