"""A setting: a dataclass field with a help text and bounds, read from YAML or a flag."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
    """Makes a dataclass field with the text that `--help` and the documentation show, and the bounds of its values.

    `least` and `most` are inclusive, `above` is not. With `auto`, users may write that word for a value that is chosen
    at startup; the field is then None. A dataclass as the default makes a section of its settings.
    """
    metadata = {"help": help, "flag": flag, "auto": auto, "least": least, "most": most, "above": above}
    if isinstance(default, list | dict | type):
        factory = default if isinstance(default, type) else default.copy
        return dataclasses.field(metadata=metadata, default_factory=factory)
    return dataclasses.field(metadata=metadata, default=default)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Returns a field's default, made by its factory if it has one."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def kinds_of(hint: Any) -> dict[str, Any]:
    """Returns the dataclasses of a union by their `kind`, the default one first; empty for any other type."""
    kinds = [arg for arg in typing.get_args(hint) if dataclasses.is_dataclass(arg)]
    return {typing.get_args(typing.get_type_hints(kind)["kind"])[0]: kind for kind in kinds} if len(kinds) > 1 else {}


def without_none(hint: Any) -> Any:
    """Returns the type `X` of an optional `X | None`, and any other type as it is."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


class Text(str):
    """A scalar of a YAML file whose scalars are read as they are written: `yes` is not true there."""

    __slots__ = ()


class Located(dict[Any, Any]):
    """A mapping of a YAML file; `places` has the file and line of each key."""

    places: Mapping[Any, str] = {}


class Mistakes:
    """Collects the problems of settings, so that users see all of them at once."""

    def __init__(self) -> None:
        self._found: list[tuple[str, str, str]] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, problem: str, help: str, place: str = "", brief: str = "") -> None:  # noqa: A002 - as above
        """Adds a mistake; `place` is its file and line, `brief` replaces its help if there are several mistakes."""
        self._found.append((f"{place}: {problem}" if place else problem, help, brief or help))

    @contextmanager
    def collected(self, place: str = "") -> Iterator[None]:
        """Adds the ConfigError that is raised within the context."""
        try:
            yield
        except ConfigError as e:
            self.add(str(e), e.help, place)

    def raise_all(self) -> None:
        """Raises a ConfigError for the only mistake, or one with all of them as its notes, if there is one."""
        if len(self._found) == 1:
            raise ConfigError(*self._found[0][:2])
        if self._found:
            together = ConfigError(f"{len(self._found)} settings are wrong", "correct each of those above")
            for problem, _, brief in self._found:
                together.add_note(f"{problem}; {brief}")
            raise together


Contradictions = Iterator[tuple[str, str]]
"""Problems of settings that are each within their bounds, without the path of their section, each with advice."""


def caught(check: Callable[..., object], *given: Any) -> Contradictions:
    """Yields the ConfigError that the check raises, if it raises one."""
    try:
        check(*given)
    except ConfigError as e:
        yield str(e), e.help


def from_mapping(cls: type, data: Any, where: str = "") -> Any:
    """Builds the dataclass `cls` from parsed YAML.

    Raises one ConfigError that lists every unknown key, every value of a wrong type and, if the data come from a file,
    every value out of bounds.
    """
    mistakes = Mistakes()
    built = _build(cls, data, where, mistakes, "")
    mistakes.raise_all()
    return built


def _build(cls: type, data: Any, where: str, mistakes: Mistakes, place: str) -> Any:
    if not isinstance(data, dict):
        problem = f"{where or 'the file'} must be a mapping, not {type(data).__name__}"
        mistakes.add(problem, "write `key: value` lines", place)
        return None
    for name, prefix in getattr(cls, "switches", {}).items():  # a mapping in a switch's place turns it on
        if isinstance(more := data.get(name), dict):
            places = getattr(data, "places", {})
            data = Located({**data, name: True, **{f"{prefix}{key}": one for key, one in more.items()}})
            data.places = places
    hints, known = typing.get_type_hints(cls), {field.name: field.metadata for field in dataclasses.fields(cls)}
    values = {}
    for key, value in data.items():
        path, place = f"{where}{'.' if where else ''}{key}", getattr(data, "places", {}).get(key, place)
        if key not in known:
            near = nearest(str(key), known)
            meant = f"did you mean {near}?" if near else ""
            every = f"{meant} known here: {', '.join(sorted(known))}".lstrip()
            mistakes.add(f"unknown setting {path}", every, place, brief=meant)
            continue
        given = None if value == "auto" and known[key]["auto"] else value
        with mistakes.collected(place):
            values[key] = _convert(hints[key], given, path, mistakes, place)
            if place:  # values from Python have no place: `check_settings` checks them
                check_bounds(values[key], known[key], path)
    return cls(**values)


