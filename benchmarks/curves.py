"""Fine-tune a small model on real rows and keep the loss curves: full and LoRA, 50 updates each.

    python benchmarks/curves.py MODEL_DIRECTORY DATA_DIRECTORY[,DATA_DIRECTORY...] OUT_DIRECTORY

Writes OUT/curves.csv (data, method, step, loss, grad_norm, tokens_per_sec, eval_loss) and OUT/curves.png.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib

import fullstride as fs
from fullstride.run.metrics import read_metrics

matplotlib.use("Agg")
from matplotlib import pyplot

RATES = {"lora": 5e-4, "full": 5e-5}
COLUMNS = ("step", "loss", "grad_norm", "tokens_per_sec", "eval_loss")


def main(model: str, data: str, out: str) -> None:
    rows, figure = [], pyplot.figure(figsize=(8, 5))
    for directory in data.split(","):
        for method, lr in RATES.items():
            name = f"{Path(directory).name}-{method}"
            result = fs.finetune(
                model=model,
                data=directory,
                out=str(Path(out) / name),
                method=method,
                lr=lr,
                steps=50,
                seq_len=1024,
                batch_size=8,
                grad_accum=1,
                warmup=5,
            )
            metrics = read_metrics(Path(out) / name / "metrics.csv")
            rows += [{"data": Path(directory).name, "method": method} | {c: m[c] for c in COLUMNS} for m in metrics]
            pyplot.plot([int(m["step"]) for m in metrics], [float(m["loss"]) for m in metrics], label=name)
            print(f"{name}: evaluation loss {result.eval_loss_before:.4f} -> {result.eval_loss:.4f}")
    with (Path(out) / "curves.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    pyplot.xlabel("update")
    pyplot.ylabel("loss per supervised token")
    pyplot.legend()
    figure.savefig(Path(out) / "curves.png", dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
