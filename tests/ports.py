"""Free ports for servers that are started by their command."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from pathlib import Path

_START, _COUNT = 20_000, 12_000
"""Below the ports that the kernel gives to connections and to port 0, so that nobody else gets one in the meantime."""
_LAST = Path(tempfile.gettempdir(), f"guerdon-tests-last-port-{os.getuid()}")


def free_port() -> int:
    """Returns a port on which nothing listens, another one at each call of all the processes that run tests."""
    while True:
        port = _next_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _next_port() -> int:
    with _LAST.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        port = _START + (int(file.read() or 0) + 1) % _COUNT
        file.truncate(0)
        file.write(str(port - _START))
        file.flush()  # before the file is closed, and with it unlocked
    return port
