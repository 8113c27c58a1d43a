"""JSON bodies: reads them into typed structs with helpful errors, writes them, and bounds their memory."""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import operator
import re
import reprlib
import typing
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import orjson

from guerdon.errors import InvalidRequest
from guerdon.wire import long_json

T = TypeVar("T")

Octets = bytes | bytearray | memoryview

MAX_VALUES = 1 << 22
"""Most values in the JSON of one body: these take 256 MiB."""

MAX_CONTAINERS = 1 << 19
"""Most lists and objects in the JSON of one body: a collection of Python's garbage looks at each of them, 0.1 s."""

MAX_DEPTH = 64
"""Deepest nesting of a value that the server keeps: Python's own recursion stops at about a thousand."""

BLOCK = 1 << 16
"""Minimum size of a streamed piece, in bytes."""

AT_ONCE = 1 << 16
"""Values that C code takes at once: it holds the GIL meanwhile, for a few milliseconds."""

MAX_ROWS = 1 << 20
"""Most samples in one body, whatever the server's own limit: each takes much more memory than its bytes."""

_MAX_TEXT = 2000
_VALUE_BYTES = 64
_UNKNOWN = "unknown field `"
_MANY_NUMBERS = 1 << 10
_NUMBERS_AT_ONCE = 1 << 14
_COUNTED_BYTES = 1 << 18
_CONTAINERS = frozenset((list, dict))
_PROBLEM = re.compile(r"(?P<problem>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]")
_SHOWN = reprlib.Repr()
_SHOWN.maxlist = _SHOWN.maxlevel = 16
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 100


class UnknownKey(InvalidRequest):
    """An object has a key that its struct does not take."""


class InPieces(NamedTuple):
    """A body that is made while it is sent; its size if it is known, and its JSON's length if binary tensors follow."""

    pieces: Iterator[bytes | memoryview]
    num_bytes: int | None = None
    json_length: int | None = None


class Written:
    """A value whose JSON is made piece by piece, once, while it is sent; only `write_in_pieces` writes it."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = pieces

    @classmethod
    def in_base64(cls, data: memoryview) -> Written:
        """Returns a string of the bytes as base64."""
        return cls(
            itertools.chain([b'"'], (base64.b64encode(data[some]) for some in slices(len(data), 3 * AT_ONCE)), [b'"'])
        )

    @classmethod
    def array(cls, numbers: np.ndarray) -> Written:
        """Returns numpy's numbers as nested lists."""
        return cls(_array_pieces(numbers))


def read(body: Octets, kind: type[T], what: str = "the body") -> T:
    """Returns the JSON as a value of the type `kind`, such as a msgspec struct.

    Raises InvalidRequest, which names the invalid key and index, the value's type, and the expected ones. Never holds
    the interpreter for long, and so belongs into a thread if the body is long.
    """
    if is_long := len(body) > long_json.PIECE:
        check_values([body], what)

    def explain(error: msgspec.ValidationError, text: Any, node: Any, path: str = "", first: int = 0) -> InvalidRequest:
        kind_of_error = UnknownKey if _UNKNOWN in str(error) else InvalidRequest
        return kind_of_error(_explain(str(error), msgspec.json.decode(text), node, what, path, first))

    try:
        try:
            made = (
                long_json.read(body, kind, explain)
                if is_long
                else long_json.decoder(typing.cast(Hashable, kind)).decode(body)
            )
        except msgspec.ValidationError as e:
            raise explain(e, body, kind) from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, long_json.Malformed) as e:
        why = "it is nested too deep" if isinstance(e, RecursionError) else e
        raise InvalidRequest(f"{what} is not valid JSON: {why}") from e
    return typing.cast(T, made)


def parse(body: Octets, what: str = "the body") -> Any:
    """Returns the JSON as plain values; raises InvalidRequest."""
    return read(body, typing.cast(type[Any], Any), what)


