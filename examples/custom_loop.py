"""A training loop of your own around fullstride's Trainer: one GPU, several, or CPU workers. Copy it.

    python examples/custom_loop.py --out runs/one                              # a tiny model on all GPUs, or on the CPU
    python examples/custom_loop.py --device cpu --gpus 2 --out runs/two        # the same over two CPU workers
    python examples/custom_loop.py --device cpu --out runs/two --steps 90      # goes on after its 60 updates, on one
    python examples/custom_loop.py --model MODEL_DIR --gpus 4 --out runs/mine
    torchrun --nproc-per-node 2 examples/custom_loop.py --device cpu --out runs/three

There is no `if __name__ == "__main__":`, and none is needed: the ranks' processes import fullstride, never this file.
So it also runs from stdin (`python - --gpus 2 < examples/custom_loop.py`). Under torchrun all processes run it,
and the one whose `trainer.leads` is true prints and writes. On a GPU, trainer.gpu_info needs the package nvidia-ml-py
(extra `gpu`).
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

import fullstride as fs
from fullstride.model.presets import preset

parser = argparse.ArgumentParser(description="train with a loop of your own")
parser.add_argument(
    "--model", default="tiny", help="directory in Hugging Face's format, or a built-in name: random weights"
)
parser.add_argument("--gpus", type=int, default=0, help="0: all; with --device cpu the number of workers")
parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
parser.add_argument("--steps", type=int, default=60, help="updates, those before a resume included")
parser.add_argument("--batch-size", type=int, default=2, help="rows of a rank and micro-step")
parser.add_argument("--seq-len", type=int, default=64)
parser.add_argument("--grad-accum", type=int, default=2, help="micro-steps of an update")
parser.add_argument("--every", type=int, default=20, help="updates between two validations, each with a checkpoint")
parser.add_argument("--out", type=Path, default=Path("runs/custom-loop"))
args = parser.parse_args()

TINY = fs.ModelConfig(
    architecture="qwen3",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    tie_word_embeddings=True,
)
PEAK, WARM_UP = 3e-3, 10
VALIDATION = 2**32  # batches from this number on are never trained on


def learning_rate(step: int) -> float:
    """Linear over WARM_UP updates, then by the inverse square root: it need not know where the run ends."""
    return PEAK * min(step / WARM_UP, (WARM_UP / step) ** 0.5)


def load(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Batch `number` of all ranks: inputs and targets, int32 [world_size * batch_size, seq_len]. Put your data here.

    Every row counts in steps of its own. What a batch holds follows from its number, so a resumed run goes on exactly.
    """
    generator = np.random.default_rng(number)
    start, stride = generator.integers(1, 9, (2, trainer.world_size * trainer.batch_size, 1))
    tokens = (start + stride * np.arange(trainer.seq_len + 1)) % min(trainer.config.vocab_size, 512)
    inputs, targets = tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)  # targets are shifted already
    targets[:, 0] = -100  # ignored: the stride cannot be known yet
    return inputs, targets


def describe(info: dict) -> str:
    """One GPU's telemetry, or that of a CPU, which has none."""
    shown = {"power_watts": "W", "temperature_celsius": "C", "sm_clock_mhz": "MHz", "utilisation_percent": "%"}
    return (
        " ".join(f"{info[name]:.0f} {unit}" for name, unit in shown.items() if info[name] is not None) or "no telemetry"
    )


options = fs.Options(device=args.device)
sizes = {"gpus": args.gpus, "batch_size": args.batch_size, "seq_len": args.seq_len, "grad_accum": args.grad_accum}
pretrained = Path(args.model).is_dir()
config = (
    fs.ModelConfig.from_pretrained(args.model) if pretrained else TINY if args.model == "tiny" else preset(args.model)
)

with fs.Trainer(config, options, **sizes) as trainer:  # starts a process a rank; leaving the block ends them
    checkpoints, done = args.out / "checkpoints", 0
    if (checkpoints / "latest").exists():
        done = trainer.load_checkpoint(checkpoints)["updates"]  # on any number of ranks
        if trainer.leads:
            print(f"resumed after update {done} of {args.steps}")
    elif pretrained:
        trainer.import_weights(args.model)
    else:
        trainer.init_weights(seed=1)
    args.out.mkdir(parents=True, exist_ok=True)

    batch, begin = load(done * args.grad_accum), time.perf_counter()
    for step in range(done + 1, args.steps + 1):
        for micro_step in range(args.grad_accum):
            trainer.step(*batch)
            # step has only issued the work: while the GPUs are at it, the next batch is loaded
            batch = load((step - 1) * args.grad_accum + micro_step + 1)
        told = trainer.update(lr=learning_rate(step), step=step, weight_decay=0.01, grad_clip=1.0)  # waits for them
        now = time.perf_counter()
        rate, begin = args.grad_accum * batch[0].size / (now - begin), now
        row = {"step": step, "lr": learning_rate(step), **told}
        if step % args.every == 0 or step == args.steps:
            row["eval_loss"] = trainer.validate(*load(VALIDATION))["loss"]
            trainer.save_checkpoint(checkpoints, step, extra={"updates": step})
            peak = trainer.peak_memory() / 1e9  # of the rank that had most, since the last time
            ranks = [f"    rank {rank}: {describe(info)}" for rank, info in enumerate(trainer.gpu_info())]
            if trainer.leads:
                losses = f"loss {told['loss']:.4f}, held out {row['eval_loss']:.4f}"
                print(f"{step}: {losses}, {rate:,.0f} tokens/s, {peak:.2f} GB", *ranks, sep="\n")
            begin = time.perf_counter()
        if trainer.leads:
            with (args.out / "losses.jsonl").open("a") as file:  # after a crash, rows since the checkpoint come again
                file.write(json.dumps(row) + "\n")
    trainer.export_model(args.out / "model", overwrite=True)
if trainer.leads:
    print(f"model: {args.out / 'model'}")
