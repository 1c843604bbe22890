"""The machinery behind keys: one for TOML, flags and Python.

A key is a field of a frozen dataclass made by `key`. `check_fields` checks types, choices and bounds at construction,
`parse` reads `[RUN.toml] [--key value ...]` into any such dataclass, `dump_toml` writes one back.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import math
import operator
import os
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from fullstride.errors import ConfigError, UsageError

Config = TypeVar("Config")

BOUNDS = (
    ("at_least", operator.ge, "at least"),
    ("above", operator.gt, "above"),
    ("at_most", operator.le, "at most"),
    ("below", operator.lt, "below"),
)


def key(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    now: Sequence[Any] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    required: bool = False,
    may_change: bool = False,
    instead_of: str = "",
) -> Any:
    """A dataclass field that is a key.

    `choices` are its legal values ("" stays legal as "automatic" when it is the default), `now` those that work in
    this version, `at_least`, `above`, `at_most` and `below` are bounds, `may_change` says that a resumed run may differ
    in it, `instead_of` names a key that a flag for this one replaces in the file.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "help": help,
            "choices": tuple(choices),
            "now": tuple(now),
            "at_least": at_least,
            "above": above,
            "at_most": at_most,
            "below": below,
            "required": required,
            "may_change": may_change,
            "instead_of": instead_of,
        },
    )


def dashed(name: str) -> str:
    """A key as the command line and TOML spell it."""
    return name.replace("_", "-")


def nearest(name: str, names: Iterable[str]) -> str:
    """The one of `names` that is most like `name`."""
    return difflib.get_close_matches(name, list(names), n=1, cutoff=0.0)[0]


