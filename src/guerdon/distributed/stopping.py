"""A rank that is asked to stop while it waits for another."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def asking(ask: Callable[[], None], *, for_good: bool = False) -> Iterator[None]:
    """Within it SIGTERM and SIGINT only call `ask`, on a thread of its own; in the main thread, which gets signals.

    One signal may call it twice. Behind it they do what they did before, with `for_good` nothing: a rank that ends must
    not be killed by those that come late, and of Python's own handlers the interpreter's end leaves none.

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

    def handle(number: int, _: FrameType | None) -> None:
        # Once more: an event loop has a socket of its own in the place of this one.
        with contextlib.suppress(BlockingIOError):
            writer.send(bytes([number]))

    listener = threading.Thread(target=listen, name="guerdon-signals", daemon=True)
    handlers = {number: signal.signal(number, handle) for number in _SIGNALS}
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_IGN if for_good else handler)
        writer.close()
        listener.join()
        reader.close()
