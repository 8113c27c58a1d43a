"""What changed a critic since its oldest kept checkpoint, on disk in the order in which it was done.

Every record is one file, numbered upwards: a train request, or a client's return to a checkpoint. It is written before
it is done, and names the record before it, so that a gap is seen. A head with a checksum of its own says how long the
safetensors file behind it is: so a file that was cut is told from one in which a bit has flipped. Records of guerdon
0.1, safetensors files without that head, are read, too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import orjson
from safetensors import SafetensorError
from safetensors.numpy import load as unpack
from safetensors.numpy import save as pack

from guerdon.core import TrainRequest
from guerdon.durable import ASIDE, DAMAGED, locked, make_folder, storing, sync, write_new
from guerdon.errors import StartError

log = logging.getLogger(__name__)

_NAME = re.compile(r"(\d{12})(?:-done|-return|-stopped-(\d+))?\.safetensors")
_TENSORS = ("tokens", "returns", "prev_values", "mask")

_HEAD = struct.Struct("<Q8sQ")
"""How many bytes of head follow, the format, the payload's length. Guerdon 0.1 takes the first number for the length of
safetensors' header, finds none, and refuses to start instead of leaving the record out as one that is cut."""
_MAGIC = b"GUERDON2"
_CHECKSUM_BYTES = 16
_PAYLOAD = _HEAD.size + _CHECKSUM_BYTES


@dataclass(slots=True, eq=False)
class Record:
    """One thing that was done: `request` was trained on, or `checkpoint` was gone back to.

    `previous` is the position of the record that was done before it, 0 for none. Of a request that broke off,
    `num_steps` global batches stand; None is all of them. `is_done` where it is known that it came to its end, and
    so may have been answered. `settings` are those under which it was done.
    """

    position: int
    previous: int
    settings: dict[str, Any]
    digest: str
    request: TrainRequest | None = None
    checkpoint: str | None = None
    num_steps: int | None = None
    is_done: bool = False


