"""The format of safetensors: the header that describes a file's tensors, written and read.

The library reads files alone, and copies what it reads from bytes. Here tensors stay where they are, and are written
piece by piece; the client needs neither the library nor torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "BOOL": 1,
    **{f"{sign}{8 * size}": size for sign in "IU" for size in (1, 2, 4, 8)},
}
"""The format's dtypes, and the bytes of one number."""


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor in a file or a body: the name of its dtype, its shape, and a view of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def named_files(folder: Path, name: str) -> list[str]:
    """Returns the name if that file is there, or a link, else the names of the shards in its index; empty without one.

    An index beside the whole file is of an earlier save. Raises ValueError if it is read and malformed, or if a shard
    is in another folder.
    """
    path, index = folder / name, folder / f"{name}.index.json"
    if path.is_file() or path.is_symlink():
        return [name]
    if not (index.is_file() or index.is_symlink()):
        return []
    try:
        shards = sorted({*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        if shards and all(Path(shard).name == shard for shard in shards):
            return shards
    except (OSError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{index} is malformed: {e}") from e
    raise ValueError(f"{index} names no shards in its folder")


def header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Returns what stands before the tensors' bytes, which follow in order without gaps, by their dtypes and shapes."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    stop = 0
    for name, (dtype, shape) in tensors.items():
        start, stop = stop, stop + math.prod(shape) * ITEM_BYTES[dtype]
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, stop)}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data
    return len(text).to_bytes(8, "little") + text


def parse(data: Any) -> tuple[dict[str, TensorBytes], dict[str, str]]:
    """Returns the tensors and the metadata of a whole file's bytes; raises ValueError if it is torn or malformed."""
    view = memoryview(data)
    stop = 8 + int.from_bytes(view[:8], "little")
    if not 8 < stop <= len(view):
        raise ValueError(f"it has {len(view)} bytes, and its header would end at {stop}")
    found, end = {}, 0
    try:
        described = json.loads(bytes(view[8:stop]))
        metadata = described.pop("__metadata__", {})
        for name, about in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
            (begin, after), shape, dtype = about["data_offsets"], tuple(about["shape"]), about["dtype"]
            if dtype not in ITEM_BYTES:
                raise ValueError(f"{name} is {dtype}, which is none of {', '.join(ITEM_BYTES)}")
            if begin != end or after != begin + math.prod(shape) * ITEM_BYTES[dtype]:
                raise ValueError(f"the offsets of {name} are wrong")
            found[name], end = TensorBytes(dtype, shape, view[stop + begin : stop + after]), after
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"its header lacks or misplaces {e}") from e
    if stop + end != len(view):
        raise ValueError(f"it has {len(view)} bytes, not {stop + end}")
    return found, metadata