def convert(value: Mapping[str, Any], kind: type[T], what: str) -> T:
    """Returns plain values, such as a URL's query, as a struct; raises InvalidRequest as `read` does."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        raise InvalidRequest(f"{what}: " * (" - at `$" in str(e)) + _explain(str(e), value, kind, what)) from e


def write(value: Any) -> bytes:
    """Returns the value as JSON; structs, and numpy's numbers in the fewest digits, included."""
    return _ENCODER.encode(value)


def write_in_pieces(value: Any) -> Iterator[bytes]:
    """Yields the output of `write` lazily, in blocks of about BLOCK bytes."""
    found: list[Written] = []

    def hook(inner: Any) -> msgspec.Raw:
        if isinstance(inner, np.ndarray) and inner.size > _MANY_NUMBERS:
            inner = Written.array(inner)
        if not isinstance(inner, Written):
            return _numpy(inner)
        found.append(inner)
        return msgspec.Raw(b"\0")  # strings have it only escaped

    first, *others = msgspec.json.Encoder(enc_hook=hook).encode(value).split(b"\0")
    late = (itertools.chain(inner.pieces, [text]) for inner, text in zip(found, others, strict=True))
    return _in_blocks(itertools.chain([first], itertools.chain.from_iterable(late)))


def check_values(texts: Sequence[Octets], what: str) -> None:
    """Raises InvalidRequest if the JSON texts have more than MAX_VALUES values, or MAX_CONTAINERS, together."""
    if sum(map(len, texts)) <= MAX_CONTAINERS:  # shorter texts cannot have so many
        return
    num_values = num_containers = 0
    for count in (_Marks.near, _Marks.of):  # most texts have few marks, also if those within strings count
        marks = sum(map(count, texts), _Marks())
        num_values, num_containers = marks.num_values, marks.lists + marks.objects
        if num_values <= MAX_VALUES and num_containers <= MAX_CONTAINERS:
            return
    most = f"{MAX_VALUES:,} values" if num_values > MAX_VALUES else f"{MAX_CONTAINERS:,} lists and objects"
    raise InvalidRequest(f"{what} has more than {most} as JSON; send tensors in binary form, or fewer samples")


def digest(value: Any) -> str:
    """Returns a digest of a value that JSON may have; equal values in equal order have the same."""
    return hashlib.sha256(repr(value).encode("utf-8", "backslashreplace")).hexdigest()


def check_depth(value: Any, what: str) -> None:
    """Raises InvalidRequest if the value is nested deeper than MAX_DEPTH."""
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(MAX_DEPTH):
        all_values = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [inner for values in all_values for inner in values if type(inner) in _CONTAINERS]
        if not level:
            return
    raise InvalidRequest(too_deep(what))


def too_deep(what: str) -> str:
    """Returns the error's text for a value that is nested too deep."""
    return f"{what} is nested deeper than {MAX_DEPTH} lists and objects; send it flatter"


def check_count(count: int, what: str) -> None:
    """Raises InvalidRequest if there are more than MAX_ROWS samples or texts."""
    if count > MAX_ROWS:
        raise InvalidRequest(f"{what} has {count:,} entries, at most {MAX_ROWS:,} are accepted; send fewer")


def num_values(text: Octets) -> int:
    """Returns an upper bound of the number of values in the JSON; an object counts as four, a list as two.

    Marks inside strings, which may be JSON again, do not count.
    """
    return _Marks.of(text).num_values


def memory(body: Octets) -> int:
    """Estimates the peak bytes of memory that parsing the body as JSON takes."""
    count = _Marks.near(body).num_values
    return len(body) + _VALUE_BYTES * (count if count <= MAX_VALUES else num_values(body))


def to_array(values: Sequence[Any], dtype: Any) -> np.ndarray:
    """Returns the numbers as an array; converts some at a time, since numpy holds the GIL meanwhile."""
    made = np.empty(len(values), dtype)
    for some in slices(len(values)):
        made[some] = np.array(values[some], dtype)
    return made


