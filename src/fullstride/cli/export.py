"""`fullstride export`."""

from fullstride.config.commands import ExportConfig as Config

SUMMARY = "checkpoint -> Hugging Face directory or PEFT adapter"
POSITIONAL = ("run", "out")


def run(config: Config) -> int:
    """Export; raises ConfigError for what cannot be, and then nothing is left behind."""
    from fullstride.run.export import run_export

    print(f"written: {run_export(config)}")
    return 0
