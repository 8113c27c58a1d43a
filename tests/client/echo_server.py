"""A server process of the echo service, which tests kill and start again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"}


class EchoProcess:
    """The process, ready when constructed; `http_url` and `grpc_url` are its addresses."""

    def __init__(
        self, http_port: int = 0, grpc_port: int = 0, *, script: str = __file__, arguments: tuple[str, ...] = ()
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, script, str(http_port), str(grpc_port), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=ENV,
        )
        assert self._process.stdout is not None
        self.http_url, self.grpc_url = self._process.stdout.readline().split()

    def again(self) -> EchoProcess:
        """Another process at the same addresses."""
        return EchoProcess(*self.ports())

    def ports(self) -> list[int]:
        """Its HTTP and its gRPC port."""
        return [int(url.rpartition(":")[2]) for url in (self.http_url, self.grpc_url)]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> EchoProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


if __name__ == "__main__":
    from guerdon.config import ServerConfig
    from guerdon.server import runtime
    from server.echo_service import EchoService

    run_config = ServerConfig(port=int(sys.argv[1]), grpc_port=int(sys.argv[2]))
    runtime.run(EchoService(), run_config, on_started=lambda http, grpc: print(http, grpc, flush=True))
