"""Tensors of the open inference protocol and the requests that carry them: datatypes, raw bytes to numpy and back."""

from __future__ import annotations

import struct
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from guerdon.errors import InvalidRequest, Unsupported
from guerdon.wire.bodies import AT_ONCE, MAX_ROWS, check_count, kinds_of, shown, slices, to_array

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{n}": np.dtype(f"<u{n // 8}") for n in (8, 16, 32, 64)},
    **{f"INT{n}": np.dtype(f"<i{n // 8}") for n in (8, 16, 32, 64)},
    **{f"FP{n}": np.dtype(f"<f{n // 8}") for n in (16, 32, 64)},
    "BF16": np.dtype("<f4"),
}
"""numpy's type of each numeric datatype. numpy lacks BF16, which is float32 here, or uint16 of its bits."""

_DATATYPES = {dtype: name for name, dtype in DTYPES.items() if name != "BF16"}
_ELEMENTS: dict[str, set[type]] = {"BYTES": {str}, "b": {bool}, "i": {int}, "u": {int}, "f": {int, float, type(None)}}
"""Types of JSON's elements by numpy's kind."""

_INTEGERS = ("INT64", "INT32")
_FLOATS = ("FP32", "FP64", "FP16", "BF16")

MAX_WRITTEN = 1 << 24
"""Most numbers of one output in JSON."""

MAX_RANK = 16
MAX_DIMENSION = 2**62
"""Most dimensions of a tensor, and the bound that each is below."""


@dataclass(slots=True, eq=False)
class Tensor:
    """A named tensor; `data` is a numpy array of `shape`, or for BYTES the flat list of its elements in row order."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: np.ndarray | list[bytes]

    @classmethod
    def of(cls, name: str, data: np.ndarray) -> Tensor:
        """Returns the tensor of a numeric array."""
        return cls(name, _DATATYPES[data.dtype], data.shape, data)

    @classmethod
    def of_texts(cls, name: str, texts: list[str]) -> Tensor:
        """Returns a BYTES `[B, 1]` tensor of UTF-8 texts."""
        return cls(name, "BYTES", (len(texts), 1), [text.encode() for text in texts])


@dataclass(slots=True, eq=False)
class InferRequest:
    """One inference request in the protocol's own terms.

    `outputs` maps each requested output to whether it is wanted in binary form; None asks for the model's usual
    ones in the form `binary_default`. A request whose whole body is one raw tensor has an input of empty name.
    """

    inputs: dict[str, Tensor]
    outputs: dict[str, bool] | None = None
    id: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    binary_default: bool = False

    @property
    def timeout_s(self) -> float | None:
        """The parameter `timeout`, which is in microseconds; None if it sets no limit."""
        if "timeout" not in self.parameters:
            return None
        return self.count("timeout") / 1e6 or None

    def count(self, name: str) -> int:
        """Returns the parameter as a whole number from 0 up, 0 if it is missing; raises InvalidRequest."""
        value = self.parameters.get(name, 0)
        if type(value) is not int or not 0 <= value < 2**63:
            raise InvalidRequest(f"parameter '{name}' is {shown(value)}; it must be a whole number from 0 up")
        return value


@dataclass(slots=True, eq=False)
class InferReply:
    """One inference reply in the protocol's own terms."""

    model_name: str
    model_version: str
    outputs: list[Tensor]
    id: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)


def from_raw(name: str, datatype: str, shape: tuple[int, ...], raw: bytes | memoryview) -> Tensor:
    """Returns the tensor in `raw` (little-endian, row-major): a view if it is aligned, else a copy.

    Raises InvalidRequest if the datatype is unknown, or the bytes do not fit the shape.
    """
    if datatype == "BYTES":
        return Tensor(name, datatype, shape, _split_bytes(name, prod(shape), raw))
    dtype = DTYPES.get(datatype)
    if dtype is None:
        raise _unknown(name, datatype)
    itemsize = 2 if datatype == "BF16" else dtype.itemsize
    if len(raw) != prod(shape) * itemsize:
        raise InvalidRequest(
            f"input '{name}': {datatype} {list(shape)} takes {prod(shape) * itemsize} bytes, but {len(raw)} came"
        )
    if datatype == "BF16":
        data = from_bits(np.frombuffer(raw, "<u2"))
    else:
        data = np.frombuffer(raw, dtype)
    if not data.flags.aligned:
        data = data.copy()
    return Tensor(name, datatype, shape, data.reshape(shape) if len(data) else _reshape(name, data, shape))


