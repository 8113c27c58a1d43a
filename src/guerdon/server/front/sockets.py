"""What the system is asked to do with a connection's socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any

_VANISHED_S = 120
"""After which a host that no longer answers has no connection here any more."""

_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": _VANISHED_S * 1000}


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Has the system end the connection once the host at its other end has vanished."""
    found: Any = transport.get_extra_info("socket")
    if found is None:
        return
    with contextlib.suppress(OSError):  # not a TCP socket, or gone already
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # not all systems have all
                found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def break_off(transport: asyncio.Transport) -> None:
    """Ends the connection at once, with what waits to be sent, also in the system's own buffers."""
    found: Any = transport.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it is gone already
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
