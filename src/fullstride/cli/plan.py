"""`fullstride plan`."""

from fullstride.config.commands import PlanConfig as Config

SUMMARY = "memory and pipeline schedule of a run, without a GPU"
POSITIONAL = ("model",)


def run(config: Config) -> int:
    """Print what a run would take; raises ConfigError for what cannot be run."""
    from fullstride.run.plan import run_plan

    run_plan(config)
    return 0
