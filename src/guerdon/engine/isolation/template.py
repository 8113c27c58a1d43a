"""The process that imports an isolated function once, and forks a keeper for each child.

It ends when the server closes its channel, however the server ended, and ends everything below it before.
"""

from __future__ import annotations

import gc
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time

import msgspec

from guerdon.engine.functions import import_function, read_form
from guerdon.engine.isolation import process_tree
from guerdon.engine.isolation.channel import Import, Imported, encode, receive, send
from guerdon.engine.isolation.keeper import END_S, Keeper, Work
from guerdon.errors import Exit, StartError

_FORK = b"f"
"""What the server sends with a keeper's end of a channel."""


def main(descriptor: int) -> None:
    """Serves the server at the other end of the descriptor's socket."""
    server = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    for number in (signal.SIGINT, signal.SIGTERM):  # the server decides when its accepted samples are done
        signal.signal(number, signal.SIG_IGN)
    asked = receive(server)
    if asked is None:
        return
    wanted = msgspec.json.decode(asked, type=Import)
    try:
        function = import_function(wanted.function)
        form = read_form(function, wanted.function)
    except StartError as e:
        send(server, encode(Imported(error=str(e), help=e.help)))
        return
    process_tree.adopt_orphans()
    gc.collect()
    gc.freeze()  # so that children do not copy memory to mark it
    folder = tempfile.mkdtemp(prefix="guerdon-")
    try:
        send(server, encode(Imported(form)))
        _Template(server, folder, Work(function, form, wanted.limits)).run()
    finally:
        process_tree.end_all(END_S)
        shutil.rmtree(folder, ignore_errors=True)


class _Template:
    def __init__(self, server: socket.socket, folder: str, work: Work) -> None:
        self._server, self._folder, self._work = server, folder, work
        self._keepers: set[int] = set()
        self._num_keepers = 0

    def run(self) -> None:
        """Forks a keeper for each channel that the server sends; ends what keepers left that ended themselves."""
        woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        os.set_blocking(woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        poll.register(woken, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if woken in ready:
                os.read(woken, 4096)
                self._end_strays()
            if self._server.fileno() in ready:
                message, descriptors, _, _ = socket.recv_fds(self._server, len(_FORK), 1)
                if message != _FORK:
                    return
                self._fork(socket.socket(fileno=descriptors[0]))

    def _fork(self, channel: socket.socket) -> None:
        self._num_keepers += 1
        if keeper := os.fork():
            channel.close()
            self._keepers.add(keeper)
            return
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._server.close()
            folder = os.path.join(self._folder, str(self._num_keepers))
            Keeper(channel, folder, self._work).run()
        except BaseException as e:
            sys.excepthook(type(e), e, e.__traceback__)
            os._exit(Exit.FAILED)
        finally:
            os._exit(Exit.DONE)

    def _end_strays(self) -> None:
        """Kills the orphans of a killed keeper, which this process has adopted."""
        process_tree.reap_all()
        strays = [pid for pid in process_tree.children(os.getpid()) if pid not in self._keepers]
        while strays:
            below = [pid for stray in strays for pid in process_tree.descendants(stray)]
            process_tree.kill([*strays, *below])
            time.sleep(0.001)
            process_tree.reap_all()
            strays = [pid for pid in process_tree.children(os.getpid()) if pid not in self._keepers]
        self._keepers &= set(process_tree.children(os.getpid()))


def fork_keeper(template: socket.socket) -> socket.socket:
    """Returns the server's end of the channel to a new keeper; raises OSError if the template has ended."""
    own, keepers = socket.socketpair()
    with keepers:
        socket.send_fds(template, [_FORK], [keepers.fileno()])
    return own