def fields_of(config: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a configuration (class or instance): its own first, then those of the classes that it extends."""
    cls = config if isinstance(config, type) else type(config)
    order = [name for c in cls.__mro__ for name in inspect.get_annotations(c)]
    return sorted(dataclasses.fields(config), key=lambda f: order.index(f.name))


def check_fields(config: Any) -> None:
    """Check type, choices, bounds and what works now for every field; lists become tuples. For `__post_init__`."""
    hints = _types(type(config))
    for f in dataclasses.fields(config):
        if (value := getattr(config, f.name)) is None and f.default is None:
            continue
        value = _typed(f.name, value, hints[f.name])
        object.__setattr__(config, f.name, value)
        if "help" in f.metadata:
            _check_value(f, value)


def _types(cls: type) -> dict[str, Any]:
    """What a given value of each field is; None beside it, which a value can not be, stands for automatic."""
    hints = typing.get_type_hints(cls)
    return {
        name: typing.get_args(hint)[0] if NoneType in typing.get_args(hint) else hint for name, hint in hints.items()
    }


def _check_value(f: dataclasses.Field[Any], value: Any) -> None:
    name, known = dashed(f.name), f.metadata
    for item in value if isinstance(value, tuple) else (value,):
        if known["choices"] and item not in known["choices"] and not (item == "" and f.default == ""):
            raise UsageError(
                f"{name} must be {'among' if isinstance(value, tuple) else 'one of'} {', '.join(known['choices'])}; "
                f"got {item!r} (nearest: {nearest(str(item), known['choices'])})"
            )
    for bound, holds, words in BOUNDS:
        if known[bound] is not None and not holds(value, known[bound]):
            raise UsageError(
                f"{name} must be {words} {known[bound]}, got {value}; leave it out for {_default(f) or 'automatic'}"
            )
    if known["now"] and value not in known["now"]:
        works = f"{name} = {_shown(known['now'][-1])}" if known["now"][-1] != () else f"to leave {name} out"
        raise UsageError(f"{name} = {_shown(value)} does not work yet; what works now is {works}")


def _default(f: dataclasses.Field[Any]) -> str:
    """A key's default as its user writes it; "" where it is automatic."""
    automatic = not f.default and ("automatic" in f.metadata["help"] or f.default in ("", (), None))
    return "" if automatic else _shown(f.default)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed(name: str, value: Any, hint: Any) -> Any:
    """`value` (from Python or TOML) as the field's type, or UsageError."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a number of NumPy or torch
        value = value.item()
    if isinstance(value, os.PathLike) and hint is str:
        value = os.fspath(value)
    if isinstance(value, str) and not _is_text(value):
        raise UsageError(f"{dashed(name)} must be text without zero bytes and broken characters, got {value!a}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if hint is float and _is_finite(value):
            return float(value)
        if hint in (int, int | str) and isinstance(value, int):
            return value
    if hint == int | str and isinstance(value, str):
        return int(value) if value.isdecimal() else value
    if hint == tuple[str, ...]:
        if isinstance(value, str):
            value = [item.strip() for item in value.split(",") if item.strip()]
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
    if hint in (bool, str) and isinstance(value, hint):
        return value
    raise UsageError(f"{dashed(name)} must be {_expected(hint)}, got {value!r}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _is_text(value: str) -> bool:
    """Whether files can have this name and hold it: no zero byte, no half of a surrogate pair (bytes not in UTF-8)."""
    return not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value)


def _expected(hint: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
    return names.get(hint, "a comma-separated list" if hint == tuple[str, ...] else "a whole number or a word")


BOOLEANS = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}


def _from_text(name: str, text: str, hint: Any) -> Any:
    """The value of a flag."""
    try:
        if hint is bool:
            return BOOLEANS[text.lower()]
        return hint(text) if hint in (int, float) else _typed(name, text, hint)
    except (KeyError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{dashed(name)} must be {_expected(hint)}, got {text!r}") from None


def _known(cls: type, name: str) -> str:
    """The field that `name` (dashes or underscores) means, or UsageError with the nearest."""
    names = [f.name for f in dataclasses.fields(cls)]
    if (field := name.replace("-", "_")) not in names:
        raise UsageError(f"unknown key {name!r}; the nearest is {dashed(nearest(field, names))!r}")
    return field


def build(cls: type[Config], values: Mapping[str, Any]) -> Config:
    """`cls` from a mapping of keys (dashes or underscores). Raises UsageError for unknown or missing ones."""
    known = {_known(cls, name): value for name, value in values.items()}
    config = cls(**known)
    for f in fields_of(cls):
        if f.metadata.get("required") and not getattr(config, f.name):
            raise UsageError(f"{dashed(f.name)} is missing; give --{dashed(f.name)} ({f.metadata['help']})")
    return config


def read_toml(file: Path) -> dict[str, Any]:
    """The keys of a TOML file; tables are for the reader only and vanish. Raises ConfigError, UsageError."""
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; what comes first is a RUN.toml, keys begin with --")
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid TOML ({error})") from None
    values: dict[str, Any] = {}

    def flatten(table: dict[str, Any]) -> None:
        for name, value in table.items():
            if isinstance(value, dict):
                flatten(value)
            elif (field := name.replace("-", "_")) in values:
                raise UsageError(f"{file}: {name} is given twice; keep one")
            else:
                values[field] = value

    flatten(tree)
    return values


def parse(cls: type[Config], argv: Sequence[str], positional: Sequence[str] = ()) -> Config:
    """`cls` from `[RUN.toml] [--key value ...]`; flags win over the file. `positional` keys may come without a name."""
    file, flags = None, _read_flags(cls, argv, positional)
    if "" in flags:
        file = Path(flags.pop(""))
    values = {_known(cls, name): value for name, value in (read_toml(file) if file else {}).items()}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        other = f.metadata.get("instead_of")
        if other and f.name in flags and other not in flags:
            values.pop(other, None)
    return build(cls, {**values, **flags})


def _read_flags(cls: type, argv: Sequence[str], positional: Sequence[str]) -> dict[str, Any]:
    """Values by field name; the TOML file, if one is named, under ""."""
    hints = _types(cls)
    flags: dict[str, Any] = {}
    words, unnamed = list(argv), list(positional)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            if word.endswith(".toml") and not flags:
                name = ""
            elif unnamed and hints[unnamed[0]] == tuple[str, ...]:  # takes all words that follow
                name, word = unnamed[0], (*flags.pop(unnamed[0], ()), word)
            elif unnamed:
                name = unnamed.pop(0)
            else:
                raise UsageError(f"unexpected {word!r}; after an optional RUN.toml come --key value pairs")
            value: Any = word
        else:
            name, has_value, text = word[2:].partition("=")
            plain, names = name.replace("-", "_"), [f.name for f in dataclasses.fields(cls)]
            if plain not in names and plain.startswith("no_") and hints.get(plain[3:]) is bool and not has_value:
                name, value = plain[3:], False
            else:
                name = _known(cls, name)
                if not has_value:
                    follows = bool(words) and not words[0].startswith("--")
                    # a word that nothing else could be is a wrong value of the switch before it
                    if hints[name] is bool and not (follows and (words[0].lower() in BOOLEANS or not unnamed)):
                        text = "true"
                    elif not follows:
                        raise UsageError(f"--{dashed(name)} needs a value: {_expected(hints[name])}")
                    else:
                        text = words.pop(0)
                value = _from_text(name, text, hints[name])
        if name in flags:
            raise UsageError(f"{dashed(name) or 'RUN.toml'} is given twice; give it once (lists are comma-separated)")
        flags[name] = value
    return flags


def help_text(cls: type, command: str, summary: str, positional: Sequence[str] = ()) -> str:
    """What `fullstride COMMAND --help` prints: every key with its meaning and default."""
    usage = " ".join([f"fullstride {command}", "[RUN.toml]", *(f"[{dashed(p).upper()}]" for p in positional)])
    lines = [f"usage: {usage} [--key value ...]", "", summary, "", "keys (in RUN.toml without the dashes):"]
    for f in fields_of(cls):
        known = f.metadata
        meaning = known["help"] + (f" [{' | '.join(known['choices'])}]" if known["choices"] else "")
        default = f" (default {_default(f)})" if _default(f) else ""
        default += " (other values come later)" if known["now"] else ""
        lines.append(f"  --{dashed(f.name):<18} {meaning}{' (required)' if known['required'] else default}")
    return "\n".join(lines)


def dump_toml(config: Any) -> str:
    """`config` as TOML that `parse` reads back to an equal one: what is None is left out."""

    def literal(value: Any) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int | float):
            return repr(value)
        if isinstance(value, tuple):
            return f"[{', '.join(literal(item) for item in value)}]"
        # JSON's escapes are TOML's too, but TOML wants DEL escaped as well
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

    values = {dashed(f.name): getattr(config, f.name) for f in fields_of(config)}
    return "".join(f"{name} = {literal(value)}\n" for name, value in values.items() if value is not None)