def _convert(hint: Any, value: Any, where: str, mistakes: Mistakes, place: str) -> Any:
    """Returns the value as one of the type `hint`; adds the mistakes in sections, raises those in other values."""
    if kinds := kinds_of(hint):
        kind = value.get("kind", next(iter(kinds))) if isinstance(value, dict) else next(iter(kinds))
        if not isinstance(kind, str) or kind not in kinds:
            raise ConfigError(f"{where}.kind is {kind!r}", f"choose one of {', '.join(kinds)}")
        hint = kinds[kind]
    inner = without_none(hint)
    if value is None and inner is not hint:
        return None
    if isinstance(value, Text):
        is_number = inner is float and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,2})?", value)
        value = float(value) if is_number else str(value)
    if dataclasses.is_dataclass(inner):
        if isinstance(value, str) and (key := getattr(inner, "shorthand", "")):
            value = {key: value}
        return _build(typing.cast(type, inner), value, where, mistakes, place)
    if typing.get_origin(inner) is list:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list", "write `- item` lines or [a, b]")
        (item,) = typing.get_args(inner)
        return [_convert(item, v, f"{where}[{i}]", mistakes, place) for i, v in enumerate(value)]
    if typing.get_origin(inner) is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be a mapping, not {type(value).__name__}", "write `key: value` lines")
        for key in value:
            if isinstance(key, bool):
                raise ConfigError(
                    f"{where} has the key {key}", "write it in quotes: YAML reads yes, no, on and off as that"
                )
        item = typing.get_args(inner)[1]
        return {str(key): _convert(item, v, f"{where}.{key}", mistakes, place) for key, v in value.items()}
    if inner is Any:
        return value
    if typing.get_origin(inner) is Literal:
        check_choice(inner, value, where)
        return value
    # YAML 1.1 reads 9e-6 as text, because it has no decimal point.
    if inner is float and isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    if inner is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if inner is str and isinstance(value, (bool, int, float)):
        raise ConfigError(f"{where} is {value!r}, not text", "write it in quotes: YAML reads 1:30:00 as a number, too")
    if not isinstance(value, inner) or (inner is not bool and isinstance(value, bool)):
        raise ConfigError(f"{where} is {value!r}", f"give a value of type {inner.__name__}")
    return value


def check_choice(hint: Any, value: Any, where: str) -> None:
    """Raises ConfigError if the Literal `hint` does not list the value."""
    choices = typing.get_args(hint)
    if value not in choices:
        raise ConfigError(f"{where} is {value!r}", f"choose one of {', '.join(map(str, choices))}")


def check_bounds(value: Any, bounds: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for a number, perhaps in a list or mapping, that is not finite, or out of its bounds."""
    numbers = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    if not all(math.isfinite(x) for x in numbers if isinstance(x, float)):
        raise ConfigError(f"{where} is {value}", "give a finite number")
    least, most, above = bounds["least"], bounds["most"], bounds["above"]
    if value is not None and least is not None and value < least:
        raise ConfigError(f"{where} is {value}", f"give at least {least:g}")
    if value is not None and above is not None and value <= above:
        raise ConfigError(f"{where} is {value:g}", f"give a number above {above:g}")
    if value is not None and most is not None and value > most:
        raise ConfigError(f"{where} is {value}", f"give at most {most:.0f}")


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Returns the known word that `word` abbreviates or misspells (`lr`: learning_rate); None if none is close."""
    known = list(words)
    abbreviated = [name for name in known if "_" in name and "".join(part[:1] for part in name.split("_")) == word]
    return next(iter(abbreviated or difflib.get_close_matches(word, known, 1)), None)


def check_settings(settings: Any, where: str = "") -> None:
    """Raises ConfigError for every setting of the dataclass that is out of its bounds or contradicts another.

    `where` is the path of the section that holds the settings, with a trailing point. A class finds
    contradictions between its fields by a method `contradictions`.
    """
    mistakes = Mistakes()
    collect_mistakes(settings, where, mistakes)
    mistakes.raise_all()


def collect_mistakes(settings: Any, where: str, mistakes: Mistakes) -> bool:
    """Adds the problems that `check_settings` raises; returns whether all values are within their bounds."""
    hints, num_own, are_sections_fine = typing.get_type_hints(type(settings)), 0, True
    for field in dataclasses.fields(settings):
        value, path = getattr(settings, field.name), where + field.name
        items = [(f"{path}[{i}]", item) for i, item in enumerate(value)] if isinstance(value, list) else [(path, value)]
        for within, item in items:
            if dataclasses.is_dataclass(item):
                are_sections_fine &= collect_mistakes(item, f"{within}.", mistakes)
        num_before = len(mistakes)
        with mistakes.collected():
            if typing.get_origin(hints[field.name]) is Literal:
                check_choice(hints[field.name], value, path)
            check_bounds(value, field.metadata, path)
        num_own += len(mistakes) - num_before
    if num_own:  # contradictions may follow from them
        return False
    for cls in reversed(type(settings).__mro__):
        if "contradictions" in vars(cls):
            for problem, advice in vars(cls)["contradictions"](settings):
                mistakes.add(where + problem, advice)
    return are_sections_fine
