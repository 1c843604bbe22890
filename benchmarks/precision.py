"""bf16 against float32: 200 updates of a 0.5B-class model from a random start on real text.

    PYTHONPATH=src python3 benchmarks/precision.py TEXT_ROWS.jsonl TOKENIZER_DIRECTORY OUT_DIRECTORY [UPDATES]

Rows have a `text`. Both runs see the same tokens and start from the same weights. Writes OUT/precision.csv and .png,
and prints the mean loss of the last 20 updates of each and their ratio.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import matplotlib
import numpy as np

import fullstride as fs
from fullstride.engine.lr import learning_rate
from fullstride.model.presets import preset

matplotlib.use("Agg")
from matplotlib import pyplot

ROWS, SEQ_LEN, RATE, LAST = 8, 512, 3e-4, 20


def token_rows(text_rows: str, tokenizer_directory: str, count: int) -> np.ndarray:
    """[count, SEQ_LEN + 1] token ids of the texts in order, joined by the end token; repeated when they are short."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    lines = Path(text_rows).read_bytes().split(b"\n")
    texts = [json.loads(line)["text"] for line in lines if line.strip()]
    ids: list[int] = []
    for encoded in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        ids += [*encoded, tokenizer.eos_token_id]
    return np.resize(np.array(ids, dtype=np.int32), (count, SEQ_LEN + 1))


def losses(dtype: str, rows: np.ndarray, updates: int) -> list[float]:
    """The loss of every update of one run."""
    options = fs.Options(dtype=dtype, device="cuda")
    found = []
    with fs.Trainer(preset("qwen2.5-0.5b"), options, batch_size=ROWS, seq_len=SEQ_LEN) as trainer:
        trainer.init_weights(0)
        for step in range(1, updates + 1):
            window = rows[(step - 1) * ROWS : step * ROWS]
            trainer.step(np.ascontiguousarray(window[:, :-1]), np.ascontiguousarray(window[:, 1:]))
            rate = learning_rate("cosine", step, updates, RATE, warmup=20)
            found.append(trainer.update(lr=rate, weight_decay=0.1, grad_clip=1.0)["loss"])
    return found


def main(text_rows: str, tokenizer_directory: str, out: str, updates: str = "200") -> None:
    count = int(updates)
    rows = token_rows(text_rows, tokenizer_directory, ROWS * count)
    runs = {dtype: losses(dtype, rows, count) for dtype in ("bf16", "fp32")}
    Path(out).mkdir(parents=True, exist_ok=True)
    with (Path(out) / "precision.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["update", *runs])
        writer.writerows([i + 1, *pair] for i, pair in enumerate(zip(*runs.values(), strict=True)))
    for dtype, values in runs.items():
        pyplot.plot(range(1, count + 1), values, label=dtype, linewidth=1)
    pyplot.xlabel("update")
    pyplot.ylabel("loss per token")
    pyplot.legend()
    pyplot.savefig(Path(out) / "precision.png", dpi=120)
    means = {dtype: float(np.mean(values[-LAST:])) for dtype, values in runs.items()}
    print(f"mean loss of the last {LAST} of {count} updates: {means}, ratio {means['bf16'] / means['fp32']:.5f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
