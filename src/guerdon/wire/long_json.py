"""Reads a long JSON text in pieces, so that no other thread waits long for the interpreter.

A decoder holds the GIL until it is done: 10 MB of ids take 0.1 s, of nested lists ten times as long. Here it gets
about `PIECE` bytes at once: some elements of a list, or some pairs of an object. The decoder checks each piece;
only the brackets, commas and colons between pieces are read here.
"""

from __future__ import annotations

import functools
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np

from guerdon.errors import InvalidRequest

T = TypeVar("T")

PIECE = 1 << 17
"""Most bytes that are decoded at once, but for strings: 10 ms of the densest JSON."""

MAX_STRING_BYTES = 1 << 26
"""Longest string: its parts are copied into one at once."""

_MAX_PAIRS_BYTES = 4 * PIECE
"""Longest text of an object without its long values: they are decoded at once."""

_PART = 1 << 18
"""Bytes of a string that are decoded at once."""

_MAX_DEPTH = 80
_MAX_SCALAR_BYTES = 5000
_SHORT = 100
_SPACE = b" \t\n\r"
_SCALAR = re.compile(rb"[^\s,:\[\]{}\"]+")
_WHOLE = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])))*+"
)
"""A part of a string that ends after an escape sequence, or after the second one of a surrogate pair."""

