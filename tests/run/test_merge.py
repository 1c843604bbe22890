"""fullstride merge: as PEFT's own model, in one rounding; what does not belong together is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fullstride import ConfigError
from fullstride.cli.main import main
from fullstride.model.hf import Checkpoint
from fullstride.run.merge import merge
from tests.run.conftest import TINY, make_model, run, tree

IDS = torch.arange(3, 35)[None]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = dataclasses.replace(TINY, tie_word_embeddings=request.param)
    return make_model(tmp_path_factory.mktemp("base") / "model", config)


def trained(base: Path, data: Path, out: Path, **more: Any) -> Path:
    adapter = run(base, data, out, steps=3, epochs=None, lr=0.05, **more).adapter
    assert adapter is not None
    return adapter


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("more", [{}, {"rslora": True, "lora_targets": ("q_proj", "down_proj"), "lora_rank": 3}])
def test_it_is_pefts_model(base: Path, data_dir: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    adapter = trained(base, data_dir, tmp_path / "run", **more)
    out = merge(model=base, adapter=adapter, out=tmp_path / "merged", dtype="fp32")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = logits(PeftModel.from_pretrained(plain, adapter))
    found = logits(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32))
    # float32 in another order: W x + s B (A x) against (W + s B A) x
    assert (found - expected).norm() / expected.norm() < 1e-6
    base_logits = logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    assert (base_logits - expected).norm() / expected.norm() > 1e-3  # the adapter does something
    assert tree(out) == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} | (
        tree(base) & {"tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"}
    )
    assert ("lm_head.weight" in Checkpoint(out).names) == ("lm_head.weight" in Checkpoint(base).names)


def test_it_is_rounded_once(base: Path, data_dir: Path, tmp_path: Path) -> None:
    adapter = trained(base, data_dir, tmp_path / "run")
    exact = Checkpoint(merge(model=base, adapter=adapter, out=tmp_path / "exact", dtype="fp32"))
    rounded = Checkpoint(merge(model=base, adapter=adapter, out=tmp_path / "rounded", dtype="bf16"))
    for name in exact.names:
        assert torch.equal(exact.get(name).bfloat16(), rounded.get(name)), name


def test_the_bases_precision_is_kept(base: Path, data_dir: Path, tmp_path: Path) -> None:
    adapter = trained(base, data_dir, tmp_path / "run")
    merge(model=base, adapter=adapter, out=tmp_path / "a")
    assert {Checkpoint(tmp_path / "a").dtype(n) for n in Checkpoint(base).names} == {"F32"}
    for dtype, kept in {torch.bfloat16: "BF16", torch.float16: "F32", torch.float64: "F32"}.items():
        other = tmp_path / str(dtype)
        shutil.copytree(base, other)
        weights = {name: value.to(dtype) for name, value in load_file(other / "model.safetensors").items()}
        save_file(weights, other / "model.safetensors", {"format": "pt"})
        merge(model=other, adapter=adapter, out=tmp_path / kept / str(dtype))
        assert {Checkpoint(tmp_path / kept / str(dtype)).dtype(n) for n in Checkpoint(base).names} == {kept}


def test_what_is_refused(model_dir: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = trained(model_dir, data_dir, tmp_path / "run")
    other = make_model(tmp_path / "other", dataclasses.replace(TINY, hidden_size=32))
    deeper = make_model(tmp_path / "deeper", dataclasses.replace(TINY, num_hidden_layers=3))
    out = tmp_path / "out"
    for base in (other, deeper):
        with pytest.raises(ConfigError, match=rf"{adapter}.*; is it an adapter of {base}\?"):
            merge(model=base, adapter=adapter, out=out)
    with pytest.raises(ConfigError, match=r"no adapter_config\.json there"):
        merge(model=model_dir, adapter=tmp_path, out=out)
    for key, value in {"modules_to_save": ["lm_head"], "rank_pattern": {"q_proj": 2}, "use_dora": True, "r": 7}.items():
        changed = tmp_path / f"changed-{key}"
        shutil.copytree(adapter, changed)
        raw = json.loads((changed / "adapter_config.json").read_text())
        (changed / "adapter_config.json").write_text(json.dumps(raw | {key: value}))
        with pytest.raises(ConfigError, match=r"is not supported|is it an adapter of"):
            merge(model=model_dir, adapter=changed, out=out)
    assert not out.exists()
    words = ["merge", str(model_dir), str(adapter), str(out)]
    assert main(words) == 0 and f"written: {out}" in capsys.readouterr().out
    assert main(words) == 1 and "is not empty; choose another directory" in capsys.readouterr().err
