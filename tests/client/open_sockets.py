"""The connections of this process."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator


def open_sockets() -> Iterator[socket.socket]:
    """Yields a copy of each connected socket of this process."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            copied = socket.socket(fileno=os.dup(int(fd)))
            try:
                copied.getpeername()
            except OSError:
                copied.close()
            else:
                yield copied
