"""A rank that is asked to stop while it waits for another."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def asking(ask: Callable[[], None]) -> Iterator[None]:
    """Within it SIGTERM and SIGINT only call `ask`, on a thread of its own; in the main thread, which gets signals.

    Python runs a handler between two of its instructions, and the main thread may be inside a collective for hours. The
    number of the signal is written to a socket at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while numbers := reader.recv(64):
            if any(number in _SIGNALS for number in numbers):
                ask()

    listener = threading.Thread(target=listen, name="guerdon-signals", daemon=True)
    handlers = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        writer.close()
        listener.join()
        reader.close()
