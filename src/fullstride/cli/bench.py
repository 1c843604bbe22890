"""`fullstride bench`."""

from fullstride.config.commands import BenchConfig as Config

SUMMARY = "measured training speed of a configuration on this machine, with random weights and data"
POSITIONAL = ("model",)


def run(config: Config) -> int:
    """Measure and print a table; raises ConfigError when the training does not train."""
    if config.strategies:
        from fullstride.run.strategies import compare_strategies

        compare_strategies(config)
    else:
        from fullstride.run.bench import run_bench

        run_bench(config)
    return 0
