"""Datasets of the Hub, through the `datasets` library (extra `hub`)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from fullstride.data.readers import HubSplit
from fullstride.errors import ConfigError

NO_IDS = (".jsonl", ".json", ".parquet", ".gz", ".zst", ".txt", ".csv")  # endings of files


@dataclass(frozen=True)
class HubName:
    """`owner/name`, `owner/name:configuration`, `owner/name@revision`, or both in this order."""

    id: str
    configuration: str = ""
    revision: str = ""

    @staticmethod
    def parse(name: str) -> HubName | None:
        """What `name` says; None if it is no id."""
        found = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([\w.+-]+))?(?:@([\w./+-]+))?", name)
        if found is None or name.startswith((".", "~")) or Path(found[1]).suffix.lower() in NO_IDS:
            return None
        return HubName(found[1], found[2] or "", found[3] or "")

    def __str__(self) -> str:
        configuration = f":{self.configuration}" if self.configuration else ""
        return self.id + configuration + (f"@{self.revision}" if self.revision else "")


def load_splits(dataset: HubName, key: str) -> dict[str, HubSplit]:
    """The splits of a dataset by name; HF_TOKEN is used. Raises ConfigError, which names `key`."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"{key}={dataset} is not a path here; as a Hub dataset it needs the extra hub: "
            "pip install 'fullstride[hub]'"
        ) from error
    asked = {"name": dataset.configuration} if dataset.configuration else {}
    asked |= {"revision": dataset.revision} if dataset.revision else {}
    try:
        loaded = datasets.load_dataset(dataset.id, **asked, token=os.environ.get("HF_TOKEN"))
    except Exception as error:  # a whole family of HTTP, network and format errors, which differ between releases
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{key}: cannot load Hub dataset {dataset}: {reason}; {_remedy(dataset, reason, error)}"
        ) from error
    return {split: HubSplit(f"{dataset}/{split}", rows) for split, rows in loaded.items()}


def _remedy(dataset: HubName, reason: str, error: Exception) -> str:
    if re.search(r"\bconfigs?\b|BuilderConfig", reason) and isinstance(error, ValueError):
        return f"choose one of them: {dataset.id}:CONFIGURATION"
    if re.search(r"gated|authenticat|\b40[13]\b|private", reason, re.IGNORECASE):
        return "ask for access on its page, and set HF_TOKEN to a token that has it"
    if isinstance(error, ConnectionError) or re.search(r"connect|offline|reach|resolve", reason, re.IGNORECASE):
        return "there is no network: name files that are here, or try again with one"
    return "check the name, the network and HF_TOKEN"
