"""A client of gRPC that is nobody's library: its calls may stay half open, and their answers unread."""

import contextlib
import socket
import struct
import threading
from collections import Counter

DATA, HEADERS, SETTINGS, PING, WINDOW = 0, 1, 4, 6, 8
PIECE_BYTES = 16_384


class RawClient:
    """One connection of HTTP/2, which takes no byte of any answer's message."""

    def __init__(self, port: int, *, answers_pings: bool = True) -> None:
        self.is_closed = threading.Event()
        self.settings: dict[int, int] = {}
        self.num_pings = 0
        self.num_answered = 0
        """Pings of its own that the server answered."""
        self._answers_pings = answers_pings
        self._num_calls = 0
        self._windows: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._socket = socket.create_connection(("127.0.0.1", port), 30)
        self._socket.settimeout(None)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0)))
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, method: str, message: bytes | None = None, key: str | None = None) -> None:
        """Begins a call; without a message it stays half open."""
        call, self._num_calls = 2 * self._num_calls + 1, self._num_calls + 1
        headers = {":method": "POST", ":scheme": "http", ":path": f"/inference.GRPCInferenceService/{method}"}
        headers |= {":authority": "x", "te": "trailers", "content-type": "application/grpc"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        self._send(frame(HEADERS, 4, call, b"".join(plainly(name) + plainly(headers[name])[1:] for name in headers)))
        if message is None:
            return
        body = b"\0" + struct.pack(">I", len(message)) + message
        for at in range(0, len(body), PIECE_BYTES):
            piece = body[at : at + PIECE_BYTES]
            with self._changed:
                enough = self._changed.wait_for(
                    lambda: all(65_535 + self._windows[i] >= PIECE_BYTES for i in (0, call)), 30
                )
                assert enough, "the server takes no more"
                self._windows.subtract({0: len(piece), call: len(piece)})
            self._send(frame(DATA, at + PIECE_BYTES >= len(body), call, piece))

    def ping(self) -> None:
        self._send(frame(PING, 0, 0, b"8 bytes."))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.is_closed.wait(120)
        self._socket.close()

    def _send(self, data: bytes) -> None:
        with self._changed:
            self._socket.sendall(data)

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as coming:
            while head := coming.read(9):
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
                self._take(kind, flags, stream, coming.read(int.from_bytes(head[:3], "big")))
        self.is_closed.set()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == WINDOW:
            with self._changed:
                self._windows[stream] += int.from_bytes(payload, "big")
                self._changed.notify_all()
        elif kind == SETTINGS and not flags & 1:
            self.settings |= dict(struct.iter_unpack(">HI", payload))
            self._send(frame(SETTINGS, 1, 0))
        elif kind == PING and flags & 1:
            self.num_answered += 1
        elif kind == PING:
            self.num_pings += 1
            if self._answers_pings:
                self._send(frame(PING, 1, 0, payload))


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def plainly(text: str) -> bytes:
    """A header's name as HPACK has it that is in no table, or its value behind one byte too many."""
    assert len(text) < 127
    return b"\0" + bytes([len(text)]) + text.encode()
