"""The bytes between server, keepers and children: frames with a length before them, requests and answers as JSON.

Nothing that a child sends is unpickled or executed, only decoded as typed JSON of a limited size.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any

import msgspec

from guerdon.engine.functions import FunctionForm

HEAD = struct.Struct("!I")
MAX_ANSWER_BYTES = 65_536
"""Largest answer of a child; every real one is far smaller."""
MAX_REPORT_BYTES = 1_048_576
NONCE_BYTES = 8
STAYS, LEAVES = b"+", b"-"
"""First byte of an answer: whether the child can take another sample."""


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits of one sample; `memory_bytes` is in addition to the imported function's."""

    deadline_s: float
    cpu_s: float
    memory_bytes: int
    processes: int


@dataclass(frozen=True, slots=True)
class Import:
    """The template's import: `module:function`."""

    function: str
    name: str
    limits: ChildLimits


class Imported(msgspec.Struct):
    """The result of the import: the function's form, or the error."""

    form: FunctionForm | None = None
    error: str = ""
    help: str = ""


class ChildAnswer(msgspec.Struct):
    """A child's result: a finite reward, or the reason for none."""

    reward: float | None = None
    error: str = ""
    is_out_of_memory: bool = False


class Report(msgspec.Struct):
    """A keeper's report of a sample: the child's answer, still as text, or the end of the child.

    `reason` is a word for the metrics, and `text` says it in full. `printed` is the beginning of the sample's stdout
    and stderr, `num_left` the number of leftover processes.
    """

    answer: str = ""
    reason: str = ""
    text: str = ""
    printed: str = ""
    num_left: int = 0


def frame(body: bytes) -> bytes:
    """Returns the body with its length before it."""
    return HEAD.pack(len(body)) + body


def send(channel: socket.socket, body: bytes) -> None:
    """Sends one frame."""
    channel.sendall(frame(body))


def receive(channel: socket.socket, max_bytes: int | None = None) -> bytes | None:
    """Returns the next frame's body, None at the end of the stream.

    Raises ValueError if it is longer than `max_bytes`, and whatever the socket raises.
    """
    head = _receive_exactly(channel, HEAD.size)
    if head is None:
        return None
    (size,) = HEAD.unpack(head)
    if max_bytes is not None and size > max_bytes:
        raise ValueError(f"a frame of {size} bytes")
    return _receive_exactly(channel, size)


def _receive_exactly(channel: socket.socket, size: int) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        if not (part := channel.recv(min(size - len(received), 1 << 20))):
            return None
        received += part
    return bytes(received)


def encode(message: Any) -> bytes:
    """Returns a dataclass or struct of this module as JSON."""
    return msgspec.json.encode(message)


def decode_answer(text: str) -> ChildAnswer | None:
    """Returns a child's answer, None if it is malformed."""
    try:
        return msgspec.json.decode(text, type=ChildAnswer)
    except (msgspec.MsgspecError, RecursionError):
        return None
