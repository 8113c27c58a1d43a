"""A server process of the echo service, which tests kill and start again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"}


class EchoProcess:
    """The process, ready when constructed; `http_url` and `grpc_url` are its addresses."""

    def __init__(
        self,
        http_port: int = 0,
        grpc_port: int = 0,
        *,
        script: str = __file__,
        arguments: tuple[str, ...] = (),
        slow_s: float = 1.0,
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, script, str(http_port), str(grpc_port), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=ENV | {"ECHO_SLOW_S": str(slow_s)},
        )
        assert self._process.stdout is not None
        self.http_url, self.grpc_url = self._process.stdout.readline().split()

    def again(self, slow_s: float = 1.0) -> EchoProcess:
        """Another process at the same addresses."""
        return EchoProcess(*self.ports(), slow_s=slow_s)

    def ports(self) -> list[int]:
        """Its HTTP and its gRPC port."""
        return [int(url.rpartition(":")[2]) for url in (self.http_url, self.grpc_url)]

    def num_requests(self) -> int:
        """How many of its first model's requests run or wait."""
        text = urllib.request.urlopen(f"{self.http_url}/metrics", timeout=30).read().decode()
        found = re.findall(
            r'^guerdon_num_requests_(?:running|waiting)\{model="reward_model"\} (\S+)$', text, re.MULTILINE
        )
        assert len(found) == 2
        return int(sum(map(float, found)))

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
    from guerdon.server import runtime
    from guerdon.settings.config import ServerConfig
    from server.echo_service import EchoService

    run_config = ServerConfig(port=int(sys.argv[1]), grpc_port=int(sys.argv[2]))
    service = EchoService()
    service.scorer.slow_s = float(os.environ["ECHO_SLOW_S"])
    runtime.run(service, run_config, on_started=lambda http, grpc: print(http, grpc, flush=True))
