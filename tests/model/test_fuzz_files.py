"""Damaged model and adapter files: a result or one ConfigError, whatever was changed; nothing large is allocated."""

from __future__ import annotations

import json
import resource
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.run.conftest import TINY, make_model

from fullstride import Options, Trainer
from fullstride.engine.weights_io import ADAPTER_WEIGHTS
from fullstride.errors import ConfigError
from fullstride.model.lora import read_peft_config

FILES = ["model.safetensors", "config.json", f"adapter/{ADAPTER_WEIGHTS}", "adapter/adapter_config.json"]
NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.lists(st.integers(-3, 2**63), max_size=3))
VALUES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=6), st.just({}))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and an adapter inside it."""
    directory = make_model(tmp_path_factory.mktemp("good") / "model")
    options = Options(device="cpu", method="lora", lora_rank=2)
    with Trainer.from_pretrained(directory, options, batch_size=1, seq_len=8) as trainer:
        trainer.export_adapter(directory / "adapter")
    return directory


@pytest.fixture(scope="module")
def trainer(good: Path):
    options = Options(device="cpu", method="lora", lora_rank=2)
    with Trainer(TINY, options, batch_size=1, seq_len=8) as trainer:
        yield trainer


def damage(data: st.DataObject, file: Path) -> None:
    content = bytearray(file.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "field"]))
    if kind == "field":
        is_json = file.suffix == ".json"
        length = 0 if is_json else struct.unpack("<Q", content[:8])[0]
        text = content if is_json else content[8 : 8 + length]
        tree = json.loads(text)
        name = data.draw(st.sampled_from(sorted(tree)))
        inner = tree[name] if isinstance(tree[name], dict) and tree[name] and data.draw(st.booleans()) else tree
        inner[name if inner is tree else data.draw(st.sampled_from(sorted(inner)))] = data.draw(VALUES)
        changed = json.dumps(tree).encode()
        content = bytearray(changed if is_json else struct.pack("<Q", len(changed)) + changed + content[8 + length :])
    else:
        at = data.draw(st.integers(0, min(len(content) - 1, 3000)))  # where the header is
        if kind == "flip":
            content[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del content[at:]
        else:
            content[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    file.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", f"adapter/{ADAPTER_WEIGHTS}", "adapter/adapter_config.json"]
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_end_in_one_message(
    name: str, good: Path, trainer: Trainer, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("fuzz") / "model"
    shutil.copytree(good, directory)
    damage(data, directory / name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        if name.startswith("adapter"):
            read_peft_config(directory / "adapter")
            trainer.import_adapter(directory / "adapter")
        else:
            trainer.import_weights(directory)
    except ConfigError as error:
        assert str(directory) in str(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
    shutil.rmtree(directory)
