"""Tensors of the open inference protocol: their datatypes, and raw bytes to numpy and back."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from guerdon.errors import InvalidRequest

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{n}": np.dtype(f"<u{n // 8}") for n in (8, 16, 32, 64)},
    **{f"INT{n}": np.dtype(f"<i{n // 8}") for n in (8, 16, 32, 64)},
    **{f"FP{n}": np.dtype(f"<f{n // 8}") for n in (16, 32, 64)},
    "BF16": np.dtype("<f4"),
}
"""numpy's type of each numeric datatype. BF16, which numpy lacks, is held as float32."""

_DATATYPES = {dtype: name for name, dtype in DTYPES.items() if name != "BF16"}
_INTEGERS = ("INT64", "INT32")
_FLOATS = ("FP32", "FP64", "FP16", "BF16")
_MAX_RANK = 16


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
    if not isinstance(shape, list) or len(shape) > _MAX_RANK:
        raise InvalidRequest(f"input '{name}': shape must be a list of at most {_MAX_RANK} integers")
    for dim in shape:
        if type(dim) is not int or not 0 <= dim < 2**62:
            raise InvalidRequest(f"input '{name}': shape {shape} has {dim!r}; every dimension is an integer from 0 up")
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
    if datatype == "BYTES":
        elements = _flatten_texts(name, data)
        if len(elements) != prod(shape):
            raise InvalidRequest(count_differs(name, shape, len(elements)))
        return Tensor(name, datatype, shape, elements)
    dtype = _dtype(name, datatype)
    try:
        array = np.array(data)
        if array.dtype == object and dtype.kind == "f":
            array = np.array(data, np.float64)  # null stands for what is not a number
    except (ValueError, TypeError) as e:
        raise InvalidRequest(
            f"input '{name}': data is not an array of numbers: its rows differ in length, or hold something else"
        ) from e
    if array.size != prod(shape):
        raise InvalidRequest(count_differs(name, shape, array.size))
    if array.size and array.dtype.kind not in {"b": "b", "f": "iuf"}.get(dtype.kind, "iu"):
        raise InvalidRequest(f"input '{name}': data holds something that is not {datatype}")
    if dtype.kind in "iu" and array.size:
        bounds = np.iinfo(dtype)
        low, high = int(array.min()), int(array.max())
        if low < bounds.min or high > bounds.max:
            raise InvalidRequest(f"input '{name}': {low if low < bounds.min else high} is outside {datatype}")
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
        raise InvalidRequest(f"input '{name}': unknown datatype {datatype!r}; known: BYTES, {', '.join(DTYPES)}")
    return dtype


def _reshape(name: str, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    try:
        return data.reshape(shape)
    except ValueError as e:  # no elements, but dimensions beyond what numpy can address
        raise InvalidRequest(f"input '{name}': shape {list(shape)} is too large") from e


def _split_bytes(name: str, count: int, raw: bytes | memoryview) -> list[bytes]:
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


def _flatten_texts(name: str, data: Any) -> list[bytes]:
    items = data if isinstance(data, list) else [data]
    for _ in range(_MAX_RANK):
        if not any(isinstance(item, list) for item in items):
            break
        items = [element for item in items for element in (item if isinstance(item, list) else [item])]
    if not all(isinstance(item, str) for item in items):
        raise InvalidRequest(f"input '{name}': data holds something that is not a string")
    return [item.encode() for item in items]
