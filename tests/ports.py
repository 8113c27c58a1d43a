"""Free ports for servers that are started by their command."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

_START, _COUNT = 20_000, 12_000
"""Below the ports that the kernel gives to connections and to port 0, so that nobody else gets one in the meantime."""
_numbers = itertools.count(os.getpid() * 97)


def free_port() -> int:
    """Returns a port on which nothing listens, another one at each call."""
    while True:
        port = _START + next(_numbers) % _COUNT
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
