"""Runs commands in forks of a process that has imported torch and transformers, because the import takes seconds.

As a script it is that process, `forks.py SOCKET`. `Forks.wrapper` returns a program that stands for a command: it hands
its arguments, environment, working directory and standard streams to a fork, forwards signals, and exits with its
status.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path
from typing import NoReturn

WRAPPER = """#!{python} -IS
import json, os, signal, socket, sys
if {kind!r} == "python" and sys.argv[1:2] != ["-c"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as to:
    to.connect({path!r})
    asked = json.dumps([{kind!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(to, [len(asked).to_bytes(4, "little")], [0, 1, 2])
    to.sendall(asked)
    answers = to.makefile()
    pid = int(answers.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = int(answers.readline() or 70)
os._exit(status)
"""


class Forks:
    """The process that is forked; it starts when it is first needed, and ends with this process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._process: subprocess.Popen[bytes] | None = None

    def wrapper(self, kind: str) -> str:
        """Returns the text of a program that runs as `guerdon` or `python`, by `kind`, in a fork."""
        path = str(Path(self._folder.name) / "socket")
        if self._process is None:
            from processes import environment  # not there for the script

            command = [sys.executable, __file__, path]
            self._process = subprocess.Popen(
                command, env=environment() | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert self._process.stdout is not None and self._process.stdout.readline(), "the forks' process ended"
        return WRAPPER.format(python=sys.executable, kind=kind, path=path)


def serve(path: str) -> None:
    """Forks for each connection, until stdin is closed."""
    import torch.utils.tensorboard  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    gc.collect()
    gc.freeze()  # the forks share its pages as long as they do not touch them
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        if os.fork() == 0:  # this one accepts; its parent notices that the tests are over
            _die_with_parent()
            while True:
                to, _ = listener.accept()
                if os.fork() == 0:
                    listener.close()
                    _die_with_parent()
                    _handle(to)
                to.close()
        os.close(1)
        sys.stdin.buffer.read()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _handle(to: socket.socket) -> None:
    """Runs the command in a child, and tells its pid and its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, fds, _, _ = socket.recv_fds(to, 4, 3)
    kind, argv, folder, variables = json.loads(to.makefile("rb").read(int.from_bytes(size, "little")))
    if (pid := os.fork()) == 0:
        _die_with_parent()
        to.close()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        _exit(kind, argv)
    for fd in fds:
        os.close(fd)
    with contextlib.suppress(BrokenPipeError):
        to.sendall(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        to.sendall(f"{os.waitstatus_to_exitcode(status) % 256}\n".encode())
    os._exit(0)


def _exit(kind: str, argv: list[str]) -> NoReturn:
    """Runs the command and exits without freeing the modules, whose pages are shared."""
    status = 1
    try:
        status = _run(kind, argv)
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)


def _run(kind: str, argv: list[str]) -> int:
    sys.path[0] = ""  # as with -c and -m
    if kind == "python":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        sys.argv = argv[:1] + argv[2:]
        exec(argv[1], vars(main))
        return 0
    from guerdon.cli import main as command

    sys.argv = ["guerdon", *argv]
    return command(argv)


if __name__ == "__main__":
    serve(sys.argv[1])