class Journal:
    """The records in `folder`, which is locked against other servers until `close`.

    Raises StartError where another server has it, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._owed: dict[Path, Path | None] = {}
        try:
            make_folder(folder)
            if not os.access(folder, os.W_OK):
                raise OSError(errno.EROFS, "it cannot be written")
            self._lock = _locked(folder)
            for leftover in folder.glob(ASIDE + "*"):
                leftover.unlink()
        except OSError as e:
            raise StartError(
                f"cannot keep a journal in {folder}: {e.strerror}", "give a checkpoint_dir that can be written"
            ) from e
        self._paths = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
        self._next = max(self._paths, default=0) + 1
        self._base = 0

    @property
    def position(self) -> int:
        """The position of the last thing that was done."""
        return max(self._base, *self._paths, 0)

    def start_after(self, position: int) -> None:
        """Says up to where a checkpoint has it all: the next record comes later, whatever is left of the journal."""
        self._base = position
        self._next = max(self._next, position + 1)

    def append(self, settings: dict[str, Any], content: TrainRequest | str, digest: str = "") -> int:
        """The position of a new record: of a train request and its digest, or of a return to the checkpoint named.

        When this returns, the record outlives a crash; raises StorageFailed, and then nothing of it remains once
        `settle` has returned.
        """
        self.settle()
        position = self._next
        kind = "-return" if isinstance(content, str) else ""
        path = self._folder / f"{position:012d}{kind}.safetensors"
        data = _encode({"position": position, "previous": self.position, "settings": settings}, content, digest)
        self._next += 1
        with storing("the journal cannot take it, so that nothing was changed"):
            try:
                write_new(path, data)
            except OSError:
                self._remove(path)
                raise
        self._paths[position] = path
        return position

    def withdraw(self, position: int) -> None:
        """Takes a record back of which nothing was done; raises StorageFailed as `mark_done` does."""
        self._remove(self._paths.pop(position))

    def mark_done(self, position: int) -> None:
        """Notes that a train request came to its end; from when this returns, a power cut included, it counts as done.

        Nobody is answered before. Raises StorageFailed; then `settle` is to do it before anyone is.
        """
        self._rename(position, "done")

    def stop_at(self, position: int, num_steps: int) -> None:
        """As `mark_done`, of a request that broke off after so many of its global batches."""
        self._rename(position, f"stopped-{num_steps}")

    def records(self, after: int) -> Iterator[Record]:
        """The whole records after that position, in order.

        A last one that is cut is left out, loudly; so is one with wrong content whose request was never answered.
        Raises StartError for one with wrong content that may have been, and for a damaged or missing one before others.
        """
        previous = after
        for position in sorted(p for p in self._paths if p > after):
            path = self._paths[position]
            try:
                record = _decode(path)
                if record.position != position:
                    raise ValueError(f"it is record {record.position}")
            except OSError as e:
                raise StartError(f"cannot read {path}: {e.strerror}", "mend the disk, or its permissions") from e
            except (SafetensorError, ValueError, KeyError, TypeError) as e:
                self._leave_out(position, e)
                return
            if record.previous != previous:
                raise StartError(
                    f"record {path} was done after record {record.previous}, but the state at hand is that of "
                    f"record {previous}",
                    "restore the newest checkpoint or the missing records from a backup; or move the folder "
                    f"{self._folder} elsewhere, which gives up what it holds",
                )
            previous = position
            yield record

    def count(self, after: int) -> int:
        """The number of records after that position."""
        return sum(position > after for position in self._paths)

    def checkpoints(self) -> set[str]:
        """The checkpoints that its records go back to."""
        paths = [path for path in self._paths.values() if path.stem.endswith("-return")]
        return {_meta(_payload(path.read_bytes()))["checkpoint"] for path in paths}

    def forget(self, upto: int) -> None:
        """Removes the records up to that position, which checkpoints hold; the last of all stays.

        By the last one a start sees whether a checkpoint is as new as the journal.
        """
        try:
            for position in sorted(p for p in self._paths if p <= upto and p != self.position):
                self._paths[position].unlink()
                del self._paths[position]
        except OSError as e:  # harmless: what a checkpoint holds is not replayed
            log.warning("cannot remove old records of the journal: %s", e)

    def close(self) -> None:
        """Gives the folder free."""
        self._lock.close()

    def settle(self) -> None:
        """Makes up for what the disk refused to note of earlier requests; raises StorageFailed while it still does."""
        if not self._owed:
            return
        with storing(
            "the journal cannot note what became of a train request, which must be before another or its answer"
        ):
            for path, renamed in list(self._owed.items()):
                if path.exists():
                    path.rename(renamed) if renamed else path.unlink()
                sync(self._folder)
                del self._owed[path]

    def _leave_out(self, position: int, why: Exception) -> None:
        """Does without a damaged record where that is allowed, as `records` says; else raises StartError."""
        path = self._paths[position]
        if position != max(self._paths):
            raise StartError(
                f"record {path} is damaged ({why}), and others follow it",
                "restore it from a backup; or move all records from it on elsewhere, which gives them up",
            ) from why
        # Of a return nobody notes that it came to its end.
        may_be_answered = path.stem != f"{position:012d}"
        if not may_be_answered:
            log.warning("the last record of the journal, %s, is damaged (%s): IT IS LEFT OUT", path, why)
        elif _is_cut(path.read_bytes()):
            log.critical(
                "the last record of the journal, %s, is cut (%s): IT IS LEFT OUT, AND IT HAD BEEN ANSWERED: what its "
                "client was told to be done is lost",
                path,
                why,
            )
        else:
            raise StartError(
                f"record {path} is damaged ({why}), and it had been answered",
                "restore it from a backup; or move it elsewhere, which gives it up",
            ) from why
        path.rename(path.with_name(DAMAGED + path.name))
        del self._paths[position]

    def _rename(self, position: int, mark: str) -> None:
        path = self._paths[position]
        renamed = self._paths[position] = path.with_name(f"{position:012d}-{mark}.safetensors")
        self._owed[path] = renamed
        self.settle()

    def _remove(self, path: Path) -> None:
        self._owed[path] = None
        self.settle()


def digest_of(request: TrainRequest) -> str:
    """What tells whether two train requests ask for the same; the id is not in it."""
    digest = hashlib.sha256()
    for name in _TENSORS:
        array = np.ascontiguousarray(getattr(request, name))
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()


def _encode(meta: dict[str, Any], content: TrainRequest | str, digest: str) -> bytes:
    tensors: dict[str, np.ndarray] = {}
    if isinstance(content, TrainRequest):
        meta |= {"id": content.id, "digest": digest}
        tensors = {name: np.ascontiguousarray(getattr(content, name)) for name in _TENSORS}
    else:
        meta |= {"checkpoint": content}
    text = orjson.dumps(meta).decode()
    return _sealed(pack(tensors, {"record": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}))


def _decode(path: Path) -> Record:
    """The record in a file; raises what tells that it is damaged."""
    payload = _payload(path.read_bytes())
    meta = _meta(payload)
    num_steps = _NAME.fullmatch(path.name)[2]  # type: ignore[index]
    record = Record(
        meta["position"],
        meta["previous"],
        meta["settings"],
        meta.get("digest", ""),
        checkpoint=meta.get("checkpoint"),
        num_steps=None if num_steps is None else int(num_steps),
        is_done=num_steps is not None or path.stem.endswith("-done"),
    )
    tensors = unpack(payload)
    if record.checkpoint is None:
        tokens, returns, prev_values, mask = (tensors[name] for name in _TENSORS)
        record.request = TrainRequest(meta["id"], tokens, returns, prev_values, mask)
        if digest_of(record.request) != record.digest:
            raise ValueError("its tensors are not those that were written")
    return record


def _sealed(payload: bytes) -> bytes:
    """The payload behind a head that says its length, and has a checksum of its own."""
    told = _HEAD.pack(_CHECKSUM_BYTES + _HEAD.size - 8, _MAGIC, len(payload))
    return told + _checksum(told) + payload


def _checksum(told: bytes) -> bytes:
    return hashlib.blake2b(told, digest_size=_CHECKSUM_BYTES).digest()


def _payload_bytes(data: bytes) -> int:
    """The payload's length as the head says it; raises ValueError if the head is not what was written."""
    told, checksum = data[: _HEAD.size], data[_HEAD.size : _PAYLOAD]
    if _checksum(told) != checksum:
        raise ValueError("its length is not what was written")
    length: int = _HEAD.unpack(told)[2]
    return length


