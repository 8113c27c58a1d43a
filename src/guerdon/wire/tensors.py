"""Tensors of the open inference protocol: their datatypes, and raw bytes to numpy and back."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from guerdon.errors import InvalidRequest
from guerdon.wire.bodies import shown
from guerdon.wire.rows import check_count

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{n}": np.dtype(f"<u{n // 8}") for n in (8, 16, 32, 64)},
    **{f"INT{n}": np.dtype(f"<i{n // 8}") for n in (8, 16, 32, 64)},
    **{f"FP{n}": np.dtype(f"<f{n // 8}") for n in (16, 32, 64)},
    "BF16": np.dtype("<f4"),
}
"""numpy's type of each numeric datatype. BF16, which numpy lacks, is held as float32."""

_DATATYPES = {dtype: name for name, dtype in DTYPES.items() if name != "BF16"}
_ELEMENTS: dict[str, set[type]] = {"BYTES": {str}, "b": {bool}, "i": {int}, "u": {int}, "f": {int, float, type(None)}}
"""What may stand in JSON's data, by numpy's kind."""

_INTEGERS = ("INT64", "INT32")
_FLOATS = ("FP32", "FP64", "FP16", "BF16")

MAX_RANK = 16
MAX_DIMENSION = 2**62
"""A tensor has at most so many dimensions, each of them below the other bound."""


@dataclass(slots=True, eq=False)
class Tensor:
    """A named tensor: `data` is a numpy array of `shape`, or for BYTES the flat list of its elements in row order."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: np.ndarray | list[bytes]

    @classmethod
    def of(cls, name: str, data: np.ndarray) -> Tensor:
        """The tensor of a numeric array, under the datatype that its dtype stands for."""
        return cls(name, _DATATYPES[data.dtype], data.shape, data)

    @classmethod
    def of_texts(cls, name: str, texts: list[str]) -> Tensor:
        """A BYTES `[B, 1]` tensor of UTF-8 texts."""
        return cls(name, "BYTES", (len(texts), 1), [text.encode() for text in texts])


def check_shape(name: str, shape: Any) -> tuple[int, ...]:
    """`shape` as a tuple; raises InvalidRequest unless it is a list of dimensions of 0 or more."""
    if not isinstance(shape, list) or len(shape) > MAX_RANK:
        raise InvalidRequest(f"input '{name}': shape must be a list of at most {MAX_RANK} integers")
    for dim in shape:
        if type(dim) is not int or not 0 <= dim < MAX_DIMENSION:
            raise InvalidRequest(
                f"input '{name}': shape {shown(shape)} has {shown(dim)}; every dimension is an integer from 0 up"
            )
    return tuple(shape)


def from_raw(name: str, datatype: str, shape: tuple[int, ...], raw: bytes | memoryview) -> Tensor:
    """The tensor in `raw` (little-endian, row-major), viewing it where its alignment allows, else a copy.

    Raises InvalidRequest where the datatype is unknown or the bytes do not make up the shape.
    """
    if datatype == "BYTES":
        return Tensor(name, datatype, shape, _split_bytes(name, prod(shape), raw))
    dtype = _dtype(name, datatype)
    itemsize = 2 if datatype == "BF16" else dtype.itemsize
    if len(raw) != prod(shape) * itemsize:
        raise InvalidRequest(
            f"input '{name}': {datatype} {list(shape)} takes {prod(shape) * itemsize} bytes, but {len(raw)} came"
        )
    if datatype == "BF16":
        data = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    else:
        data = np.frombuffer(raw, dtype)
    if not data.flags.aligned:
        data = data.copy()
    return Tensor(name, datatype, shape, _reshape(name, data, shape))


def from_json(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> Tensor:
    """The tensor whose elements are JSON's `data`, flat or nested in row order.

    Raises InvalidRequest where the datatype is unknown, an element is not of it, or their number is not the shape's.
    """
    is_text = datatype == "BYTES"
    kind = "BYTES" if is_text else _dtype(name, datatype).kind
    elements, kinds = _flat(name, data)
    if len(elements) != prod(shape):
        raise InvalidRequest(count_differs(name, shape, len(elements)))
    # Before numpy sees them, which would make texts of all numbers where there is one text, each as wide as that.
    if not kinds <= _ELEMENTS[kind]:
        raise InvalidRequest(f"input '{name}': data holds something that is not {'a string' if is_text else datatype}")
    if is_text:
        check_count(len(elements), f"input '{name}'")
        return Tensor(name, datatype, shape, [element.encode() for element in elements])
    # As float64, null is what is not a number.
    array = _integers(elements) if kind in "iu" else np.array(elements, np.float64 if kind == "f" else np.bool_)
    return from_numbers(name, datatype, shape, array)


def from_numbers(name: str, datatype: str, shape: tuple[int, ...], array: np.ndarray) -> Tensor:
    """The tensor of the array's numbers; raises InvalidRequest where they are too many or few, or not of datatype."""
    dtype = _dtype(name, datatype)
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


