"""A small model at small batches: this project beside transformers with torch.compile, in one process.

    PYTHONPATH=src python3 benchmarks/small.py

SmolLM2-135M's sizes, 4 rows of 256 tokens, bf16, full training, AdamW, random weights and data. Prints tokens per
second of both (medians of 5 after warm-up) and their ratio.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers

import fullstride as fs
from fullstride.model.presets import preset

ROWS, SEQ_LEN, ACCUMULATION = 4, 256, 4
CONFIG = preset("smollm2-135m")


def tokens_per_second(update: Callable[[], object]) -> float:
    """Median of five timings of ten updates each, after a warm-up."""
    for _ in range(5):
        update()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(10):
            update()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / 10)
    return ROWS * SEQ_LEN * ACCUMULATION / statistics.median(times)


def ours(batches: list[tuple[np.ndarray, np.ndarray]]) -> float:
    options = fs.Options(dtype="bf16", device="cuda")
    with fs.Trainer(CONFIG, options, batch_size=ROWS, seq_len=SEQ_LEN, grad_accum=ACCUMULATION) as trainer:
        trainer.init_weights(0)

        def update() -> None:
            for batch in batches:
                trainer.step(*batch)
            trainer.update(lr=1e-4, weight_decay=0.1, grad_clip=1.0)

        return tokens_per_second(update)


def theirs(batches: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """The plain loop: compiled forward and backward, fused AdamW, clip by norm."""
    raw = {k: v for k, v in CONFIG.to_dict().items() if k not in ("architectures", "dtype", "torch_dtype")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**raw)).to("cuda", torch.bfloat16)
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    on_gpu = [tuple(torch.from_numpy(x).long().cuda() for x in batch) for batch in batches]

    def update() -> None:
        for inputs, targets in on_gpu:
            logits = compiled(inputs, use_cache=False).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (loss / ACCUMULATION).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return tokens_per_second(update)


def main() -> None:
    generator = np.random.default_rng(0)
    shape = (ACCUMULATION, 2, ROWS, SEQ_LEN)
    batches = [(a, b) for a, b in generator.integers(0, CONFIG.vocab_size, shape, dtype=np.int32)]
    mine, other = ours(batches), theirs(batches)
    print(f"fullstride {mine:,.0f} tokens/s, transformers + torch.compile {other:,.0f}: {mine / other:.2f} times")


if __name__ == "__main__":
    main()
