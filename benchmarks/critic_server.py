"""A `guerdon serve-critic` process and a client for it, while a `with` lasts."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from guerdon import CriticClient
from guerdon.errors import DeadlineExceeded, Unavailable

START_S = 600


@contextlib.contextmanager
def serving(model: Path, port: int, log: Path, *flags: str) -> Iterator[CriticClient]:
    """The client of a server of `model` that is ready; raises SystemExit where it does not start."""
    command = [sys.executable, "-m", "guerdon", "serve-critic", str(model), "--port", str(port), "--no-grpc", *flags]
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as server,
        CriticClient(f"http://127.0.0.1:{port}") as client,
    ):
        try:
            for _ in range(START_S):
                if server.poll() is not None:
                    raise SystemExit(f"the server did not start; see {log}")
                with contextlib.suppress(Unavailable, DeadlineExceeded):
                    client.wait_ready(timeout_s=1)
                    break
            yield client
        finally:
            server.terminate()
