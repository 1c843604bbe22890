"""Parity as a contract: the same rows give the same loss, gradient norm and weights, however the work is split.

One tiny tied Qwen3 (head size not width / heads), float32, 10 rows of unequal completion length, 5 updates. A `Split`
says how the rows reach the trainer; `run` gives the trace that must not depend on it. Every feature that splits work
adds a field here in the commit that adds the feature.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullstride import ModelConfig, Options, Trainer
from fullstride.data.chat import Example
from fullstride.data.loader import Loader
from fullstride.data.packing import PackedRows
from fullstride.engine.step import Engine
from fullstride.engine.weights_io import init_weights
from fullstride.parallel.comm import Communicator
from tests.ranks import RankTrainer, together

SEQ_LEN = 32
ROWS = 10
UPDATES = 5
# float32, sums of about 1e3 terms in another order: 1e-7 a product, some 1e-6 after 5 updates
TOLERANCE = 1e-5

CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=61,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    initializer_range=0.15,
)
# the other has what the first lacks: a head of its own, biases
MODELS = {"tied": CONFIG, "untied": replace(CONFIG, architecture="qwen2", tie_word_embeddings=False)}
# for four ranks that share it out
EVERY_MODEL = MODELS | {
    "four heads": replace(CONFIG, num_key_value_heads=4),
    # for four stages
    "deep tied": replace(CONFIG, num_hidden_layers=4),
    "deep untied": replace(MODELS["untied"], num_hidden_layers=4),
}
LORA = {"method": "lora", "lora_rank": 4, "lora_alpha": 8.0}
# an optimizer that is close to SGD (a large eps hides nothing of a gradient), and AdamW as people use it
OPTIMIZERS = {"sgd-like": {"lr": 5.0, "eps": 1.0}, "adamw": {"lr": 1e-3, "eps": 1e-8}}
# where sums are made in another order in every product, milder ones: an element whose gradient is nothing but rounding
# would get a step of full size from AdamW with a small eps, and SGD of a large rate magnifies rounding too
OPTIMIZERS_ROUNDED = {"sgd rounded": {"lr": 2.0, "eps": 1.0}, "adamw rounded": {"lr": 1e-3, "eps": 1e-4}}


@dataclass(frozen=True)
class Split:
    """How the work is cut. The default is the reference: one process, one micro-step, nothing recomputed."""

    accumulation: int = 1
    packing: bool = False
    recompute: tuple[str, ...] = ()
    head_chunks: int = 1
    device: str = "cpu"
    resume_after: int = 0  # save, make a new trainer, load; 0: never
    ranks: int = 1
    zero: int = 1
    all_to_all: bool = False
    gather_by_copy: bool = False
    send_by_copy: bool = False
    offload: bool = False
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int = 0
    microbatches: int = 1
    tp: int = 1
    sequence_parallel: bool = True

    @property
    def dp(self) -> int:
        return self.ranks // (self.pp * self.tp)


@dataclass
class Trace:
    """What a run gives: per update, and at its end."""

    loss: list[float] = field(default_factory=list)
    loss_1k: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def examples() -> list[Example]:
    """10 rows with prompts and completions of unequal length."""
    generator = np.random.default_rng(7)
    rows = []
    for i in range(ROWS):
        prompt, completion = generator.integers(1, 9), 1 + (i * 5) % 17
        ids = generator.integers(0, CONFIG.vocab_size, prompt + completion).astype(np.int32)
        rows.append(Example(ids, np.arange(len(ids)) >= prompt, "rows", i + 1))
    return rows


def options_of(split: Split, method: dict) -> dict[str, Any]:
    """The Trainer's options."""
    return {
        "dtype": "fp32",
        "device": split.device,
        "recompute": split.recompute,
        "head_chunks": split.head_chunks,
        "zero": split.zero,
        "grad_reduce": "all-to-all" if split.all_to_all else "reduce-scatter",
        "gather_by": "copy" if split.gather_by_copy else "nccl",
        "send_by": "copy" if split.send_by_copy else "nccl",
        "offload": ("grads",) if split.offload else (),
        "dp": split.dp,
        "pp": split.pp,
        "tp": split.tp,
        "pp_schedule": split.schedule,
        "pp_chunks": split.chunks,
        "microbatches": split.microbatches if split.pp > 1 else 0,
        "seed": 3,
        **method,
    }


def make_trainer(
    split: Split, method: dict, batch_size: int, model: str = "tied", comm: Communicator | None = None
) -> Trainer | RankTrainer:
    """batch_size: of one rank. comm: of this process, where there are several ranks."""
    options = Options(**options_of(split, method))
    sizes = {"batch_size": batch_size, "seq_len": SEQ_LEN, "grad_accum": split.accumulation}
    if comm is None:
        trainer = Trainer(EVERY_MODEL[model], options, **sizes)
        trainer.init_weights(seed=1)
    else:
        trainer = RankTrainer(comm, EVERY_MODEL[model], options, **sizes, sequence_parallel=split.sequence_parallel)
        init_weights(trainer.engine, 1)
    same_start_everywhere(trainer.engine)
    return trainer


