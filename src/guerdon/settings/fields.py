"""What a setting is: a field of a dataclass with its help text and bounds, from YAML or a flag to its value."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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


class Mistakes:
    """Collects what is wrong with settings, so that all of it is told at once."""

    def __init__(self) -> None:
        self._found: list[tuple[str, ConfigError, str]] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, error: ConfigError, place: str = "", brief: str | None = None) -> None:
        """Keeps the error; `place` is where in a file the setting stands, `brief` its help among others."""
        self._found.append((f"{place}: " if place else "", error, brief or error.help))

    @contextmanager
    def noted(self, place: str = "") -> Iterator[None]:
        """Keeps the ConfigError that is raised within."""
        try:
            yield
        except ConfigError as e:
            self.add(e, place)

    def raise_all(self) -> None:
        """Raises the one mistake, or one ConfigError whose notes are all of them; nothing if there is none."""
        if len(self._found) == 1:
            ((place, error, _),) = self._found
            raise ConfigError(f"{place}{error}", error.help) from error.__cause__
        if self._found:
            together = ConfigError(f"{len(self._found)} settings are wrong", "correct each of those above")
            for place, error, brief in self._found:
                together.add_note(f"{place}{error}; {brief}")
            raise together


def from_mapping(cls: type, data: Any, where: str = "") -> Any:
    """Builds the dataclass `cls` from parsed YAML.

    Raises one ConfigError that lists every unknown key and every value that is mistyped or, in a file, out of bounds.
    """
    mistakes = Mistakes()
    built = _built(cls, data, where, mistakes)
    mistakes.raise_all()
    return built


def _built(cls: type, data: Any, where: str, mistakes: Mistakes, place: str = "") -> Any:
    """The dataclass as far as `data` can be read; what cannot be read is among the mistakes."""
    if not isinstance(data, dict):
        found = f"{where or 'the file'} must be a mapping, not {type(data).__name__}"
        mistakes.add(ConfigError(found, "write `key: value` lines"), place)
        return None
    hints, known = typing.get_type_hints(cls), {f.name: f.metadata for f in dataclasses.fields(cls)}
    values = {}
    for key, value in data.items():
        path, place = f"{where}{'.' if where else ''}{key}", getattr(data, "places", {}).get(key, place)
        if key not in known:
            near = nearest(str(key), known)
            meant = f"did you mean {near}?" if near else ""
            every = f"known here: {', '.join(sorted(known))}"
            mistakes.add(ConfigError(f"unknown setting {path}", f"{meant} {every}".lstrip()), place, brief=meant)
            continue
        with mistakes.noted(place):
            given = None if value == "auto" and known[key]["auto"] else value
            values[key] = _value(hints[key], given, path, mistakes, place)
            if place:  # `check` tells of the others; it knows no lines
                check_bounds(values[key], known[key], path)
    return cls(**values)


def _value(hint: Any, value: Any, where: str, mistakes: Mistakes, place: str) -> Any:
    """As `convert`; mistakes within sections and lists of sections are noted, each where it stands."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union) and value is not None:
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _built(hint, value, where, mistakes, place)
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is list and dataclasses.is_dataclass(parts[0]) and isinstance(value, list):
        cls = typing.cast(type, parts[0])
        return [_built(cls, part, f"{where}[{i}]", mistakes, place) for i, part in enumerate(value)]
    return convert(hint, value, where)


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Returns what was probably meant by a misspelt word; None if nothing is near."""
    return next(iter(difflib.get_close_matches(word, list(words), 1)), None)


def check_bounds(value: Any, bounds: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for a number, or a number in a list, that is not finite or out of its setting's bounds."""
    numbers = value if isinstance(value, list) else [value]
    if not all(math.isfinite(x) for x in numbers if isinstance(x, float)):
        raise ConfigError(f"{where} is {value}", "give a finite number")
    least, most, above = bounds["least"], bounds["most"], bounds["above"]
    if value is not None and least is not None and value < least:
        raise ConfigError(f"{where} is {value}", f"give at least {least:g}")
    if value is not None and above is not None and value <= above:
        raise ConfigError(f"{where} is {value:g}", f"give a number above {above:g}")
    if value is not None and most is not None and value > most:
        raise ConfigError(f"{where} is {value}", f"give at most {most:.0f}")


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