def to_raw(tensor: Tensor) -> bytes:
    """The tensor's bytes: little-endian, row-major; BYTES with a 32-bit length before each element."""
    if isinstance(tensor.data, list):
        return b"".join(part for element in tensor.data for part in (struct.pack("<I", len(element)), element))
    if tensor.datatype == "BF16":
        bits = np.ascontiguousarray(tensor.data, "<f4").view("<u4")
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
        return np.where(np.isnan(tensor.data), 0x7FC0, rounded).astype("<u2").tobytes()
    return tensor.data.tobytes()


def integers(tensor: Tensor) -> np.ndarray:
    """The tensor as int64; raises InvalidRequest where it is not INT64 or INT32."""
    if tensor.datatype not in _INTEGERS or isinstance(tensor.data, list):
        raise InvalidRequest(f"input '{tensor.name}' must be INT64 or INT32, not {tensor.datatype}")
    return tensor.data.astype(np.int64, copy=False)


def floats(tensor: Tensor) -> np.ndarray:
    """The tensor as float32 (infinite where that cannot hold a number); raises InvalidRequest where it is no float."""
    if tensor.datatype not in _FLOATS or isinstance(tensor.data, list):
        raise InvalidRequest(f"input '{tensor.name}' must be FP32, FP64, FP16 or BF16, not {tensor.datatype}")
    with np.errstate(over="ignore"):
        return tensor.data.astype(np.float32, copy=False)


def count_differs(name: str, shape: tuple[int, ...], count: int) -> str:
    """What is wrong where `count` elements came for `shape`."""
    return f"input '{name}': shape {list(shape)} takes {prod(shape)} elements, but {count} came"


def _dtype(name: str, datatype: Any) -> np.dtype[Any]:
    dtype = DTYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        raise InvalidRequest(f"input '{name}': unknown datatype {shown(datatype)}; known: BYTES, {', '.join(DTYPES)}")
    return dtype


def _reshape(name: str, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    try:
        return data.reshape(shape)
    except ValueError as e:  # no elements, but dimensions beyond what numpy can address
        raise InvalidRequest(f"input '{name}': shape {list(shape)} is too large") from e


def _split_bytes(name: str, count: int, raw: bytes | memoryview) -> list[bytes]:
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
    """Left to itself, numpy would make floats of those that are partly below 2^63 and partly not."""
    try:
        return np.array(elements, np.int64)
    except OverflowError:
        return np.array(elements, np.uint64 if min(elements) >= 0 and max(elements) < 2**64 else object)


def _flat(name: str, data: Any) -> tuple[list[Any], set[type]]:
    """The elements of data, flat or nested, and their types; raises InvalidRequest where its rows are not alike."""
    items = data if isinstance(data, list) else [data]
    kinds = {*map(type, items)}
    for _ in range(MAX_RANK):
        if list not in kinds:
            break
        if kinds != {list} or len({*map(len, items)}) != 1:
            raise InvalidRequest(f"input '{name}': data is not an array: its rows differ in length, or are none")
        items = list(chain.from_iterable(items))
        kinds = {*map(type, items)}
    return items, kinds