def from_json(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> Tensor:
    """Returns the tensor whose elements are JSON's `data`, flat or nested in row order.

    Raises InvalidRequest if the datatype is unknown, an element is of another type, or their number is not the shape's.
    """
    is_text = datatype == "BYTES"
    if not is_text and datatype not in DTYPES:
        raise _unknown(name, datatype)
    kind = "BYTES" if is_text else DTYPES[datatype].kind
    elements, kinds = _flat(name, data)
    if len(elements) != prod(shape):
        raise InvalidRequest(count_differs(name, shape, len(elements)))
    # Checked before numpy sees them: one text among numbers would make texts of all, each as wide as the longest.
    if not kinds <= _ELEMENTS[kind]:
        raise InvalidRequest(f"input '{name}': data holds something that is not {'a string' if is_text else datatype}")
    if is_text:
        check_count(len(elements), f"input '{name}'")
        return Tensor(name, datatype, shape, [element.encode() for element in elements])
    try:  # in float64, None becomes NaN
        array = _integers(elements) if kind in "iu" else to_array(elements, np.float64 if kind == "f" else np.bool_)
    except OverflowError as e:
        raise InvalidRequest(f"input '{name}': data holds a whole number that is too large for {datatype}") from e
    return from_numbers(name, datatype, shape, array)


def from_numbers(name: str, datatype: str, shape: tuple[int, ...], array: np.ndarray) -> Tensor:
    """Returns the tensor of the array's numbers; raises InvalidRequest if their count or type does not fit."""
    dtype = DTYPES[datatype]
    if array.size != prod(shape):
        raise InvalidRequest(count_differs(name, shape, array.size))
    if dtype.kind in "iu" and array.size:
        if array.dtype.kind not in "iu":
            raise InvalidRequest(f"input '{name}': data holds something that is not {datatype}")
        bounds = np.iinfo(dtype)
        low, high = int(array.min()), int(array.max())
        if low < bounds.min or high > bounds.max:
            raise InvalidRequest(f"input '{name}': {low if low < bounds.min else high} is outside {datatype}")
    with np.errstate(over="ignore"):
        return Tensor(name, datatype, shape, _reshape(name, array.astype(dtype), shape))


def to_raw(tensor: Tensor) -> bytes | memoryview:
    """Returns the tensor's bytes: little-endian, row-major; BYTES with a 32-bit length before each element."""
    if isinstance(tensor.data, list):
        return b"".join(part for element in tensor.data for part in (struct.pack("<I", len(element)), element))
    if tensor.datatype == "BF16" and tensor.data.dtype != np.uint16:
        bits = np.ascontiguousarray(tensor.data, "<f4").view("<u4")
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
        return np.where(np.isnan(tensor.data), 0x7FC0, rounded).astype("<u2").tobytes()
    return np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8).data


def to_json(tensor: Tensor) -> list[str] | np.ndarray:
    """Returns the elements as `bodies.write` takes them; raises InvalidRequest if they are too many."""
    if isinstance(tensor.data, list):
        return [element.decode("utf-8", "replace") for element in tensor.data]
    if tensor.data.size > MAX_WRITTEN:
        raise InvalidRequest(
            f"output '{tensor.name}' has {tensor.data.size:,} numbers, and JSON takes at most {MAX_WRITTEN:,}; "
            "ask for it in binary form (binary_data), or send fewer samples"
        )
    has_bits = tensor.datatype == "BF16" and tensor.data.dtype == np.uint16
    return np.ravel(from_bits(tensor.data) if has_bits else tensor.data)


def check_output(name: str, parameters: Container[str]) -> None:
    """Raises Unsupported if the output is requested in a form that the server does not offer."""
    if "shared_memory_region" in parameters:
        raise Unsupported(f"output '{name}': shared memory is not offered; leave the parameter out")
    if "classification" in parameters:
        raise Unsupported(
            f"output '{name}': classification (class_count) is not offered; ask for the numbers themselves"
        )