def same_start_everywhere(engine: Engine) -> None:
    """Random starts come from the device's own generator: copy a CPU's, so that devices can be compared."""
    for i, unit in enumerate(engine.state.base_table + engine.state.adapter_table):
        if unit not in engine.state.units:
            continue
        with engine.state.open(unit) as views:
            for j, spec in enumerate(unit.tensors):
                # norms stay one, the adapters' B zero; a bias of zero would have no size to compare with
                if (spec.decay or spec.name.endswith("bias")) and ".b." not in spec.name:
                    values = torch.randn(spec.shape, generator=torch.Generator().manual_seed(100 * i + j))
                    views[spec.name].copy_(0.15 * values)
    engine.params_written(engine.state.units)


def run(split: Split, optimizer: str, method: dict, directory: Path, model: str = "tied") -> Trace:
    """Five updates over all rows. Every rank tells the same, to the bit."""
    if split.ranks == 1:
        return run_rank(None, split, optimizer, method, directory, model)
    first, *others = together(split.ranks, run_rank, split, optimizer, method, directory, model)
    for other in others:
        same_bits(other, first)
        first.weights |= other.weights
    return first


def run_rank(
    comm: Communicator | None, split: Split, optimizer: str, method: dict, directory: Path, model: str
) -> Trace:
    """What one process does of `run`."""
    rows = PackedRows(examples(), SEQ_LEN, split.packing)
    # rows that are no multiple of the pieces are filled up with empty ones
    pieces = split.accumulation * split.dp * split.microbatches
    batch_size = -(-len(rows) // pieces) * split.microbatches
    loader = Loader(rows, batch_size * split.dp, 0, 0, shuffle=False)
    trainer, trace = make_trainer(split, method, batch_size, model, comm), Trace()
    for step in range(1, UPDATES + 1):
        for batch in loader.next_window(split.accumulation):
            trainer.step(batch.inputs, batch.targets, batch.documents, z_loss=1e-3)
        rates = (OPTIMIZERS | OPTIMIZERS_ROUNDED)[optimizer]
        told = trainer.update(**rates, beta1=0.9, beta2=0.95, weight_decay=0.1, grad_clip=0.7)
        for name in ("loss", "loss_1k", "grad_norm", "tokens"):
            getattr(trace, name).append(told[name])
        if step == split.resume_after:
            assert isinstance(trainer, Trainer)
            trainer.save_checkpoint(directory, step, {"position": loader.position})
            trainer.stop()
            trainer = make_trainer(split, method, batch_size, model)
            assert isinstance(trainer, Trainer)
            loader.seek(trainer.load_checkpoint(directory)["position"])
    state = trainer.engine.state
    replicas_agree(trainer.engine)
    for unit in state.units:
        trace.weights |= {f"{unit.name}.{name}": value for name, value in state.values(unit).items()}
    if isinstance(trainer, Trainer):
        trainer.stop()
    else:
        trainer.engine.mesh.close()
    return trace


def replicas_agree(engine: Engine) -> None:
    """Assert that what tensor parallelism leaves whole has the same bits on every rank that has it."""
    state, wholes = engine.state, []
    for unit in state.units:
        with state.open_share(unit) as views:
            wholes += [views[spec.name].clone() for spec in unit.tensors if spec.split is None]
    first, *others = engine.mesh.tp.gather(wholes)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def same_bits(a: Trace, b: Trace) -> None:
    """Assert that two traces are equal, in the weights that both have."""
    assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights.keys() & b.weights.keys())


def check_equal(found: Trace, reference: Trace, tolerance: float = TOLERANCE) -> None:
    """Assert that two traces agree within `tolerance`, and that there was something to compare."""
    assert found.tokens == reference.tokens
    for name in ("loss", "loss_1k", "grad_norm"):
        a, b = getattr(found, name), getattr(reference, name)
        assert len(a) == UPDATES
        np.testing.assert_allclose(a, b, rtol=tolerance, err_msg=name)
    assert found.weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        difference = (found.weights[name] - weight).norm() / weight.norm()
        assert difference < tolerance, f"{name}: {difference}"


def cover_pairs(every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A few of `every` combination of features, in which each pair of values occurs that occurs at all (greedily)."""

    def pairs(combination: dict[str, Any]) -> set[Any]:
        return set(itertools.combinations(combination.items(), 2))

    wanted = set().union(*map(pairs, every))
    chosen = []
    while wanted:
        best = max(every, key=lambda combination: len(pairs(combination) & wanted))
        chosen.append(best)
        wanted -= pairs(best)
    return chosen
