"""Handles SIGTERM and SIGINT while the main thread may be inside a collective."""

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
    """Makes SIGTERM and SIGINT call `ask`, on a thread of its own, inside the context; a no-op off the main thread.

    One signal may call it twice. On exit the former handlers come back; with `for_good` signals are ignored from then
    on, so that a late one does not kill a rank that is ending.

    Python runs a handler only between two bytecodes, and the main thread may be inside a collective for hours. But the
    signal's number is written to the wakeup socket at once.
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
        # Written once more because an event loop may have replaced the wakeup socket by its own.
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
