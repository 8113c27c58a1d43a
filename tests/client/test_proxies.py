"""HTTP calls through the proxies that the environment names."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from client.open_sockets import open_sockets
from guerdon.client import RewardClient
from guerdon.client.http_transport import _proxy


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket that HTTP_PROXY names."""
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(30.0)
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{listening.getsockname()[1]}")
        yield listening


def test_http_calls_go_through_the_proxy_of_the_environment(proxy: socket.socket) -> None:
    with ThreadPoolExecutor(1) as thread:

        def answer() -> bytes:
            connection, _ = proxy.accept()
            with connection:
                request = connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return request

        request = thread.submit(answer)
        with RewardClient("http://model.test:8000") as client:
            client.wait_ready(10.0)
        assert request.result(10.0).startswith(b"GET http://model.test:8000/v2/models/reward_model/ready ")


@pytest.mark.parametrize(
    ("url", "excluded", "is_bypassed"),
    [
        ("http://model.test:8000", "model.test", True),
        ("http://model.test:8000", "other.test, .test", True),
        ("http://model.test:8000", "model.test:8000", True),
        ("http://model.test:8000", "model.test:8001", False),
        ("http://model.test:8000", "odel.test", False),
        ("http://10.0.0.1:8000", "10.0.0.1", True),
        ("http://10.0.0.1:8000", "10.0.0.1:8000", True),
        ("http://[::1]:8000", "::1", True),
        ("http://model.test:8000", "*", True),
    ],
)
def test_no_proxy_excludes_hosts_and_ports(
    proxy: socket.socket, monkeypatch: pytest.MonkeyPatch, url: str, excluded: str, is_bypassed: bool
) -> None:
    monkeypatch.setenv("NO_PROXY", excluded)
    assert (_proxy(httpx.URL(url), None) is None) == is_bypassed


def test_a_proxys_host_that_vanishes_is_noticed_by_the_kernel(proxy: socket.socket) -> None:
    with RewardClient("http://model.test:8000") as client:
        future = client._submit(client._caller.describe("m"))
        connection, _ = proxy.accept()
        with connection:
            assert connection.recv(1)  # it is connected, and has its options
            (opened,) = [s for s in open_sockets() if s.getpeername() == proxy.getsockname()]
            with opened:
                assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                if hasattr(socket, "TCP_USER_TIMEOUT"):
                    assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 180_000
        future.cancel()
