"""What a setting is: a field of a dataclass with its help text and bounds, from YAML or a flag to its value."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from dataclasses import field
from typing import Any, Literal

from guerdon.errors import ConfigError


def setting(
    default: Any,
    help: str,  # noqa: A002 - the word argparse uses
    *,
    flag: bool = True,
    auto: bool = False,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
) -> Any:
    """A dataclass field with the help text that `--help` and the documentation show, and the bounds of its values.

    `least` and `most` are allowed themselves, `above` is not. Where `auto`, that word may be written for a value that
    is found out at start; the field is then None.
    """
    factory = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    metadata = {"help": help, "flag": flag, "auto": auto, "least": least, "most": most, "above": above}
    return field(metadata=metadata, **factory)


def section(cls: type, help: str) -> Any:  # noqa: A002 - as above
    """A dataclass field that holds settings of the dataclass `cls`, of which a part may be given."""
    metadata = {"help": help, "flag": False, "auto": False, "least": None, "most": None, "above": None}
    return field(metadata=metadata, default_factory=cls)


def from_mapping(cls: type, data: Any, where: str = "") -> Any:
    """Builds the dataclass `cls` from parsed YAML; raises ConfigError naming the key that is unknown or mistyped."""
    if not isinstance(data, dict):
        raise ConfigError(
            f"{where or 'the file'} must be a mapping, not {type(data).__name__}", "write `key: value` lines"
        )
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(data) - set(hints), key=str)
    if unknown:
        raise ConfigError(
            f"unknown setting {where}{'.' if where else ''}{unknown[0]}", f"known here: {', '.join(sorted(hints))}"
        )
    automatic = {f.name for f in dataclasses.fields(cls) if f.metadata["auto"]}
    given = {k: None if v == "auto" and k in automatic else v for k, v in data.items()}
    return cls(**{k: convert(hints[k], v, f"{where}{'.' if where else ''}{k}") for k, v in given.items()})


def convert(hint: Any, value: Any, where: str) -> Any:
    """The value as one of the type `hint`; raises ConfigError, which names it by its path `where`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else convert(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where} is {value!r}", f"choose one of {', '.join(map(str, args))}")
        return value
    if origin is list:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list", "write `- item` lines or [a, b]")
        return [convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(value)]
    if dataclasses.is_dataclass(hint):
        return from_mapping(typing.cast(type, hint), value, where)
    # YAML 1.1 reads 9e-6 as text: there a number has a point.
    if hint is float and isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, (bool, int, float)):
        raise ConfigError(
            f"{where} is {value!r}, and not text", "write it in quotes: YAML reads 1:30:00 as a number, too"
        )
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise ConfigError(f"{where} is {value!r}", f"give a value of type {hint.__name__}")
    return value
