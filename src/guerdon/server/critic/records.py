"""One journal record as a file: a train request, or a client's return to a checkpoint.

A header with a checksum has the length of the safetensors payload, which distinguishes a truncated file from a corrupt
one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import load as unpack
from safetensors.numpy import save as pack

from guerdon.critic_core import Gae, TrainRequest

NAME = re.compile(r"(\d{12})(?:-done|-return|-stopped-(\d+))?\.safetensors")
"""Matches a record's file name: the position, and how many global batches of a request that broke off stand."""
_TENSORS = ("tokens", "returns", "prev_values", "mask")
_MORE = ("rewards", "advantages")
"""Written beside them for a request with rewards."""
_TREES = ("parents", "lengths")
"""Written beside them for a request of trees."""
_REWARDED = ("tokens", "rewards", "mask")
"""The client's arrays of such a request."""
_ESTIMATES = ("returns", "prev_values", "advantages")
"""The critic's estimates for a request with rewards. It is kept, because later weights would give other values."""

_HEAD = struct.Struct("<Q8sQ")
"""The number of bytes of head that follow, the format, the payload's length."""
_MAGIC = b"GUERDON2"
_CHECKSUM_BYTES = 16
_PAYLOAD = _HEAD.size + _CHECKSUM_BYTES


@dataclass(slots=True, eq=False)
class Record:
    """One step of the critic's history: `request` was trained on, or `checkpoint` was loaded.

    `previous` is the position of the record before it, 0 if there is none. If a request broke off, `num_batches` of its
    global batches stand; None means all. `is_done` says that it is known to be finished, and so may have been
    answered. `settings` are those it was done under.
    """

    position: int
    previous: int
    settings: dict[str, Any]
    digest: str
    request: TrainRequest | None = None
    checkpoint: str | None = None
    num_batches: int | None = None
    is_done: bool = False


def digest_of(request: TrainRequest) -> str:
    """Returns a digest of the request, without its id and the critic's estimates."""
    text = f"updates {request.updates}\n" if request.updates != 1 else ""
    if request.gae is not None:
        text += f"{_plain(request.gae)}\n"
    names = _TENSORS if request.rewards is None else _REWARDED
    return _digest(request, names if request.parents is None else (*names, *_TREES), text)


def _plain(rule: Gae) -> dict[str, float]:
    return {name: value for name, value in dataclasses.asdict(rule).items() if value is not None}


def _digest(request: TrainRequest, names: tuple[str, ...], text: str = "") -> str:
    digest = hashlib.sha256(text.encode())
    for name in names:
        array = np.ascontiguousarray(getattr(request, name))
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()


def encode_record(meta: dict[str, Any], content: TrainRequest | str, digest: str) -> bytes:
    """Returns the file of a train request with its digest, or of a return to the named checkpoint."""
    tensors: dict[str, np.ndarray] = {}
    if isinstance(content, TrainRequest):
        meta |= {"id": content.id, "digest": digest, "updates": content.updates}
        names = _TENSORS if content.gae is None else (*_TENSORS, *_MORE)
        names = names if content.parents is None else (*names, *_TREES)
        if content.gae is not None:
            meta |= {"gae": _plain(content.gae), "estimates": _digest(content, _ESTIMATES)}
        tensors = {name: np.ascontiguousarray(getattr(content, name)) for name in names}
    else:
        meta |= {"checkpoint": content}
    text = orjson.dumps(meta).decode()
    payload = pack(tensors, {"record": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    head = _HEAD.pack(_CHECKSUM_BYTES + _HEAD.size - 8, _MAGIC, len(payload))
    return head + _checksum(head) + payload


def decode_record(path: Path) -> Record:
    """Reads a record; raises OSError, and SafetensorError, ValueError, KeyError or TypeError if it is damaged."""
    payload = _payload(path.read_bytes())
    meta = _meta(payload)
    num_batches = NAME.fullmatch(path.name)[2]  # type: ignore[index]
    record = Record(
        meta["position"],
        meta["previous"],
        meta["settings"],
        meta.get("digest", ""),
        checkpoint=meta.get("checkpoint"),
        num_batches=None if num_batches is None else int(num_batches),
        is_done=num_batches is not None or path.stem.endswith("-done"),
    )
    tensors = unpack(payload)
    if record.checkpoint is None:
        tokens, returns, prev_values, mask = (tensors[name] for name in _TENSORS)
        record.request = request = TrainRequest(meta["id"], tokens, returns, prev_values, mask, updates=meta["updates"])
        request.parents, request.lengths = map(tensors.get, _TREES)
        is_whole = True
        if "gae" in meta:
            request.gae, request.rewards, request.advantages = Gae(**meta["gae"]), *map(tensors.get, _MORE)
            is_whole = _digest(request, _ESTIMATES) == meta["estimates"]
        if not is_whole or digest_of(request) != record.digest:
            raise ValueError("its tensors differ from the written ones")
    return record


def read_checkpoint(path: Path) -> str:
    """Returns the checkpoint that a record returns to, without reading tensors."""
    name: str = _meta(_payload(path.read_bytes()))["checkpoint"]
    return name


def is_cut(path: Path) -> bool:
    """Whether the file is shorter than its own head says, and that head is intact."""
    data = path.read_bytes()
    try:
        return len(data) < _PAYLOAD or len(data) < _PAYLOAD + _payload_bytes(data)
    except ValueError:
        return False


def _checksum(head: bytes) -> bytes:
    return hashlib.blake2b(head, digest_size=_CHECKSUM_BYTES).digest()


def _payload_bytes(data: bytes) -> int:
    head, checksum = data[: _HEAD.size], data[_HEAD.size : _PAYLOAD]
    if _checksum(head) != checksum:
        raise ValueError("its length differs from the written one")
    length: int = _HEAD.unpack(head)[2]
    return length


def _payload(data: bytes) -> bytes:
    """Returns the safetensors payload; raises ValueError if the head before it is damaged."""
    if len(data) != _PAYLOAD + _payload_bytes(data):
        raise ValueError("its length is another than was written")
    return data[_PAYLOAD:]


def _meta(payload: bytes) -> dict[str, Any]:
    length = int.from_bytes(payload[:8], "little")
    header = orjson.loads(payload[8 : 8 + length])["__metadata__"]
    if hashlib.sha256(header["record"].encode()).hexdigest() != header["sha256"]:
        raise ValueError("its header differs from the written one")
    return orjson.loads(header["record"])
