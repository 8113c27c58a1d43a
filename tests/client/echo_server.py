"""A server process of the echo service, which tests kill and start again."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import traceback
import urllib.request
from pathlib import Path
from typing import Any

from ports import free_port

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"}


class EchoProcess:
    """The process, ready when constructed; `http_url` and `grpc_url` are its addresses."""

    def __init__(self, http_port: int = 0, grpc_port: int = 0, *, slow_s: float = 1.0, folder: str = "") -> None:
        """Serves the echo service or, given a folder, an arithmetic critic that saves there."""
        self._pid, self.http_url, self.grpc_url = start(
            (http_port or free_port(), grpc_port or free_port(), slow_s, folder)
        )
        self._pidfd = os.pidfd_open(self._pid)

    def again(self, slow_s: float = 1.0) -> EchoProcess:
        """Another process at the same addresses."""
        return EchoProcess(*self.ports(), slow_s=slow_s)

    def ports(self) -> list[int]:
        """Its HTTP and its gRPC port."""
        return [int(url.rpartition(":")[2]) for url in (self.http_url, self.grpc_url)]

    def num_requests(self) -> int:
        """How many of its first model's requests run or wait."""
        text = urllib.request.urlopen(f"{self.http_url}/metrics", timeout=120).read().decode()
        found = re.findall(
            r'^guerdon_num_requests_(?:running|waiting)\{model="reward_model"\} (\S+)$', text, re.MULTILINE
        )
        assert len(found) == 2
        return int(sum(map(float, found)))

    def kill(self) -> None:
        """Kills the process, and waits for its end."""
        if self._pidfd < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        select.select([self._pidfd], [], [])
        os.close(self._pidfd)
        self._pidfd = -1

    def __enter__(self) -> EchoProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


_LOCK = threading.Lock()  # one start at a time: all answer through one pipe


def start(arguments: tuple[Any, ...]) -> tuple[int, str, str]:
    """Returns the pid and the addresses of a new server, forked from a process that has imported it."""
    with _LOCK:
        process = _start_forker()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(arguments) + "\n")
        process.stdin.flush()
        pid, http_url, grpc_url = process.stdout.readline().split()
    return int(pid), http_url, grpc_url


@functools.cache
def _start_forker() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV
    )
    atexit.register(process.communicate)
    return process


def serve(http_port: int, grpc_port: int, slow_s: float, folder: str) -> None:
    """Serves until it is killed; writes the pid and the addresses to stdout when it listens."""
    service: Any
    if folder:
        service = ArithmeticService(folder)
    else:
        service = EchoService()
        service.scorer.slow_s = slow_s

    def report(http: str, grpc: str | None) -> None:
        print(os.getpid(), http, grpc, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    runtime.run(service, ServerConfig(port=http_port, grpc_port=grpc_port), on_started=report)


def fork_servers() -> None:
    """Forks a server for each line of stdin."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # has the kernel reap them
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            try:
                serve(*json.loads(line))
            except BaseException:
                traceback.print_exc()
            finally:
                print("failed", flush=True)  # else the test would wait
                os._exit(1)


if __name__ == "__main__":
    import gc

    import guerdon.server.front.grpc_server  # noqa: F401 - imported now, not by each server
    from guerdon.server import runtime
    from guerdon.settings.config import ServerConfig
    from server.arithmetic_critic import ArithmeticService
    from server.echo_service import EchoService

    gc.freeze()
    fork_servers()
