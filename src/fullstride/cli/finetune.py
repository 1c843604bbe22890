"""`fullstride finetune`."""

from fullstride.config.training import FinetuneConfig as Config

SUMMARY = "supervised fine-tuning (LoRA or full) on chat, prompt/completion or meeting rows"
POSITIONAL = ()


def run(config: Config) -> int:
    """Fine-tune; raises ConfigError for what cannot be run, KeyboardInterrupt when stopped (state saved)."""
    from fullstride.run.finetune import run_finetune

    run_finetune(config)
    return 0
