"""What a micro-step holds, skips and asks for, beyond the numbers."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import fullstride.engine.stage as stage_module
from fullstride.engine.batch import HostBatch
from fullstride.engine.checkpoint import load_checkpoint, save_checkpoint
from fullstride.engine.step import Engine
from fullstride.engine.weights_io import export_adapter, import_adapter, init_adapters, init_weights
from fullstride.model.lora import PROJECTIONS, LoraSettings
from fullstride.ops.matmul import matmul
from tests.oracle import make_engine, make_model, random_batch


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_model("llama", tied=True).save_pretrained(tmp_path)
    return tmp_path


def micro_step(engine: Engine) -> None:
    with torch.no_grad():
        engine.micro_step([HostBatch.of(*random_batch(2, 13), None)], z_loss=0.0)


@pytest.mark.parametrize(
    ("recompute", "most"), [((), 3), (("swiglu", "norm"), 3), (("att",), 1), (("block",), 1)], ids=str
)
def test_attention_outputs_alive_at_once(
    recompute: tuple[str, ...], most: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three layers keep three outputs; where recompute drops them, one is alive at a time."""
    engine = make_engine(directory, torch.float32, rows=2, seq_len=13, recompute=frozenset(recompute))
    alive: list[weakref.ref] = []
    counts: list[int] = []
    original = stage_module.attention_fwd

    def counted(*args: Any) -> Any:
        out, state = original(*args)
        alive.append(weakref.ref(out))
        counts.append(sum(ref() is not None for ref in alive))
        return out, state

    monkeypatch.setattr(stage_module, "attention_fwd", counted)
    micro_step(engine)
    del engine.stages  # nothing else holds them
    assert max(counts) == most


@pytest.mark.parametrize(
    ("targets", "products"),
    [
        # three layers of four linears, and the head: 13 input gradients in full; LoRA's head adds one, and the lowest
        # block none below its lowest adapter
        (("down_proj",), 3 * 4 - 4 + 1),
        (("gate_proj", "down_proj"), 3 * 4 - 3 + 1),
        (("o_proj",), 3 * 4 - 2 + 1),
        (("q_proj", "down_proj"), 3 * 4 - 1 + 1),
    ],
    ids=str,
)
def test_no_input_gradient_below_the_lowest_adapter(targets: tuple[str, ...], products: int, directory: Path) -> None:
    """Counts the products whose second factor is a frozen weight as it lies: those are input gradients."""
    engine = make_engine(directory, torch.float32, 2, 13, LoraSettings(2, 4.0, 0.0, targets, False), head_chunks=1)
    frozen = {
        v.data_ptr() for name, views in engine.state.views.items() if "adapter" not in name for v in views.values()
    }
    count = 0

    def counted(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
        nonlocal count
        count += b.data_ptr() in frozen and b.stride(1) == 1
        matmul(a, b, out, **options)

    engine.tools.matmul = counted
    micro_step(engine)
    assert count == products


def test_no_weight_gradient_of_the_base(directory: Path) -> None:
    engine = make_engine(directory, torch.float32, 2, 13, LoraSettings(2, 4.0, 0.0, ("q_proj",), False))
    assert all("adapter" in name for name in engine.state.trained)
    assert engine.state.gradients.full("blocks.0") == {}
    micro_step(engine)


def test_weights_are_gathered_one_ahead_and_released(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(directory, torch.float32, rows=2, seq_len=13)
    weights, calls = engine.state.weights, []
    get = weights.get
    for name in ("gather", "release"):
        monkeypatch.setattr(weights, name, lambda unit, name=name: calls.append((name, unit)))
    monkeypatch.setattr(weights, "get", lambda unit: calls.append(("get", unit)) or get(unit))
    micro_step(engine)
    blocks = [(call, int(unit.split(".")[1])) for call, unit in calls if unit.startswith("blocks.")]
    forward = [
        *(("gather", 0), ("gather", 1), ("get", 0), ("release", 0)),
        *(("gather", 2), ("get", 1), ("release", 1)),
        *(("get", 2), ("release", 2)),
    ]
    backward = [
        *(("gather", 2), ("gather", 1), ("get", 2), ("release", 2)),
        *(("gather", 0), ("get", 1), ("release", 1)),
        *(("get", 0), ("release", 0)),
    ]
    assert blocks == forward + backward


@pytest.mark.parametrize("targets", [("q_proj", "v_proj", "up_proj"), PROJECTIONS], ids=str)
def test_folded_adapters_follow_every_change(targets: tuple[str, ...], directory: Path, tmp_path: Path) -> None:
    """Beside and below a frozen weight stand its adapter's B and A, and zeros, after whatever changes an adapter."""
    lora = LoraSettings(3, 6.0, 0.0, targets, False)
    engine = make_engine(directory, torch.float32, 2, 13, lora)

    def adapters() -> list[torch.Tensor]:
        found = []
        for layer in range(engine.config.num_hidden_layers):
            w = engine.tools.block(layer)
            for linear in (w.qkv, w.o, w.gate_up, w.down):
                if linear.adapter is None:
                    assert linear.extended is None
                    continue
                (outputs, inputs), extended = linear.shape, linear.extended
                assert extended is not None and extended.data_ptr() == linear.weight.data_ptr()  # type: ignore[union-attr]
                beside = torch.zeros(outputs, linear.adapter.a.shape[0])
                for i, b in enumerate(linear.adapter.b):
                    beside[b.start : b.stop, i * 3 : (i + 1) * 3] = b.weight
                assert torch.equal(extended[:outputs, inputs:], beside)
                assert torch.equal(extended[outputs:, :inputs], linear.adapter.a)
                assert not extended[outputs:, inputs:].any()
                found.append(extended[:, inputs:].clone())
        return found

    init_adapters(engine, 0)
    states = [adapters()]
    for step in (1, 2):
        micro_step(engine)
        engine.update(step=step, grad_clip=0.0, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)
        states.append(adapters())
        if step == 1:
            save_checkpoint(engine, tmp_path / "checkpoint", 1, {})
            export_adapter(engine, tmp_path / "adapter", None, False)
    load_checkpoint(engine, tmp_path / "checkpoint")
    states.append(adapters())
    init_adapters(engine, 1)
    states.append(adapters())
    import_adapter(engine, tmp_path / "adapter")
    states.append(adapters())
    same = [[all(map(torch.equal, a, b)) for b in states] for a in states]
    # the start (B zero), two updates, and three ways back to one of them
    assert same[1] == [False, True, False, True, False, True] and same[0] == [True, False, False, False, True, False]


def test_new_base_weights_leave_the_adapters_masters(directory: Path) -> None:
    """Masters know more digits than the adapters' bf16 parameters; only whoever writes adapters may set them."""
    lora = LoraSettings(3, 6.0, 0.0, PROJECTIONS, False)
    engine = make_engine(directory, torch.bfloat16, 2, 13, lora, master=torch.float32)
    init_adapters(engine, 0)
    micro_step(engine)
    engine.update(step=1, grad_clip=0.0, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)
    masters = [t.master for t in engine.state.trained.values()]
    before = [m.clone() for m in masters if m is not None]
    assert any((m != t.param.float()).any() for m, t in zip(before, engine.state.trained.values(), strict=True))
    init_weights(engine, 1)
    assert all(torch.equal(m, b) for m, b in zip(masters, before, strict=True))
