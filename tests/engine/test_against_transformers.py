"""Loss, logits, gradients and updates against transformers' autograd, PEFT and PyTorch's AdamW, for every family."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch

from fullstride.engine.batch import HostBatch
from fullstride.engine.decode import Decoder
from fullstride.engine.step import Engine
from fullstride.model.lora import PROJECTIONS, LoraSettings
from tests.oracle import FAMILIES, distance, in_float64, loss_sum, make_engine, make_model, random_batch

# float64: sums of a few hundred terms, errors near 1e-15; float32: near 1e-7 a product, a few layers deep
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=["float64", "float32"])


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    found = {}
    for unit in engine.state.units:
        for spec in unit.tensors if unit.name in engine.state.trained else ():
            grad = engine.state.gradients.full(unit.name)[spec.name]
            found |= {part.hf_name: grad[part.start : part.stop] for part in spec.parts}
    return found


def saved(model: torch.nn.Module, path: Path) -> Path:
    model.save_pretrained(path)
    return path


@DTYPES
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient(family: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model(family, tied)
    engine = make_engine(saved(model, tmp_path), dtype, rows=2, seq_len=13)
    oracle = in_float64(model) if dtype == torch.float64 else model
    with torch.no_grad():
        for seed in (1, 2):  # the second micro-step adds to the first's gradients
            inputs, targets = random_batch(2, 13, seed)
            engine.micro_step([HostBatch.of(inputs, targets, None)], z_loss=2**-10)
    losses = [loss_sum(oracle, *random_batch(2, 13, seed), z_loss=2**-10) for seed in (1, 2)]
    sum(losses).backward()
    bound = BOUNDS[dtype]
    plain = sum(loss_sum(oracle, *random_batch(2, 13, seed)) for seed in (1, 2))
    assert engine.tools.stats[0].item() == pytest.approx(plain.item(), rel=bound)  # reported without z-loss
    ours = gradients(engine)
    theirs = {name: p.grad for name, p in oracle.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys()
    errors = {name: distance(ours[name], theirs[name]) for name in ours}
    assert max(errors.values()) < bound, errors


@DTYPES
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_with_and_without_cache(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model(family, tied=False)
    engine = make_engine(saved(model, tmp_path), dtype, rows=1, seq_len=8, trains=False)
    oracle = in_float64(model) if dtype == torch.float64 else model
    ids = random_batch(1, 21)[0][0].tolist()
    with torch.no_grad():
        theirs = oracle(torch.tensor([ids])).logits[0]
    decoder = Decoder(engine)
    ours = {4: decoder.logits(ids[:5]), 5: decoder.logits(ids[5:6]), 20: decoder.logits(ids[6:])}
    for position, logits in ours.items():
        assert distance(logits, theirs[position]) < BOUNDS[dtype]


def test_head_dim_apart_from_width(tmp_path: Path) -> None:
    """Hidden 64, 4 heads, 2 key/value heads, head_dim 32: q is [128, 64], k and v [64, 64], o [64, 128]."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    model = make_model("qwen3", tied=False, **sizes)
    engine = make_engine(saved(model, tmp_path), torch.float32, rows=1, seq_len=8, trains=False)
    shapes = {
        part.hf_name: (part.stop - part.start, *spec.shape[1:])
        for unit in engine.state.units
        for spec in unit.tensors
        for part in spec.parts
    }
    attention = "model.layers.0.self_attn."
    assert [shapes[f"{attention}{p}_proj.weight"] for p in "qkvo"] == [(128, 64), (64, 64), (64, 64), (64, 128)]
    ids = random_batch(1, 9)[0][0].tolist()
    with torch.no_grad():
        assert distance(Decoder(engine).logits(ids), model(torch.tensor([ids])).logits[0, -1]) < 1e-5


LORAS = {
    "all": LoraSettings(4, 8.0, 0.0, PROJECTIONS, False),
    "q,v": LoraSettings(3, 8.0, 0.0, ("q_proj", "v_proj"), False),
    "o,up": LoraSettings(4, 4.0, 0.0, ("o_proj", "up_proj"), True),
    "down": LoraSettings(2, 8.0, 0.0, ("down_proj",), False),
}


def with_peft(model: torch.nn.Module, lora: LoraSettings, seed: int = 0) -> peft.PeftModel:
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha),
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        use_rslora=lora.rslora,
        task_type="CAUSAL_LM",
    )
    wrapped = peft.get_peft_model(model, config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    return wrapped


@DTYPES
@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_lora_gradients_equal_pefts(family: str, lora: LoraSettings, dtype: torch.dtype, tmp_path: Path) -> None:
    from fullstride.engine.weights_io import import_adapter

    model = make_model(family, tied=True)
    base = saved(model, tmp_path / "base")
    engine = make_engine(base, dtype, rows=2, seq_len=13, lora=lora)
    wrapped = with_peft(model, lora)
    wrapped.save_pretrained(tmp_path / "adapter")
    wrapped = in_float64(wrapped) if dtype == torch.float64 else wrapped
    with torch.no_grad():
        import_adapter(engine, tmp_path / "adapter")
        for seed in (1, 2):
            engine.micro_step([HostBatch.of(*random_batch(2, 13, seed), None)], z_loss=0.0)
    total = sum(loss_sum(wrapped, *random_batch(2, 13, seed)) for seed in (1, 2))
    total.backward()
    assert engine.tools.stats[0].item() == pytest.approx(total.item(), rel=BOUNDS[dtype])
    ours = gradients(engine)
    theirs = {n.replace(".default", ""): p.grad for n, p in wrapped.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys()
    errors = {name: distance(ours[name], theirs[name]) for name in ours}
    assert max(errors.values()) < BOUNDS[dtype], errors


@DTYPES
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_ten_updates_equal_torch(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model("qwen2", tied)
    engine = make_engine(saved(model, tmp_path), dtype, rows=2, seq_len=13)
    oracle = in_float64(model) if dtype == torch.float64 else model
    matrices = [p for p in oracle.parameters() if p.dim() == 2]
    others = [p for p in oracle.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    # a large eps: with a small one the first updates are signs of gradients, which no tolerance can compare near zero
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-3)
    for step in range(1, 11):
        batches = [random_batch(2, 13, seed=2 * step + i) for i in range(2)]
        tokens = sum((targets != -100).sum() for _, targets in batches)
        optimizer.zero_grad()
        (sum(loss_sum(oracle, *batch) for batch in batches) / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
        optimizer.step()
        with torch.no_grad():
            for batch in batches:
                engine.micro_step([HostBatch.of(*batch, None)], z_loss=0.0)
            told = engine.update(step=step, grad_clip=0.5, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=0.1)
        assert told["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert told["tokens"] == tokens
    theirs = dict(oracle.named_parameters())
    errors = {
        part.hf_name: distance(engine.state.tensor(unit, spec)[part.start : part.stop], theirs[part.hf_name])
        for unit in engine.state.units
        for spec in unit.tensors
        for part in spec.parts
    }
    # float32: 1e-7 a step; clip's 1e-6 (torch adds it to the norm) is the rest
    assert max(errors.values()) < 1e-5, errors
