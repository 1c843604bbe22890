"""`fullstride plot`."""

from fullstride.config.commands import PlotConfig as Config

SUMMARY = "run directories -> one PNG: loss, rate, gradient norm, tokens/s"
POSITIONAL = ("runs",)


def run(config: Config) -> int:
    """Draw; raises ConfigError for what is no run."""
    from fullstride.run.plot import run_plot

    print(f"written: {run_plot(config)}")
    return 0