def to_ids(row: list[int]) -> np.ndarray:
    """Returns token ids as an int64 array."""
    return to_array(row, np.int64)


def kinds_of(values: Sequence[Any]) -> set[type]:
    """Returns the types of the values."""
    return {kind for some in slices(len(values)) for kind in {*map(type, values[some])}}


def slices(count: int, size: int = AT_ONCE) -> Iterator[slice]:
    """Yields slices that cover so many values."""
    return (slice(start, start + size) for start in range(0, count, size))


def shown(value: Any) -> str:
    """Returns the value as an error shows it, long and deep ones abridged."""
    return _SHOWN.repr(value)


def cut(text: str) -> str:
    """Returns an error's text, cut if it is long: some quote the request."""
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " ..."


def kind_of(value: Any) -> str:
    """Returns JSON's name for the value's type, with its article."""
    kinds = {list: "a list", str: "a string", bool: "a boolean", type(None): "null", dict: "an object"}
    return kinds.get(type(value), "a number")


def is_true(parameters: Mapping[str, Any], name: str, default: bool, where: str) -> bool:
    """Returns a parameter that is true or false, or left out; raises InvalidRequest for anything else."""
    value = parameters.get(name)
    if not isinstance(value, bool | None):
        raise InvalidRequest(f"{where}.{name} is {kind_of(value)}; send true or false")
    return default if value is None else value


class _Marks(NamedTuple):
    """How many commas, lists and objects a JSON text has."""

    commas: int = 0
    lists: int = 0
    objects: int = 0

    @property
    def num_values(self) -> int:
        return self.commas + 2 * self.lists + 4 * self.objects

    def __add__(self, other: Any) -> _Marks:
        return _Marks(*map(operator.add, self, other))

    @classmethod
    def near(cls, text: Octets) -> _Marks:
        """Counts those within strings as well; fast."""
        found = cls()
        for start in range(0, len(text), _COUNTED_BYTES):
            block = bytes(text[start : start + _COUNTED_BYTES])
            found += cls(block.count(b","), block.count(b"["), block.count(b"{"))
        return found

    @classmethod
    def of(cls, text: Octets) -> _Marks:
        """Counts those outside of strings."""
        found, is_inside, escape = cls(), 0, b""
        for start in range(0, len(text), _COUNTED_BYTES):
            block = escape + bytes(text[start : start + _COUNTED_BYTES])
            block = block.replace(b"\\\\", b"").replace(b'\\"', b"")
            escape = b"\\" if block.endswith(b"\\") else b""  # it escapes the next block's first byte
            marks = np.frombuffer(block, np.uint8)
            inside = (np.cumsum(marks == ord('"'), dtype=np.uint8) + np.uint8(is_inside)) & 1
            found += cls.near(marks[inside == 0].tobytes())
            is_inside = int(inside[-1]) if len(inside) else is_inside
        return found


def _in_blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    block = bytearray()
    for piece in pieces:
        block += piece
        if len(block) >= BLOCK:
            yield bytes(block)
            block.clear()
    yield bytes(block)


