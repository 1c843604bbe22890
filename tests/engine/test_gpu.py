"""The engine on a GPU: float32 against transformers, bf16 gradients against transformers' own, CPU against GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fullstride import Options, Trainer
from tests.oracle import FAMILIES, distance, loss_sum, make_model, random_batch
from tests.parity import harness

pytestmark = pytest.mark.gpu

# sizes that the attention libraries take (head size a multiple of 8), big enough for bf16 to show its noise
SIZES = {
    "vocab_size": 1000,
    "hidden_size": 384,
    "intermediate_size": 1000,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 4,
}
ROWS, SEQ_LEN = 4, 256


def gpu_model(family: str, tied: bool, tmp_path: Path):
    """A transformers model whose weights are bf16 numbers, so that both precisions start from the same."""
    model = make_model(family, tied, **SIZES)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # the sizes of real models' activations
                parameter.mul_(0.02 / 0.15)
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(tmp_path)
    return model.cuda()


def our_gradients(path: Path, dtype: str, batch, documents=None, **options) -> dict[str, torch.Tensor]:
    options = Options(dtype=dtype, device="cuda", **options)
    with Trainer.from_pretrained(path, options, batch_size=ROWS, seq_len=SEQ_LEN) as trainer:
        trainer.step(*batch, documents)
        return {name: grad.float() for name, grad in trainer.gradients().items()}


def their_gradients(model, batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    on_gpu = [torch.from_numpy(x).cuda() for x in batch]
    logits = model(on_gpu[0].long()).logits.flatten(0, 1).float()
    torch.nn.functional.cross_entropy(logits, on_gpu[1].long().flatten(), reduction="sum").backward()
    return {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_gradients_equal_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    model, batch = gpu_model(family, tied, tmp_path), random_batch(ROWS, SEQ_LEN)
    ours, theirs = our_gradients(tmp_path, "fp32", batch), their_gradients(model, batch)
    assert ours.keys() == theirs.keys()
    errors = {name: distance(ours[name], theirs[name]) for name in ours}
    assert max(errors.values()) < 2e-5, errors  # float32 sums over 1,024 tokens in other orders, four layers deep


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_gradients_are_as_near_to_float32_as_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    model, batch = gpu_model(family, tied, tmp_path), random_batch(ROWS, SEQ_LEN)
    exact = their_gradients(model, batch)
    theirs = their_gradients(model.bfloat16(), batch)
    ours = our_gradients(tmp_path, "bf16", batch)
    ratios = {name: distance(ours[name], exact[name]) / distance(theirs[name], exact[name]) for name in exact}
    print(f"\nbf16 gradient error over transformers', {family}: max {max(ratios.values()):.2f}", end=" ")
    print(f"median {sorted(ratios.values())[len(ratios) // 2]:.2f}")
    assert max(ratios.values()) < 1.5, ratios


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_packed_documents_equal_rows_of_their_own(dtype: str, tmp_path: Path) -> None:
    """Four documents a row give the gradients of the same documents padded in rows of their own."""
    model = gpu_model("qwen3", True, tmp_path)
    batch = random_batch(ROWS, SEQ_LEN)
    documents = np.broadcast_to(np.repeat(np.arange(4, dtype=np.int32), SEQ_LEN // 4), (ROWS, SEQ_LEN)).copy()
    alone = [x.reshape(ROWS * 4, SEQ_LEN // 4) for x in batch]
    exact = their_gradients(model, alone)
    ours = our_gradients(tmp_path, dtype, batch, documents)
    if dtype == "fp32":
        assert max(distance(ours[name], exact[name]) for name in exact) < 2e-5
        return
    theirs = their_gradients(model.bfloat16(), alone)
    ratios = {name: distance(ours[name], exact[name]) / distance(theirs[name], exact[name]) for name in exact}
    assert max(ratios.values()) < 1.5, ratios


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("optimizer", harness.OPTIMIZERS)
def test_gpu_runs_equal_the_cpus(optimizer: str, method: str, tmp_path: Path) -> None:
    settings = {} if method == "full" else harness.LORA
    reference = harness.run(harness.Split(), optimizer, settings, tmp_path)
    on_gpu = harness.run(harness.Split(device="cuda"), optimizer, settings, tmp_path)
    splits = {
        "packed": harness.Split(device="cuda", packing=True, accumulation=2, head_chunks=3),
        "resumed": harness.Split(device="cuda", recompute=("block",), resume_after=3),
    }
    for name, split in splits.items():
        harness.check_equal(harness.run(split, optimizer, settings, tmp_path / name), on_gpu)
    # another exponential, and products summed in other orders: a few units more than between splits of one device
    harness.check_equal(on_gpu, reference, tolerance=5e-5)


@pytest.mark.parametrize("flags", [("swiglu", "norm"), ("ffn", "qkv"), ("att",), ("block",)], ids=",".join)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_deterministic_bits(packed: bool, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Under `deterministic` a repeat, and recompute on against off, give the same bits at 16 x 1024."""
    model = make_model("qwen2", True, **(SIZES | {"num_hidden_layers": 2}))
    model.bfloat16().save_pretrained(tmp_path)
    generator = np.random.default_rng(0)
    inputs, targets = generator.integers(0, 1000, (2, 16, 1024), dtype=np.int32)
    documents = np.broadcast_to(np.arange(1024, dtype=np.int32) // 300, (16, 1024)).copy() if packed else None
    seen = []
    for recompute in [()] * 20 + [flags] * 2:
        options = Options(dtype="bf16", device="cuda", deterministic=True, recompute=recompute)
        with Trainer.from_pretrained(tmp_path, options, batch_size=16, seq_len=1024) as trainer:
            trainer.step(inputs, targets, documents)
            seen.append(trainer.gradients())
    for other in seen[1:]:
        assert all(torch.equal(seen[0][name], other[name]) for name in seen[0])


@pytest.mark.parametrize("method", ["full", "lora"])
def test_graphs_give_the_same_bits(method: str, tmp_path: Path) -> None:
    """Whole micro-steps and updates, captured and replayed against eager: packed and not, first and later micro-steps,
    varying numbers of supervised rows and documents, an evaluation in between."""
    model = make_model("qwen3", True, **(SIZES | {"num_hidden_layers": 2}))
    model.bfloat16().save_pretrained(tmp_path)
    options = {"method": "lora", "lora_dropout": 0.2} if method == "lora" else {}
    runs = []
    for graphs in (False, True):
        settings = Options(dtype="bf16", device="cuda", deterministic=True, graphs=graphs, **options)
        generator = np.random.default_rng(5)
        with Trainer.from_pretrained(tmp_path, settings, batch_size=16, seq_len=1024, grad_accum=3) as trainer:
            told = []
            for update in range(6):
                for micro_step in range(1 + update % 3):
                    inputs, targets = generator.integers(0, 1000, (2, 16, 1024), dtype=np.int32)
                    targets[generator.random((16, 1024)) < (0.2, 0.9, 0.5)[micro_step]] = -100
                    documents = np.sort(generator.integers(0, 5, (16, 1024), dtype=np.int32)) if update % 2 else None
                    trainer.step(inputs, targets, documents)
                    if update == 3:
                        told.append(trainer.validate(inputs, targets))
                told.append(trainer.update(lr=1e-3, grad_clip=1.0))
            state = trainer.engine.state
            values = [state.values(unit)[spec.name].clone() for unit in state.units for spec in unit.tensors]
            runs.append((told, values))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_dropout_noise_on_a_gpu_is_the_cpus(tmp_path: Path) -> None:
    """float32 LoRA with dropout: the GPU drops what the CPU drops."""
    model = make_model("llama", False, **(SIZES | {"num_hidden_layers": 2}))
    model.save_pretrained(tmp_path)
    batch, losses = random_batch(ROWS, SEQ_LEN), {}
    for device in ("cpu", "cuda"):
        options = Options(dtype="fp32", device=device, method="lora", lora_dropout=0.4)
        with Trainer.from_pretrained(tmp_path, options, batch_size=ROWS, seq_len=SEQ_LEN) as trainer:
            for unit in trainer.engine.state.adapters:  # B is zero at the start, and so would dropout's effect be
                for spec in unit.tensors:
                    values = 0.05 * torch.randn(spec.shape, generator=torch.Generator().manual_seed(len(spec.name)))
                    trainer.engine.state.tensor(unit, spec).copy_(values)
            trainer.engine.params_written(trainer.engine.state.units)
            without = trainer.validate(*batch)["loss"]
            trainer.step(*batch)
            losses[device] = trainer.update(lr=0.0)["loss"]
            assert abs(losses[device] - without) > 1e-4  # dropout has an effect
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-5)


