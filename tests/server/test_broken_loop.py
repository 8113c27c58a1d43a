"""The thread that computes ends by a bug: who asks is told so, and the server ends, for whoever restarts it to see."""

import asyncio
import os
import subprocess
import sys

import httpx
import numpy as np
import pytest

from guerdon.core import ScoreRequest
from guerdon.errors import ServerFault
from guerdon.server import status
from guerdon.server.batching.scheduler import Scheduler
from server.echo_service import EchoService
from server.helpers import INFER, body_of

_SERVED = """\
from guerdon.settings.config import ServerConfig
from guerdon.server.batching.scheduler import Scheduler
from guerdon.server.runtime import run
from server.echo_service import EchoService
Scheduler.observe = None
run(EchoService(), ServerConfig(port=0, grpc_port=0), on_started=lambda http, _: print(http, flush=True))
"""


async def test_what_is_asked_afterwards_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "observe", None)
    service = EchoService()
    service.start()
    reply = await service.score("reward_model", ScoreRequest(tokens=[np.array([5])]))
    assert isinstance(reply.results[0], ServerFault)
    async with asyncio.timeout(30):
        await service.ending.wait()
    with pytest.raises(ServerFault, match="cannot compute any more") as raised:
        service.check_ready()
    assert raised.value is not service.loss and not raised.value.retryable
    assert not status.is_ready(service) and "cannot compute any more" in status.why_not_ready(service)
    await asyncio.to_thread(service.stop, 5.0)


def test_the_process_ends_with_an_error() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _SERVED]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            told = httpx.post(url + INFER, content=body_of([[5]]), timeout=60)
            assert (told.status_code, told.headers["guerdon-error"]) == (500, "ServerFault")
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "the thread that computes has ended" in said and "ServerFault: the server cannot compute" in said