def _array_pieces(numbers: np.ndarray) -> Iterator[bytes]:
    """Yields the JSON of the array; of those that are wide at most one row at once."""
    yield b"["
    width = math.prod(numbers.shape[1:])
    is_wide = width > 2 * _NUMBERS_AT_ONCE
    for some in slices(len(numbers), max(1, _NUMBERS_AT_ONCE // max(1, width))):
        if some.start:
            yield b","
        if is_wide:
            yield from _array_pieces(numbers[some.start])
        else:
            yield orjson.dumps(np.ascontiguousarray(numbers[some]), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
    yield b"]"


def _numpy(value: Any) -> msgspec.Raw:
    """Writes numpy's numbers as orjson does: float32 in the shortest form that round-trips."""
    return msgspec.Raw(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))


_ENCODER = msgspec.json.Encoder(enc_hook=_numpy)


# --- errors --------------------------------------------------------------------------------------------------------


def _explain(message: str, value: Any, kind: Any, what: str, path: str = "", first: int = 0) -> str:
    """Rewords msgspec's `message` about `value`, which is not a `kind`: adds the value found, and what to send.

    `value` stands at the path, of a list those from the element `first` on.
    """
    found = _PROBLEM.fullmatch(message)
    assert found is not None
    problem, node = found["problem"], msgspec.inspect.type_info(kind)
    for step in _STEP.finditer(found["path"] or ""):
        key: str | int = step["key"] or int(step["index"])
        path, first = path + (f".{key}" if isinstance(key, str) else f"[{key + first}]"), 0
        node, value = _inner(node, key), value[key]
    subject = path.removeprefix(".") or what
    if name := re.search(r"missing required field `(.*)`", problem):
        return f"{subject} has no {name[1]!r}; send {_wanted(node)}"
    if name := re.search(_UNKNOWN + "(.*)`", problem):
        known = ", ".join(field.encode_name for field in _member(node, msgspec.inspect.StructType).fields)
        return f"{subject} has the unknown key {name[1]!r}; it takes {known or 'none'}"
    if problem.startswith("Expected `array` of length") and isinstance(value, list):
        if not value:
            return f"{subject} is an empty list; send {_wanted(node)}"
        limit = _member(node, msgspec.inspect.ListType).max_length
        return f"{subject} has {len(value):,} entries, at most {limit:,} are accepted; send fewer"
    if value == "":
        return f"{subject} is empty; send {_wanted(node)}"
    is_near = problem.startswith(("Invalid enum value", "Expected `str` matching")) or type(value) in (int, float)
    return f"{subject} is {shown(value) if is_near else kind_of(value)}; send {_wanted(node)}"


def _members(node: Any) -> tuple[Any, ...]:
    """The types of a union, or the type itself, without annotations."""
    while isinstance(node, msgspec.inspect.Metadata):
        node = node.type
    if isinstance(node, msgspec.inspect.UnionType):
        return tuple(inner for member in node.types for inner in _members(member))
    return (node,)


def _member(node: Any, kind: type[T]) -> T:
    return next(member for member in _members(node) if isinstance(member, kind))


def _inner(node: Any, key: str | int) -> Any:
    """The type at the key or index."""
    for member in _members(node):
        if isinstance(member, msgspec.inspect.ListType) and isinstance(key, int):
            return member.item_type
        if isinstance(member, msgspec.inspect.StructType):
            for field in member.fields:
                if field.encode_name == key:
                    return field.type
    return msgspec.inspect.AnyType()


def _wanted(node: Any) -> str:
    """What to send for the type: its description, else a phrase for it."""
    if isinstance(node, msgspec.inspect.Metadata):
        return (node.extra_json_schema or {}).get("description") or _wanted(node.type)
    if isinstance(node, msgspec.inspect.UnionType):
        words = [_wanted(inner) for inner in node.types if not isinstance(inner, msgspec.inspect.NoneType)]
        return ", or ".join(words + ["leave it out"] * (len(words) < len(node.types)))
    if isinstance(node, msgspec.inspect.LiteralType):
        return " or ".join(map(str, node.values))
    if isinstance(node, msgspec.inspect.StructType):
        example = getattr(node.cls, "example", None)
        return f"an object such as {example}" if example else "an object"
    if isinstance(node, msgspec.inspect.IntType):
        return "a whole number" + (f" from {node.ge} up" if node.ge in (0, 1) else "")
    words_of: dict[type, str] = {
        msgspec.inspect.StrType: "a string",
        msgspec.inspect.BoolType: "true or false",
        msgspec.inspect.FloatType: "a number",
        msgspec.inspect.ListType: "a list",
    }
    return words_of.get(type(node), "an object")