def test_peak_memory_sees_what_was_allocated_and_freed() -> None:
    with Trainer(harness.CONFIG, Options(device="cuda"), batch_size=1, seq_len=8) as trainer:
        before = trainer.peak_memory()
        gib = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        del gib
        assert trainer.peak_memory() >= before + 2**30
        assert trainer.peak_memory() < before + 2**29  # the peak since the last question


@pytest.mark.parametrize("method", ["full", "lora"])
def test_bench_reports_its_share_of_the_measured_ceiling(method: str, tmp_path: Path) -> None:
    """Training is slower than its products and attention alone, and not by an order of magnitude at this size."""
    from fullstride.config.commands import BenchConfig
    from fullstride.run.bench import run_bench

    make_model("qwen2", True, **(SIZES | {"hidden_size": 768})).save_pretrained(tmp_path)
    told = run_bench(BenchConfig(model=str(tmp_path), method=method, batch_size=16, seq_len=1024, updates=2))
    assert told["share_of_ceiling"] == pytest.approx(told["tokens_per_sec"] / told["ceiling_tokens_per_sec"])
    assert 0.1 < told["share_of_ceiling"] < 1.0


def test_loss_is_right_on_a_gpu(tmp_path: Path) -> None:
    model, batch = gpu_model("llama3", False, tmp_path), random_batch(ROWS, SEQ_LEN)
    with Trainer.from_pretrained(tmp_path, Options(dtype="fp32"), batch_size=ROWS, seq_len=SEQ_LEN) as trainer:
        told = trainer.validate(*batch)
    expected = loss_sum(model.cpu(), *batch).item() / (batch[1] != -100).sum()
    assert told["loss"] == pytest.approx(expected, rel=1e-5)
