"""The processes between the server and an isolated function: a template, and below it a keeper for each child.

The template imports the function once, and forks the keepers. It ends when the server closes its channel, however the
server ended, and ends everything below it before.

A keeper passes samples to its child, watches what it uses, and ends it with all its descendants at a limit. It adopts
orphans, so everything that a child started, in whatever session, is below the keeper, and nothing else is. It calls
nothing of the user's; the child does, one sample at a time, until it is killed or its keeper leaves.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import numpy as np

from guerdon.core import Score
from guerdon.engine.functions import FunctionForm, as_scores, import_function, read_form
from guerdon.engine.isolation import channel, process_tree
from guerdon.engine.isolation.channel import ChildAnswer, ChildLimits, Import, Imported, Report
from guerdon.errors import Exit, SampleFailed, StartError, describe

TICK_S = 0.02
"""How often a child that computes is measured."""
END_S = 5.0
"""How long ending a child may take; only processes inside the kernel survive so long."""
_MAX_PRINTED_BYTES = 4_096
_CHUNK_BYTES = 65_536
_MAX_FILES = 1024
_FORK = b"f"
"""What the server sends with a keeper's end of a channel."""


class _Ended(Exception):
    """The child has to be ended, or has ended; the arguments are a reason and a text."""


@dataclass(frozen=True, slots=True)
class Work:
    """What each child computes: the imported function, what it takes, and what one sample may use."""

    function: Callable[..., Any]
    form: FunctionForm
    limits: ChildLimits


class Keeper:
    """Runs in a process of its own, which the template has forked, until the server closes `server`."""

    def __init__(self, server: socket.socket, folder: str, work: Work) -> None:
        self._server, self._folder, self._work, self._limits = server, folder, work, work.limits
        self._pid = os.getpid()
        self._child = 0
        self._baseline_bytes = 0
        self._status: int | None = None

    def run(self) -> None:
        """Answers the server's samples until it closes the channel; then ends everything below this process."""
        process_tree.adopt_orphans()
        self._start_child()
        try:
            while (request := channel.receive(self._server)) is not None:
                report, is_reusable = self._answer(request)
                if is_reusable and not report.num_left:
                    channel.send(self._server, channel.encode(report))
                    continue
                self._end_child()
                self._start_child()
                channel.send(self._server, channel.encode(report))
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
        is_reusable = answer[:1] != channel.LEAVES
        return Report(answer=_text(answer[1:]), printed=_text(printed), num_left=num_left), is_reusable

    def _exchange(self, request: bytes, printed: bytearray) -> bytes:
        """Returns the child's answer with its first byte; raises _Ended."""
        nonce = os.urandom(channel.NONCE_BYTES)
        unsent, received = memoryview(channel.frame(nonce + request)), bytearray()
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
        ends = time.monotonic() + END_S
        # The kernel closes a process's files before it gives it a status.
        while process_tree.is_exiting(self._child) and time.monotonic() < ends:
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
        self._channel, theirs = socket.socketpair()
        self._output, output = os.pipe()
        self._status = None
        self._child = os.fork()
        if not self._child:
            try:
                self._server.close()
                self._channel.close()
                os.close(self._output)
                run_child(theirs, output, self._pid, self._folder, self._work)
            except BaseException as e:
                sys.excepthook(type(e), e, e.__traceback__)
                os._exit(Exit.FAILED)
            finally:
                os._exit(Exit.DONE)
        theirs.close()
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
    if len(received) < channel.HEAD.size:
        return None
    (size,) = channel.HEAD.unpack_from(received)
    if not channel.NONCE_BYTES < size <= channel.MAX_ANSWER_BYTES or len(received) > channel.HEAD.size + size:
        raise garbage
    if len(received) < channel.HEAD.size + size:
        return None
    body = bytes(received[channel.HEAD.size :])
    if not body.startswith(nonce):
        raise garbage
    return body[channel.NONCE_BYTES :]


def _name(number: int) -> str:
    return signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"


def _text(some: bytes | bytearray) -> str:
    return some.decode("utf-8", "replace")


# ---------------------------------------------------------------------------------------- inside of the child


def run_child(line: socket.socket, output: int, keeper: int, folder: str, work: Work) -> None:
    """Answers samples over `line` until it closes; `output` becomes stdout and stderr, `folder` TMPDIR."""
    os.setsid()
    process_tree.die_with_parent(keeper)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None  # the template's
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    with open("/proc/self/oom_score_adj", "w") as file:  # the kernel should end a child before the server
        file.write("1000")
    process_tree.limit(resource.RLIMIT_CORE, 0)
    process_tree.limit(resource.RLIMIT_NOFILE, _MAX_FILES)
    process_tree.limit(resource.RLIMIT_FSIZE, work.limits.memory_bytes)
    process_tree.limit(resource.RLIMIT_DATA, process_tree.data_bytes(os.getpid()) + work.limits.memory_bytes)
    while (request := channel.receive(line)) is not None:
        nonce, sample = request[: channel.NONCE_BYTES], request[channel.NONCE_BYTES :]
        answer = _call(work, json.loads(sample))
        is_spent = not _flush() or answer.is_out_of_memory
        channel.send(line, nonce + (channel.LEAVES if is_spent else channel.STAYS) + channel.encode(answer))


def _call(work: Work, arguments: dict[str, Any]) -> ChildAnswer:
    try:
        sample = arguments.pop("sample")
        if work.form.takes == "tokens":
            sample = np.array(sample, dtype=np.int64)
        values = work.function([sample], **{name: [value] for name, value in arguments.items()})
        (result,) = as_scores(values, 1, getattr(work.function, "__name__", "the function"))
    except MemoryError:
        return ChildAnswer(is_out_of_memory=True)
    except BaseException as e:  # SystemExit as well: only its sample fails
        *callers, (frame, line) = traceback.walk_tb(e.__traceback__)
        place = f" ({os.path.basename(frame.f_code.co_filename)}, line {line})" if callers else ""
        result = SampleFailed(f"the function raised {describe(e)}{place}")
        with contextlib.suppress(BaseException):  # stderr may be closed
            traceback.print_tb(e.__traceback__ and e.__traceback__.tb_next)
            print(describe(e), file=sys.stderr)  # noqa: T201 - for the log; the whole text may have any size
    return ChildAnswer(reward=result.reward) if isinstance(result, Score) else ChildAnswer(error=str(result))


def _flush() -> bool:
    """Returns whether stdout and stderr still work; the function may have closed or replaced them."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        return False
    return True


def main(descriptor: int) -> None:
    """Serves the server at the other end of the descriptor's socket."""
    server = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    for number in (signal.SIGINT, signal.SIGTERM):  # the server decides when its accepted samples are done
        signal.signal(number, signal.SIG_IGN)
    asked = channel.receive(server)
    if asked is None:
        return
    wanted = msgspec.json.decode(asked, type=Import)
    try:
        function = import_function(wanted.function)
        form = read_form(function, wanted.function)
    except StartError as e:
        channel.send(server, channel.encode(Imported(error=str(e), help=e.help)))
        return
    process_tree.adopt_orphans()
    gc.collect()
    gc.freeze()  # so that children do not copy memory to mark it
    folder = tempfile.mkdtemp(prefix="guerdon-")
    try:
        channel.send(server, channel.encode(Imported(form)))
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

    def _fork(self, line: socket.socket) -> None:
        self._num_keepers += 1
        if keeper := os.fork():
            line.close()
            self._keepers.add(keeper)
            return
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._server.close()
            folder = os.path.join(self._folder, str(self._num_keepers))
            Keeper(line, folder, self._work).run()
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