def integers(tensor: Tensor) -> np.ndarray:
    """Returns the tensor as int64; raises InvalidRequest unless it is INT64 or INT32."""
    if tensor.datatype not in _INTEGERS or isinstance(tensor.data, list):
        raise InvalidRequest(f"input '{tensor.name}' must be INT64 or INT32, not {tensor.datatype}")
    return tensor.data.astype(np.int64, copy=False)


def integer_per_row(tensor: Tensor, num_rows: int) -> np.ndarray:
    """Returns the tensor `[num_rows, 1]` or `[num_rows]` as int64 `[num_rows]`; raises InvalidRequest naming it."""
    values = integers(tensor)
    if tensor.shape not in ((num_rows,), (num_rows, 1)):
        raise InvalidRequest(
            f"input '{tensor.name}' must have shape [{num_rows}, 1] or [{num_rows}], not {list(tensor.shape)}"
        )
    return values.reshape(num_rows)


def floats(tensor: Tensor) -> np.ndarray:
    """Returns the tensor as float32, infinite beyond its range; raises InvalidRequest if it is not of floats."""
    if tensor.datatype not in _FLOATS or isinstance(tensor.data, list):
        raise InvalidRequest(f"input '{tensor.name}' must be FP32, FP64, FP16 or BF16, not {tensor.datatype}")
    with np.errstate(over="ignore"):
        return tensor.data.astype(np.float32, copy=False)


def pad_rows(rows: Sequence[Any], dtype: Any, fill: float = 0, width: int | None = None) -> np.ndarray:
    """Returns the rows as a table `[N, width]`, padded with `fill`; the default width is the longest row's."""
    table = np.full((len(rows), width or max(map(len, rows))), fill, dtype)
    for out, values in zip(table, rows, strict=True):
        out[: len(values)] = values
    return table


def count_differs(name: str, shape: tuple[int, ...], count: int) -> str:
    """Returns the error's text for `count` elements that do not fit `shape`."""
    return f"input '{name}': shape {list(shape)} takes {prod(shape)} elements, but {count} came"


def from_bits(bits: np.ndarray) -> np.ndarray:
    """Returns the float32 numbers of bfloat16's bits."""
    return (bits.astype("<u4") << 16).view("<f4")


def _unknown(name: str, datatype: str) -> InvalidRequest:
    return InvalidRequest(f"input '{name}': unknown datatype {shown(datatype)}; known: BYTES, {', '.join(DTYPES)}")


def _reshape(name: str, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    try:
        return data.reshape(shape)
    except ValueError as e:  # no elements, but dimensions beyond what numpy can address
        raise InvalidRequest(f"input '{name}': shape {list(shape)} is too large") from e


def _split_bytes(name: str, count: int, raw: bytes | memoryview) -> list[bytes]:
    if count > MAX_ROWS:
        check_count(count, f"'{name}'")
    elements: list[bytes] = []
    offset, end = 0, len(raw)
    while offset + 4 <= end and len(elements) < count:
        (length,) = struct.unpack_from("<I", raw, offset)
        offset += 4 + length
        if offset > end:
            raise InvalidRequest(f"input '{name}': element {len(elements)} is cut off: {length} bytes long, it says")
        elements.append(bytes(raw[offset - length : offset]))
    if offset != end or len(elements) != count:
        raise InvalidRequest(
            f"'{name}': the shape takes {count} BYTES elements, but {len(elements)} and {end - offset} bytes more came"
        )
    return elements


def _integers(elements: list[int]) -> np.ndarray:
    """By itself, numpy makes floats of integers on both sides of 2^63."""
    try:
        return to_array(elements, np.int64)
    except OverflowError:
        return to_array(elements, np.uint64 if min(elements) >= 0 and max(elements) < 2**64 else object)


def _flat(name: str, data: Any) -> tuple[list[Any], set[type]]:
    """The elements of data, flat or nested, and their types; raises InvalidRequest if its rows differ in length."""
    items = data if isinstance(data, list) else [data]
    kinds = kinds_of(items)
    for _ in range(MAX_RANK):
        if list not in kinds:
            break
        if kinds != {list} or len(lengths := {*map(len, items)}) != 1:
            raise InvalidRequest(f"input '{name}': data is not an array: its rows differ in length, or are none")
        rows, items = items, []
        for some in slices(len(rows), max(1, AT_ONCE // max(1, *lengths))):
            items += chain.from_iterable(rows[some])
        kinds = kinds_of(items)
    return items, kinds
