"""Our 1F1B beside that of torch.distributed.pipelining: the same model cut in two, loss and every gradient."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fullstride import ModelConfig, Options
from fullstride.engine.weights_io import init_weights
from fullstride.parallel.comm import Communicator
from tests.ranks import RankTrainer, together

pytestmark = pytest.mark.xdist_group("ranks")  # one worker has the processes

MICROBATCHES, SEQ_LEN = 4, 12
# float32, a few layers deep: 1e-7 a product
TOLERANCE = 1e-5
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=53,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.15,
)


# ---- the architecture in plain torch, with parameters under the names of checkpoints


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        for name, rows in (("q", c.q_size), ("k", c.kv_size), ("v", c.kv_size)):
            setattr(self, f"{name}_proj", nn.Linear(c.hidden_size, rows, bias=False))
        self.o_proj = nn.Linear(c.q_size, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.turned(q), self.turned(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        half = self.c.head_dim // 2
        angle = torch.arange(x.shape[-2])[:, None] * self.c.rope_theta ** (-torch.arange(half) / half)
        a, b = x.split(half, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Mlp(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Half(nn.Module):
    """Layers of the model; with the embedding before them, or norm and head behind them."""

    def __init__(self, c: ModelConfig, layers: list[int]) -> None:
        super().__init__()
        self.model, self.first = nn.Module(), 0 in layers
        self.model.layers = nn.ModuleDict({str(layer): Block(c) for layer in layers})
        if self.first:
            self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        else:
            self.model.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
            self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(x) if self.first else x
        for block in self.model.layers.values():
            x = block(x)
        return x if self.first else self.lm_head(self.model.norm(x))


def loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


# ---- both on this rank


def tokens() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    ids = generator.integers(0, CONFIG.vocab_size, (2, MICROBATCHES, SEQ_LEN), dtype=np.int32)
    ids[1][generator.random((MICROBATCHES, SEQ_LEN)) < 0.3] = -100
    return ids[0], ids[1]


def by_name(engine: Any, views: Any) -> dict[str, torch.Tensor]:
    """{name in checkpoints: tensor} of `views(unit)`, of this rank's units."""
    return {
        part.hf_name: views(unit)[spec.name][part.start : part.stop].clone()
        for unit in engine.state.units
        for spec in unit.tensors
        for part in spec.parts
    }


def ours(comm: Communicator) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(loss sum, weights, gradients of it)."""
    options = Options(dtype="fp32", device="cpu", pp=2, dp=1)
    trainer = RankTrainer(comm, CONFIG, options, batch_size=MICROBATCHES, seq_len=SEQ_LEN, grad_accum=1)
    engine = trainer.engine
    init_weights(engine, 1)
    weights = by_name(engine, lambda unit: engine.state.views[unit.name])
    trainer.step(*tokens())
    engine.pipeline.drain(MICROBATCHES)
    gradients = by_name(engine, engine.state.gradient)
    told = trainer.update(lr=0.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip=0.0)
    engine.mesh.close()
    return told["loss"] * told["tokens"], weights, gradients


def theirs(comm: Communicator, weights: dict[str, torch.Tensor], meeting: str) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss sum, its gradients) of torch's schedule over the same stages."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    layers = sorted({int(name.split(".")[2]) for name in weights if ".layers." in name})
    half = Half(CONFIG, layers)
    half.load_state_dict(weights)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=comm.rank, world_size=comm.size)
    try:
        stage = PipelineStage(half, comm.rank, comm.size, torch.device("cpu"))
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_sum, scale_grads=False)
        inputs, targets = (torch.from_numpy(array).long() for array in tokens())
        losses: list[torch.Tensor] = []
        if comm.rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        gradients = {name: parameter.grad for name, parameter in half.named_parameters() if parameter.grad is not None}
        return float(sum(losses)), gradients
    finally:
        dist.destroy_process_group()


def compare(comm: Communicator, meeting: str) -> tuple[float, float, dict[str, float]]:
    """(our loss sum, theirs in the last stage, relative distance of gradients by name)."""
    told, weights, found = ours(comm)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own
        expected, gradients = theirs(comm, weights, meeting)
    assert found.keys() == gradients.keys() == weights.keys()
    assert all(gradient.norm() > 0 for gradient in gradients.values())
    distances = {name: ((found[name] - g).norm() / g.norm()).item() for name, g in gradients.items()}
    return told, expected, distances


def test_loss_and_gradients_are_those_of_torch(tmp_path: Path) -> None:
    results = together(2, compare, str(tmp_path / "meeting"))
    for told, _, distances in results:
        assert told == pytest.approx(results[-1][1], rel=TOLERANCE)
        assert max(distances.values()) < TOLERANCE, distances
    names = [name for _, _, distances in results for name in distances]
    assert len(names) == len(set(names)) == 4 * 9 + 3  # every parameter, once
