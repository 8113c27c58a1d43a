"""Keys of a body that no field takes: one that misspells a field is refused, others are ignored with a line in the log.

A peer's clients may send keys that change nothing here, and a newer client keys that no version knew. So the names are
compared only if there are any: bodies are first read as structs that take no other key.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import logging
import operator
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from guerdon.errors import InvalidRequest
from guerdon.wire import bodies, long_json
from guerdon.wire.bodies import Octets, shown

T = TypeVar("T", bound=msgspec.Struct)

_NEAR = 0.9
"""Least similarity of a key to the field that it misspells; `skip_special_tokens` is less like `add_special_tokens`."""

_SHORTEST, _LONGEST = 6, 40
"""Characters of keys that are compared: `top_p` is no misspelt `top_k`."""

_MOST_KEYS = 256
_MOST_LINES = 100

_log = logging.getLogger(__name__)
_said: set[tuple[str, str]] = set()


class _Unknown(NamedTuple):
    key: str
    known: list[str]
    where: str


def read(body: Octets, kind: type[T], what: str = "the body") -> T:
    """Returns the JSON as a struct, as `bodies.read` does; raises InvalidRequest also for a key that misspells one."""
    try:
        return bodies.read(body, _strict(kind), what)
    except bodies.UnknownKey:
        made = bodies.read(body, kind, what)
        for unknown in itertools.islice(_find(bodies.parse(body, what), kind, ""), _MOST_KEYS):
            _refuse_or_say(unknown, kind, what)
        return made


def _refuse_or_say(unknown: _Unknown, kind: type[msgspec.Struct], what: str) -> None:
    key, where = unknown.key, unknown.where or what
    if _SHORTEST <= len(key) <= _LONGEST:
        known = [name for name in unknown.known if len(name) >= _SHORTEST]
        if near := difflib.get_close_matches(key, known, 1, _NEAR):
            raise InvalidRequest(f"{where} has the unknown key {key!r}; did you mean {near[0]}?")
    line = kind.__name__, key
    if line not in _said and len(_said) < _MOST_LINES:
        _said.add(line)
        _log.warning("%s of a request has the unknown key %s, which is ignored", where, shown(key))


def _find(value: Any, hint: Any, where: str) -> Iterator[_Unknown]:
    """Yields the keys in a value of that type that its structs do not have."""
    if _strict_hint(hint) is hint:  # no structs
        return
    for bare, _ in long_json.options(hint):
        if isinstance(value, list) and typing.get_origin(bare) is list:
            for i, inner in enumerate(value):
                yield from _find(inner, typing.get_args(bare)[0], f"{where}[{i}]")
        elif isinstance(value, dict) and isinstance(bare, type) and issubclass(bare, msgspec.Struct):
            fields = {field.encode_name: field.type for field in msgspec.structs.fields(bare)}
            yield from (_Unknown(key, [*fields], where) for key in value if key not in fields)
            for key, kind in fields.items():
                if key in value:
                    yield from _find(value[key], kind, f"{where}.{key}".removeprefix("."))


@functools.cache
def _strict(kind: type[T]) -> type[T]:
    """Returns the struct so that it takes no other keys, nor do the structs in its fields."""
    changed = []
    for field in msgspec.structs.fields(kind):
        if (hint := _strict_hint(field.type)) is not field.type:
            given: dict[str, Any] = {"default": field.default, "default_factory": field.default_factory}
            changed.append((field.name, hint, msgspec.field(**given, name=field.encode_name)))
    made: Any = msgspec.defstruct(
        kind.__name__,
        changed,
        bases=(kind,),
        namespace={"__doc__": kind.__doc__, "__module__": kind.__module__},
        forbid_unknown_fields=True,
        kw_only=True,
    )
    return typing.cast(type[T], made)


def _strict_hint(hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _strict(hint)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin not in (typing.Annotated, typing.Union, types.UnionType, list):
        return hint
    first, *others = inner if origin is not typing.Annotated else inner[:1]
    strict = [_strict_hint(one) for one in (first, *others)]
    if all(new is old for new, old in zip(strict, inner, strict=False)):
        return hint
    if origin is typing.Annotated:
        return typing.Annotated[(strict[0], *inner[1:])]
    return list[strict[0]] if origin is list else functools.reduce(operator.or_, strict)  # type: ignore[valid-type]
