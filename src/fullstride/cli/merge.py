"""`fullstride merge`."""

from fullstride.config.commands import MergeConfig as Config

SUMMARY = "base model + adapter -> Hugging Face directory"
POSITIONAL = ("model", "adapter", "out")


def run(config: Config) -> int:
    """Merge; raises ConfigError for what cannot be, and then nothing is left behind."""
    from fullstride.run.merge import run_merge

    print(f"written: {run_merge(config)}")
    return 0
