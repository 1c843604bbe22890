"""The errors that a user can cause. Each message states the rule, what came, and what to do instead."""


class ConfigError(ValueError):
    """A setting, model or file that fullstride cannot work with. Commands print it as one line and exit 1."""


class UsageError(ConfigError):
    """A key or value that does not exist or contradicts another. Commands print it as one line and exit 2."""


class OutOfMemory(ConfigError, MemoryError):
    """A device that cannot hold what a run needs. Commands print it as one line and exit 1."""

    rank = 0  # whose device


class DataError(ConfigError):
    """Rows that cannot be trained on. Commands print it as one line and exit 1."""


class WorkerError(RuntimeError):
    """A rank that failed: its traceback, or the signal that ended it. All other ranks have been stopped."""

    def __init__(self, rank: int, story: str) -> None:
        super().__init__(f"rank {rank} {story}")
        self.rank = rank
