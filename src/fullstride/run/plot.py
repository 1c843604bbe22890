"""Curves of run directories: as a PNG, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fullstride.config.commands import PlotConfig
from fullstride.errors import ConfigError
from fullstride.files import replace_bytes
from fullstride.run.metrics import read_events, read_metrics

PANELS = {
    "loss": "loss per supervised token",
    "lr": "learning rate",
    "grad_norm": "gradient norm before the clip",
    "tokens_per_sec": "tokens/s",
}
HOW = "pip install 'fullstride[plot]'"


def run_plot(config: PlotConfig) -> Path:
    """Draw runs, several over one another, into one PNG; returns its path. Raises ConfigError for what is no run, and
    without matplotlib."""
    runs = {}
    for name in config.runs:
        path = Path(name)
        if not (path / "metrics.csv").is_file():
            raise ConfigError(f"runs: no metrics.csv in {path}; give run directories, such as runs/NAME")
        if not read_metrics(path / "metrics.csv"):
            raise ConfigError(f"runs: {path} has no update yet; wait for the first one")
        runs[_label(path, config.runs)] = path
    out = Path(config.out) if config.out else Path(config.runs[0]) / "plot.png"
    try:
        figure = _figure(2, 2, (13, 8))
    except ImportError:
        raise ConfigError(f"plots need matplotlib: {HOW}") from None
    for axes, (column, title) in zip(figure.axes, PANELS.items(), strict=True):
        for label, path in runs.items():
            _draw(axes, path, column, label if len(runs) > 1 else "", None)
        axes.set(xlabel="update", ylabel=title)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    _save(figure, out)
    return out


def plot_loss(run: Path, eval_loss_before: float | None = None) -> Path | None:
    """Draw the losses in `run`/metrics.csv into `run`/loss.png, with the evaluation before the first update at 0.

    None, with one line that says how to get it, without matplotlib.
    """
    try:
        figure = _figure(1, 1, (8, 4.5))
    except ImportError:
        print(f"loss.png is left out: {HOW} for plots")
        return None
    (axes,) = figure.axes
    _draw(axes, run, "loss", "", eval_loss_before)
    axes.set(xlabel="update", ylabel=PANELS["loss"])
    axes.legend()
    file = run / "loss.png"
    _save(figure, file)
    return file


def _label(path: Path, others: Sequence[str]) -> str:
    """A run's name; its whole path where two have the same."""
    names = [Path(other).resolve().name for other in others]
    return str(path) if names.count(path.resolve().name) > 1 else path.resolve().name


def _figure(rows: int, columns: int, size: tuple[float, float]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    for number in range(rows * columns):
        axes = figure.add_subplot(rows, columns, number + 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    return figure


def _draw(axes: Any, run: Path, column: str, label: str, eval_loss_before: float | None) -> None:
    """One column of a run's metrics, and with the loss the evaluations. label: "" for the only run."""
    rows = [row for row in read_metrics(run / "metrics.csv") if row[column]]
    name = label or ("training" if column == "loss" else "")
    (line,) = axes.plot([int(r["step"]) for r in rows], [float(r[column]) for r in rows], label=name or None)
    if column != "loss":
        return
    evaluated = [(int(r["step"]), float(r["eval_loss"])) for r in rows if r["eval_loss"]]
    if eval_loss_before is None:
        first = [e["loss"] for e in read_events(run / "log.jsonl") if e["event"] == "evaluation" and e["step"] == 0]
        eval_loss_before = first[0] if first else None
    if eval_loss_before is not None:
        evaluated.insert(0, (0, eval_loss_before))
    if evaluated:
        colour = {"color": line.get_color(), "linestyle": "--"} if label else {}
        name = f"{label}, evaluation" if label else "evaluation"
        axes.plot(*zip(*evaluated, strict=True), marker="o", label=name, **colour)


def _save(figure: Any, file: Path) -> None:
    import io

    png = io.BytesIO()
    figure.savefig(png, dpi=120, format="png")
    replace_bytes(file, png.getvalue())


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