def _payload(data: bytes) -> bytes:
    """The safetensors file that a record's file holds; raises ValueError if the head before it is damaged."""
    if _is_of_0_1(data):
        return data
    if len(data) != _PAYLOAD + _payload_bytes(data):
        raise ValueError("its length is another than was written")
    return data[_PAYLOAD:]


def _is_of_0_1(data: bytes) -> bool:
    return data[8:9] == b"{"


def _is_cut(data: bytes) -> bool:
    """Whether the file is shorter than its own head says, whose length has not been changed."""
    if not _is_of_0_1(data):
        try:
            return len(data) < _PAYLOAD or len(data) < _PAYLOAD + _payload_bytes(data)
        except ValueError:
            return False
    try:
        # The length has no checksum there, but the header behind it shows by itself where it ends.
        header, end = json.JSONDecoder().raw_decode(data[8:].decode("latin-1"))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        begin = 8 + -(-end // 8) * 8
        return len(data) < begin + max((entry["data_offsets"][1] for entry in tensors), default=0)
    except json.JSONDecodeError:
        return len(data) < 8 + int.from_bytes(data[:8], "little")
    except (KeyError, TypeError, IndexError, AttributeError):
        return False


def _meta(payload: bytes) -> dict[str, Any]:
    length = int.from_bytes(payload[:8], "little")
    header = orjson.loads(payload[8 : 8 + length])["__metadata__"]
    if hashlib.sha256(header["record"].encode()).hexdigest() != header["sha256"]:
        raise ValueError("its head is not what was written")
    return orjson.loads(header["record"])


def _locked(folder: Path) -> TextIO:
    try:
        return locked(folder / "lock")
    except BlockingIOError:
        raise StartError(
            f"another server works on {folder}", "stop it, or give each critic a checkpoint_dir of its own"
        ) from None
