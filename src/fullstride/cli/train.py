"""`fullstride train`."""

from fullstride.config.training import TrainConfig as Config

SUMMARY = "pre-training, or continued training, on token files"
POSITIONAL = ()


def run(config: Config) -> int:
    """Train; raises ConfigError for what cannot be run, KeyboardInterrupt when stopped (state saved)."""
    from fullstride.run.train import run_train

    run_train(config)
    return 0
