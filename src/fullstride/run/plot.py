"""The loss curve of a run directory, as a PNG and as text."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from fullstride.run.metrics import read_metrics


def plot_loss(run: Path, eval_loss_before: float | None = None) -> Path | None:
    """Draw `run`/metrics.csv into `run`/loss.png, with the evaluation before the first update at 0.

    None, with one line that says how to get it, without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        print("loss.png is left out: pip install 'fullstride[plot]' for plots")
        return None
    rows = read_metrics(run / "metrics.csv")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="update", ylabel="loss per supervised token")
    axes.plot([int(r["step"]) for r in rows], [float(r["loss"]) for r in rows], label="training")
    evaluated = [(int(r["step"]), float(r["eval_loss"])) for r in rows if r["eval_loss"]]
    if eval_loss_before is not None:
        evaluated.insert(0, (0, eval_loss_before))
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), marker="o", label="evaluation")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    axes.grid(alpha=0.3)
    file = run / "loss.png"
    figure.savefig(file, dpi=120)
    return file


def sketch(values: list[float], width: int = 60, height: int = 8) -> str:
    """A curve in plain characters: `height` lines of at most `width` columns, the means of neighbours in one."""
    columns = min(width, len(values))
    edges = [len(values) * i // columns for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    levels = [round((m - low) / ((high - low) or 1) * (height - 1)) for m in means]
    lines = []
    for level in reversed(range(height)):
        label = f"{low + (high - low) * level / (height - 1):8.3f} |" if level in (0, height - 1) else " " * 8 + " |"
        lines.append(label + "".join("*" if at == level else " " for at in levels).rstrip())
    return "\n".join(lines)
