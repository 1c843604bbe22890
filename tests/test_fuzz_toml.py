"""Damaged run files: a configuration or one ConfigError."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fullstride.config.keys import dump_toml, parse
from fullstride.config.training import FinetuneConfig, TrainConfig
from fullstride.errors import ConfigError

VALUES = [
    "-1",
    "0",
    "1e999",
    "nan",
    '"x"',
    '""',
    "true",
    "[]",
    '["a", 1]',
    "{}",
    "9" * 40,
    "1979-05-27",
    "[[1]]",
    "'''",
]


@pytest.mark.parametrize("cls", [FinetuneConfig, TrainConfig])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_run_files_end_in_one_message(
    cls: type[FinetuneConfig], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    text = dump_toml(cls(model="m", data="d")).encode()
    kind = data.draw(st.sampled_from(["value", "flip", "cut", "insert", "twice"]))
    lines = text.split(b"\n")
    number = data.draw(st.integers(0, len(lines) - 2))
    at = data.draw(st.integers(0, len(text) - 1))
    if kind == "value":
        name = lines[number].split(b" = ")[0]
        lines[number] = name + b" = " + data.draw(st.sampled_from(VALUES)).encode()
        text = b"\n".join(lines)
    elif kind == "twice":
        text = b"\n".join([*lines[: number + 1], *lines[number:]])
    elif kind == "flip":
        text = text[:at] + bytes([text[at] ^ data.draw(st.integers(1, 255))]) + text[at + 1 :]
    elif kind == "cut":
        text = text[:at]
    else:
        text = text[:at] + data.draw(st.binary(min_size=1, max_size=6)) + text[at:]
    file: Path = tmp_path_factory.mktemp("toml") / "run.toml"
    file.write_bytes(text)
    try:
        assert isinstance(parse(cls, [str(file)]), cls)
    except ConfigError as error:
        assert len(str(error).splitlines()) >= 1 and str(error)
