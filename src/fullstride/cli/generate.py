"""`fullstride generate`."""

from fullstride.config.commands import GenerateConfig as Config

SUMMARY = "text from a model directory, with an adapter if given"
POSITIONAL = ()


def run(config: Config) -> int:
    """Generate to standard output; the rate goes to standard error."""
    from fullstride.run.generate import generate

    generate(config)
    return 0
