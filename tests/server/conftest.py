"""What several files about servers share."""

from collections.abc import Iterator

import httpx
import pytest

from guerdon.server.runtime import RunningServer
from server.echo_service import EchoService


@pytest.fixture(scope="module")
def service() -> EchoService:
    return EchoService()


@pytest.fixture(scope="module")
def client(running_server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running_server.http_url, timeout=120) as client:
        yield client
