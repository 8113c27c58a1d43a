"""Keeps one child: passes samples to it, watches what it uses, and ends it with all its descendants at a limit.

The keeper adopts orphans, so everything that a child started, in whatever session, is below the keeper, and nothing
else is. It calls nothing of the user's.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from guerdon.engine.functions import FunctionForm
from guerdon.engine.isolation import child, process_tree
from guerdon.engine.isolation.channel import (
    HEAD,
    LEAVES,
    MAX_ANSWER_BYTES,
    NONCE_BYTES,
    Limits,
    Report,
    encode,
    frame,
    receive,
    send,
)
from guerdon.errors import Exit

TICK_S = 0.02
"""How often a child that computes is measured."""
END_S = 5.0
"""How long ending a child may take; only processes inside the kernel survive so long."""
_MAX_PRINTED_BYTES = 4_096
_CHUNK_BYTES = 65_536


class _Ended(Exception):
    """The child has to be ended, or has ended; the arguments are a reason and a text."""


class Keeper:
    """Runs in a process of its own, which the template has forked, until the server closes `server`."""

    def __init__(
        self, server: socket.socket, folder: str, function: Callable[..., Any], form: FunctionForm, limits: Limits
    ) -> None:
        self._server = server
        self._folder = folder
        self._function = function
        self._form = form
        self._limits = limits
        self._pid = os.getpid()
        self._child = 0
        self._baseline_bytes = 0
        self._status: int | None = None

    def run(self) -> None:
        """Answers the server's samples until it closes the channel; then ends everything below this process."""
        process_tree.adopt_orphans()
        self._start_child()
        try:
            while (request := receive(self._server)) is not None:
                report, is_reusable = self._answer(request)
                if is_reusable and not report.num_left:
                    send(self._server, encode(report))
                    continue
                self._end_child()
                self._start_child()
                send(self._server, encode(report))
        except OSError:  # the server has ended in the midst of a frame
            pass
        finally:
            process_tree.end_all(END_S)
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # another keeper's is in it
                os.rmdir(os.path.dirname(self._folder))

    # ------------------------------------------------------------------------------------------- one sample

    def _answer(self, request: bytes) -> tuple[Report, bool]:
        """Returns the report of a sample, and whether the child can take another."""
        self._reap()
        if self._status is not None:  # between two samples, as by the machine's own lack of memory
            self._end_child()
            self._start_child()
        printed = bytearray()
        try:
            answer = self._exchange(request, printed)
        except _Ended as e:
            reason, text = e.args
            return Report(reason=reason, text=text, printed=_text(printed)), False
        num_left = len([pid for pid in process_tree.descendants(self._pid) if pid != self._child])
        is_reusable = answer[:1] != LEAVES
        return Report(answer=_text(answer[1:]), printed=_text(printed), num_left=num_left), is_reusable

    def _exchange(self, request: bytes, printed: bytearray) -> bytes:
        """Returns the child's answer with its first byte; raises _Ended."""
        nonce = os.urandom(NONCE_BYTES)
        unsent, received = memoryview(frame(nonce + request)), bytearray()
        now = time.monotonic()
        ends, ticks = now + self._limits.deadline_s, now + TICK_S
        used_before_s: float | None = None
        poll = select.poll()
        poll.register(self._server, 0)  # hang-ups alone
        poll.register(self._output, select.POLLIN)
        while True:
            poll.register(self._channel, select.POLLIN | (select.POLLOUT if unsent else 0))
            ready = dict(poll.poll(max(0.0, min(ends, ticks) - now) * 1000))
            if ready.get(self._server.fileno()):
                raise ConnectionError
            if self._output in ready:
                self._drain(printed)
            if events := ready.get(self._channel.fileno(), 0):
                if events & select.POLLOUT and unsent:
                    unsent = unsent[self._send(unsent) :]
                if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    self._receive(received)
                    if (answer := _whole_answer(received, nonce)) is not None:
                        self._drain(printed)
                        return answer
            now = time.monotonic()
            if now >= ends:
                raise _Ended("deadline", f"gave no answer within its deadline of {self._limits.deadline_s:g} s")
            if now >= ticks:
                ticks = now + TICK_S
                self._check_alive()
                used_s = self._check_usage(used_before_s)
                used_before_s = used_s if used_before_s is None else used_before_s

    def _send(self, unsent: memoryview) -> int:
        try:
            return self._channel.send(unsent)
        except BlockingIOError:
            return 0
        except OSError:
            self._wait_for_end()

    def _receive(self, received: bytearray) -> None:
        try:
            part = self._channel.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._wait_for_end()
        received += part

    def _wait_for_end(self) -> NoReturn:
        """Raises _Ended with how the child ended, after it has closed its channel."""
        ends = time.monotonic() + TICK_S
        while time.monotonic() < ends:
            self._check_alive()
            time.sleep(0.001)
        raise _Ended("garbage", "closed the channel on which it answers")

    def _drain(self, printed: bytearray) -> None:
        with contextlib.suppress(BlockingIOError):
            part = os.read(self._output, _CHUNK_BYTES)
            printed += part[: max(0, _MAX_PRINTED_BYTES - len(printed))]

    def _check_alive(self) -> None:
        self._reap()
        if self._status is None:
            return
        if os.WIFSTOPPED(self._status):
            raise _Ended("signal", f"stopped its child process by {_name(os.WSTOPSIG(self._status))}")
        code = os.waitstatus_to_exitcode(self._status)
        if code >= 0:
            raise _Ended("exit", f"ended its child process with exit status {code}")
        hint = ", as by the kernel when memory runs out" if -code == signal.SIGKILL else ""
        raise _Ended("signal", f"ended its child process by {_name(-code)}{hint}")

    def _check_usage(self, used_before_s: float | None) -> float:
        """Returns the CPU seconds used so far; raises _Ended beyond a limit."""
        usage = process_tree.measure(process_tree.descendants(self._pid), self._baseline_bytes)
        limits, reaped = self._limits, resource.getrusage(resource.RUSAGE_CHILDREN)
        if usage.num_processes > limits.processes:
            raise _Ended("processes", f"had {usage.num_processes} processes, more than {limits.processes}")
        if usage.memory_bytes > limits.memory_bytes:
            raise _Ended("memory", f"used more than {limits.memory_bytes >> 20} MiB of memory")
        used_s = usage.cpu_s + reaped.ru_utime + reaped.ru_stime
        if used_before_s is not None and used_s - used_before_s > limits.cpu_s:
            raise _Ended("cpu", f"used more than {limits.cpu_s:g} s of CPU time")
        return used_s

    def _reap(self) -> None:
        """Reaps what has ended, orphans included; keeps the child's status, also if it was stopped."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG | os.WUNTRACED))[0]:
                if found[0] == self._child:
                    self._status = found[1]

    # -------------------------------------------------------------------------------------------- the child

    def _start_child(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        self._channel, channel = socket.socketpair()
        self._output, output = os.pipe()
        self._status = None
        self._child = os.fork()
        if not self._child:
            try:
                self._server.close()
                self._channel.close()
                os.close(self._output)
                child.run(channel, output, self._pid, self._folder, self._function, self._form, self._limits)
            except BaseException as e:
                sys.excepthook(type(e), e, e.__traceback__)
                os._exit(Exit.FAILED)
            finally:
                os._exit(Exit.DONE)
        channel.close()
        os.close(output)
        self._channel.setblocking(False)
        os.set_blocking(self._output, False)
        self._baseline_bytes = process_tree.own_memory(self._child)

    def _end_child(self) -> None:
        if not process_tree.end_all(END_S):
            os._exit(Exit.FAILED)  # the server starts another keeper; the template goes on killing what is left
        self._channel.close()
        os.close(self._output)
        shutil.rmtree(self._folder, ignore_errors=True)


def _whole_answer(received: bytearray, nonce: bytes) -> bytes | None:
    """Returns the answer behind the nonce once it is whole; raises _Ended for anything else than one answer."""
    garbage = _Ended("garbage", "wrote something else than an answer to the channel on which it answers")
    if len(received) < HEAD.size:
        return None
    (size,) = HEAD.unpack_from(received)
    if not NONCE_BYTES < size <= MAX_ANSWER_BYTES or len(received) > HEAD.size + size:
        raise garbage
    if len(received) < HEAD.size + size:
        return None
    body = bytes(received[HEAD.size :])
    if not body.startswith(nonce):
        raise garbage
    return body[NONCE_BYTES:]


def _name(number: int) -> str:
    return signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"


def _text(some: bytes | bytearray) -> str:
    return some.decode("utf-8", "replace")
