"""`fullstride tokenize`."""

from fullstride.config.commands import TokenizeConfig as Config

SUMMARY = "text or JSONL -> a token file for `train`"
POSITIONAL = ("data",)


def run(config: Config) -> int:
    """Tokenise; raises ConfigError for what cannot be tokenised."""
    from fullstride.run.tokenize import run_tokenize

    run_tokenize(config)
    return 0