_SPECIAL = (b'"', b"[", b"]", b"{", b"}")
_STEPS = np.zeros(256, np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1

Explain = Callable[[msgspec.ValidationError, bytes, Any, str, int], InvalidRequest]
"""Returns the error of a text that is not of a type: of the decoder's error, the text, the type, the text's path, and
the number of the list's element that comes first in it."""


class Malformed(Exception):
    """The text is not valid JSON, or too much of it can only be read at once."""


class _Read(typing.NamedTuple):
    """A value, the position after it, and a short JSON text of the same type."""

    value: Any
    end: int
    stub: bytes


def read(text: bytes | bytearray | memoryview, kind: Any, explain: Explain) -> Any:
    """Returns the JSON as a value of the type `kind`; raises Malformed, and what `explain` returns.

    A field of the type `msgspec.Raw` gets a short value of the same kind.
    """
    reader = _Reader(memoryview(text), explain)
    made = reader.value(0, kind, "", 0)
    end = reader.skip_space(made.end)
    if end < len(text):
        raise Malformed(f"more follows its end (byte {end})")
    return made.value


class _Reader:
    def __init__(self, text: memoryview, explain: Explain) -> None:
        self._text = text
        self._explain = explain

    def value(self, at: int, hint: Any, path: str, depth: int) -> _Read:
        """Reads the value that begins at or after the position."""
        at = self.skip_space(at)
        first = self._bytes(at, at + 1)
        if first in (b"[", b"{"):
            if depth == _MAX_DEPTH:
                raise Malformed(f"it is nested too deep (byte {at})")
            return (self._list if first == b"[" else self._object)(at + 1, hint, path, depth + 1)
        if first == b'"':
            end = self._end_of_string(at)
            if end - at > _PART:
                made = self._decode(b'"a"', hint, path, at)
                text = "".join(self._parts_of_string(at + 1, end - 1, path))
                return _Read(made if hint is msgspec.Raw else text, end, b'"a"')
            stub = b'"a"'
        else:
            found = _SCALAR.match(self._bytes(at, at + _MAX_SCALAR_BYTES))
            if found is None:
                raise Malformed(f"a value is missing or cut off (byte {at})")
            end, stub = at + found.end(), found[0]
        return _Read(self._decode(self._bytes(at, end), hint, path, at), end, stub)

    def skip_space(self, at: int) -> int:
        """Returns the position of the next byte that is not white space."""
        while block := self._bytes(at, at + PIECE):
            if rest := len(block.lstrip(_SPACE)):
                return at + len(block) - rest
            at += len(block)
        return at

    def _list(self, at: int, hint: Any, path: str, depth: int) -> _Read:
        item, most = _item_of(hint)
        values: list[Any] = []

        def add_short(start: int, end: int) -> None:
            text = b"[%s]" % self._bytes(start, end)
            if not (made := self._decode(text, list[item], path, start, len(values))):  # type: ignore[valid-type]
                raise Malformed(f"a value is missing (byte {start})")
            add(made)

        def add_long(start: int) -> int:
            read = self.value(start, item, f"{path}[{len(values)}]", depth)
            add([read.value])
            return read.end

        def add(made: list[Any]) -> None:
            if item is not msgspec.Raw:
                values.extend(made)
            if len(values) > most:
                raise InvalidRequest(f"{path.removeprefix('.')} has more than {most:,} entries; send fewer")

        end = self._walk(at, b"]", add_short, add_long)
        if item is msgspec.Raw:
            return _Read(msgspec.Raw(b"[]"), end, b"[]")
        stub = msgspec.json.encode(_shortened(values))
        self._decode(stub, hint, path, at)  # a list, and of any length, may be wrong there
        return _Read(values, end, stub)

    def _object(self, at: int, hint: Any, path: str, depth: int) -> _Read:
        pairs: list[bytes] = []
        with_stubs: list[bytes] = []
        values: dict[str, Any] = {}

        def add_short(start: int, end: int) -> None:
            pairs.append(self._bytes(start, end))
            with_stubs.append(pairs[-1])
            if sum(map(len, pairs)) > _MAX_PAIRS_BYTES:
                raise Malformed(f"an object has more than {_MAX_PAIRS_BYTES:,} bytes of short values (byte {at})")

        def add_long(start: int) -> int:
            if self._bytes(start, start + 1) != b'"':
                raise Malformed(f"a key is missing or cut off (byte {start})")
            key_end = self._end_of_string(start)
            colon = self.skip_space(key_end)
            if self._bytes(colon, colon + 1) != b":":
                raise Malformed(f"a colon is missing (byte {colon})")
            key = self._decode(self._bytes(start, key_end), str, path, start)
            if key in values:
                raise Malformed(f"it has the key {key!r} twice")
            read = self.value(colon + 1, _type_of(hint, key), f"{path}.{key}", depth)
            values[key] = read.value
            with_stubs.append(self._bytes(start, key_end) + b":" + read.stub)
            return read.end

        end = self._walk(at, b"}", add_short, add_long)
        made = self._decode(b"{%s}" % b",".join(with_stubs), hint, path, at)
        if values:
            others = self._decode(b"{%s}" % b",".join(pairs), dict[str, msgspec.Raw], path, at)
            if twice := values.keys() & others.keys():
                raise Malformed(f"it has the key {min(twice)!r} twice")
            _fill(made, values)
        return _Read(made, end, b"{}" if hint is msgspec.Raw else msgspec.json.encode(_shortened(made)))

    def _walk(self, at: int, closer: bytes, short: Callable[[int, int], None], long: Callable[[int], int]) -> int:
        """Reads a list or object from after its bracket on; returns its end.

        Calls `short` with the span of several short elements or pairs, and `long` with the start of a long one, which
        returns its end.
        """
        is_first = True
        while True:
            at = self.skip_space(at)
            length = _length_of_short(self._bytes(at, at + PIECE))
            if length is None:
                at = self.skip_space(long(at))
            elif length:
                short(at, at + length)
                at += length
            elif not is_first or self._bytes(at, at + 1) != closer:
                raise Malformed(f"a value is missing (byte {at})")
            mark = self._bytes(at, at + 1)
            if mark == closer:
                return at + 1
            if mark != b",":
                raise Malformed(f"a comma or {closer.decode()} is missing (byte {at})")
            at, is_first = at + 1, False

    def _end_of_string(self, at: int) -> int:
        """Returns the position after the string that begins there."""
        first = at = at + 1
        while block := self._bytes(at, at + PIECE):
            found = (clean := _without_escapes(block)).find(b'"')
            if found >= 0:
                return at + found + 1
            at += len(block) - clean.endswith(b"\\")
            if at - first > MAX_STRING_BYTES:
                raise Malformed(f"a string has more than {MAX_STRING_BYTES >> 20} MiB (byte {first})")
            if len(block) < PIECE:
                break
        raise Malformed(f"a string is cut off (byte {first})")

    def _parts_of_string(self, at: int, end: int, path: str) -> Iterator[str]:
        """Yields the string between two quotes, about _PART bytes at a time."""
        while at < end:
            stop = end
            if end - at > _PART:
                found = _WHOLE.match(self._bytes(at, at + _PART))
                stop = at + (found.end() if found else 0)
                while stop > at and self._text[stop] & 0xC0 == 0x80:  # within a character of UTF-8
                    stop -= 1
            if stop == at:
                raise Malformed(f"a string has an invalid escape sequence (byte {at})")
            yield self._decode(b'"%s"' % self._bytes(at, stop), str, path, at)
            at = stop

    def _bytes(self, start: int, end: int) -> bytes:
        return bytes(self._text[start:end])

    def _decode(self, text: bytes, hint: Any, path: str, at: int, first: int = 0) -> Any:
        try:
            return decoder(hint).decode(text)
        except msgspec.ValidationError as e:
            raise self._explain(e, text, hint, path, first) from e
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            why = "it is nested too deep" if isinstance(e, RecursionError) else e
            raise Malformed(f"{why} (in the part from byte {at} on)") from e


@functools.cache
def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Returns the decoder of the type."""
    return msgspec.json.Decoder(kind)


def _without_escapes(block: bytes) -> bytes:
    """Returns the text with other characters in place of escaped quotes and backslashes."""
    return block.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in block else block


def _length_of_short(block: bytes) -> int | None:
    """Returns the length of the elements that end in the block, which begins with an element of a list or object.

    Behind them is a comma, or the end of the list or object. None if the first element does not end in the block.
    """
    if not any(mark in block for mark in _SPECIAL):
        found = block.rfind(b",")
        return None if found < 0 else found
    block = _without_escapes(block)
    text = np.frombuffer(block, np.uint8)
    steps, commas = _STEPS[text], text == ord(",")
    if b'"' in block:
        is_outside = np.cumsum(text == ord('"'), dtype=np.uint8) & 1 == 0
        steps *= is_outside
        commas &= is_outside
    levels = np.cumsum(steps, dtype=np.int32)
    ends = levels < 0
    if ends.any():
        return int(ends.argmax())
    commas &= levels == 0
    return int(len(commas) - 1 - commas[::-1].argmax()) if commas.any() else None


def _shortened(value: Any) -> Any:
    """Returns a short value of the same type, which is decoded with the object that it stands in."""
    match value:
        case list():
            return [_shortened(inner) for inner in value[:1]]
        case dict():
            return {}
        case str():
            return value if len(value) < _SHORT else "a"
        case msgspec.Struct():
            pairs = ((f.encode_name, getattr(value, f.name)) for f in msgspec.structs.fields(value))
            return {name: _shortened(inner) for name, inner in pairs if inner is not msgspec.UNSET}
    return value


def _fill(made: Any, values: dict[str, Any]) -> None:
    """Puts the long values in the place of the short ones that were decoded with the object."""
    if isinstance(made, dict):
        made.update(values)
    elif isinstance(made, msgspec.Struct):
        for field in msgspec.structs.fields(made):
            if field.encode_name in values:
                setattr(made, field.name, values[field.encode_name])


def options(hint: Any) -> Iterator[tuple[Any, int]]:
    """Yields the types of a union, or the type itself, without annotations; with the longest length that a list has."""
    most = sys.maxsize
    while typing.get_origin(hint) is typing.Annotated:
        for meta in hint.__metadata__:
            most = min(most, getattr(meta, "max_length", None) or most)
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for inner in typing.get_args(hint):
            yield from ((bare, min(most, limit)) for bare, limit in options(inner))
    else:
        yield hint, most


@functools.cache
def _item_of(hint: Any) -> tuple[Any, int]:
    """Returns the type of a list's elements, and how many it may have; Any if there is no list of that type."""
    if hint is msgspec.Raw:
        return hint, 0
    lists = ((bare, most) for bare, most in options(hint) if typing.get_origin(bare) is list)
    bare, most = next(lists, (list[Any], sys.maxsize))
    return typing.get_args(bare)[0], most


@functools.cache
def _type_of(hint: Any, key: str) -> Any:
    """Returns the type of an object's value; Raw, which is not kept, if a struct does not have it."""
    for bare, _ in options(hint):
        if typing.get_origin(bare) is dict:
            return typing.get_args(bare)[1]
        if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
            return next((f.type for f in msgspec.structs.fields(bare) if f.encode_name == key), msgspec.Raw)
    return msgspec.Raw if hint is msgspec.Raw else Any
