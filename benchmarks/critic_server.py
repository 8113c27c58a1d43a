"""Context managers that run `guerdon serve` or `guerdon serve-critic` in a process, with a client."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from guerdon import CriticClient, RewardClient
from guerdon.errors import DeadlineExceeded, Unavailable

START_S = 600

Client = TypeVar("Client", CriticClient, RewardClient)


def serving(model: Path, port: int, log: Path, *flags: str) -> contextlib.AbstractContextManager[CriticClient]:
    """Yields the client of a critic's server that is ready; raises SystemExit if it does not start."""
    return _serving("serve-critic", CriticClient(f"http://127.0.0.1:{port}"), model, port, log, *flags)


def serving_rewards(model: Path, port: int, log: Path, *flags: str) -> contextlib.AbstractContextManager[RewardClient]:
    """Yields the client of a reward model's server, likewise."""
    return _serving("serve", RewardClient(f"http://127.0.0.1:{port}"), model, port, log, *flags)


@contextlib.contextmanager
def _serving(kind: str, client: Client, model: Path, port: int, log: Path, *flags: str) -> Iterator[Client]:
    command = [sys.executable, "-m", "guerdon", kind, str(model), "--port", str(port), "--no-grpc", *flags]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as server, client:
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
