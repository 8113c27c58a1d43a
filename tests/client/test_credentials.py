"""Keys and certificates of the clients, over both transports, by threads and by asyncio; no text shows a key."""

import asyncio
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

import certificates
import served
from certificates import Certificates
from client.open_sockets import open_sockets
from guerdon.client import AsyncCriticClient, AsyncRewardClient, Credentials, CriticClient, RetryPolicy, RewardClient
from guerdon.client.addresses import Address, addresses
from guerdon.client.http_transport import _proxy
from guerdon.errors import ConfigError, Forbidden, InvalidRequest, Unauthenticated, Unreachable
from guerdon.server.runtime import RunningServer
from processes import by_itself, end_of_child, environment
from served import Serve
from server.arithmetic_critic import ArithmeticService
from server.echo_service import EchoService
from server.keys import SCORE, TRAIN, keyed

PATIENT = RetryPolicy.patient(200, wait_for_start=True)
"""By which a refusal that is tried again would hold the test up."""


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEY", "CA_FILE", "CERT_FILE", "KEY_FILE", "API_KEYS"):
        monkeypatch.delenv(f"GUERDON_{name}", raising=False)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> RunningServer:
    config = keyed(tmp_path_factory.mktemp("keyed"))
    return serve(config=config, build=EchoService)


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, running: RunningServer) -> str:
    return running.http_url if request.param == "http" else str(running.grpc_url)


def with_key(url: str, key: str) -> str:
    return url.replace("://", f"://me:{key}@")


def score(url: str, credentials: Credentials | None = None) -> list[float]:
    with RewardClient(url, policy=PATIENT, credentials=credentials) as client:
        return list(client.score(tokens=[[1, 2, 3]]))


async def score_async(url: str, credentials: Credentials | None = None) -> list[float]:
    async with AsyncRewardClient(url, policy=PATIENT, credentials=credentials) as client:
        return list(await client.score(tokens=[[1, 2, 3]]))


def test_a_key_comes_as_an_argument_by_the_environment_or_in_the_url(url: str, monkeypatch: Any) -> None:
    assert score(url, Credentials(SCORE)) == [6.0]
    assert asyncio.run(score_async(url, Credentials(SCORE))) == [6.0]
    assert score(with_key(url, SCORE), Credentials("another")) == [6.0]
    monkeypatch.setenv("GUERDON_API_KEY", SCORE)
    assert score(url) == [6.0]
    assert asyncio.run(score_async(url)) == [6.0]
    with pytest.raises(Unauthenticated):
        score(url, Credentials())  # those that are given count, and not the environment's


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_refused_key_is_said_at_once(url: str, key: str | None) -> None:
    started = time.monotonic()
    for wanted in (score, lambda *args: asyncio.run(score_async(*args))):
        with pytest.raises(Unauthenticated, match=rf"key.*\({url}; a key comes by GUERDON_API_KEY or credentials="):
            wanted(url, Credentials(key))
    with RewardClient(url, credentials=Credentials(key)) as client, pytest.raises(Unauthenticated):
        client.wait_ready(120.0)
    with RewardClient(url, credentials=Credentials(key)) as client, pytest.raises(Unauthenticated):
        client.info()
    assert time.monotonic() - started < 100


def test_a_role_that_is_too_small_is_said_at_once(tmp_path: Path) -> None:
    config = keyed(tmp_path)
    with RunningServer(ArithmeticService(server=config), config) as server:
        for url in (server.http_url, str(server.grpc_url)):
            with CriticClient(url, policy=PATIENT, credentials=Credentials(SCORE)) as client:
                client.wait_ready(120.0)
                assert len(client.infer(tokens=[[1, 2]])) == 1
                with pytest.raises(Forbidden, match=rf"critic_state needs a key of the role train.*\({url}; a key"):
                    client.state()
            with CriticClient(with_key(url, TRAIN), policy=PATIENT) as client:
                assert client.state().step == 0
                client.reconnect(20.0)
                assert client.state().step == 0

        async def state() -> int:
            async with AsyncCriticClient(server.http_url, credentials=Credentials(TRAIN)) as client:
                return (await client.state()).step

        assert asyncio.run(state()) == 0


@by_itself
def test_a_client_keeps_its_key_through_a_pickle_and_a_fork(url: str) -> None:
    def works(client: RewardClient) -> None:
        assert list(client.score(tokens=[[4]])) == [4.0]

    with RewardClient(url, credentials=Credentials(SCORE)) as client:
        works(client)
        with pickle.loads(pickle.dumps(client)) as copied:  # noqa: S301 - made here
            works(copied)
        assert end_of_child(lambda: works(client)) == 0
    os.environ["GUERDON_API_KEY"] = SCORE
    with RewardClient(url) as client:
        assert SCORE.encode() not in pickle.dumps(client)


@pytest.mark.parametrize("is_mutual", [False, True])
def test_tls_and_mutual_tls(is_mutual: bool, tmp_path: Path) -> None:
    files = certificates.made(tmp_path)
    config = keyed(tmp_path, tls_cert=files.cert, tls_key=files.key, tls_client_ca=files.ca if is_mutual else None)
    known = Credentials(SCORE, ca_file=files.ca)
    if is_mutual:
        known = replace(known, cert_file=files.client_cert, key_file=files.client_key)
    (tmp_path / "other").mkdir()
    others = certificates.made(tmp_path / "other")
    with served.running(config=config, build=EchoService) as server:
        for url in (server.http_url, str(server.grpc_url)):
            assert url.startswith(("https://", "grpcs://"))
            assert score(url, known) == [6.0]
            assert asyncio.run(score_async(url, known)) == [6.0]
            with pytest.raises(Unauthenticated):
                score(url, replace(known, api_key=None))
            _check_refused(url, [replace(known, ca_file=others.ca), replace(known, ca_file=None)])
            foreign = replace(known, cert_file=others.client_cert, key_file=others.client_key)
            for credentials in [replace(known, cert_file=None, key_file=None), foreign] if is_mutual else []:
                # The server ends the connection, and few say why: it may be away as well, and is tried again.
                with pytest.raises(Unreachable, match="GUERDON_CERT_FILE"):
                    RewardClient(url, credentials=credentials).score(texts=["a"])


def _check_refused(url: str, refused: list[Credentials]) -> None:
    """That a certificate which one side does not trust is said at once, and not tried again."""
    started = time.monotonic()
    for credentials in refused:
        with pytest.raises(Unreachable, match="GUERDON_CA_FILE"):
            score(url, credentials)
        with RewardClient(url, credentials=credentials) as client, pytest.raises(Unreachable):
            client.wait_ready(120.0)
    assert time.monotonic() - started < 100


def test_a_server_without_tls_is_reported_at_once(running: RunningServer) -> None:
    _check_refused(running.http_url.replace("http", "https"), [Credentials()])


def test_a_servers_certificate_for_another_name_is_said_at_once(tmp_path: Path) -> None:
    files = certificates.made(tmp_path, "elsewhere.example.com")
    config = keyed(tmp_path, tls_cert=files.cert, tls_key=files.key)
    with served.running(config=config, build=EchoService) as server:
        for url in (server.http_url, str(server.grpc_url)):
            _check_refused(url, [Credentials(SCORE, ca_file=files.ca)])


def test_plain_http_to_a_tls_port_raises_and_names_the_scheme(tmp_path: Path) -> None:
    files = certificates.made(tmp_path)
    config = keyed(tmp_path, tls_cert=files.cert, tls_key=files.key)
    with served.running(config=config, build=EchoService) as server:
        for url, right in ((server.http_url, "https"), (str(server.grpc_url), "grpcs")):
            plain = RetryPolicy(timeout_s=10, tries=1)
            with (
                RewardClient(url.replace(right, right[:-1]), policy=plain, credentials=Credentials(SCORE)) as client,
                pytest.raises(Unreachable, match=f"{right}:// for TLS"),
            ):
                client.score(texts=["a"])


@pytest.mark.parametrize("scheme", ["https", "grpcs"])
def test_files_that_do_not_fit(scheme: str, tmp_path: Path) -> None:
    files: Certificates = certificates.made(tmp_path)
    for wrong in (
        Credentials(ca_file=str(tmp_path / "absent.pem")),
        Credentials(ca_file=files.key),
        Credentials(cert_file=files.cert, key_file=files.client_key),
        Credentials(cert_file=files.cert, key_file=str(tmp_path / "absent.key")),
    ):
        with pytest.raises(ConfigError, match=r"cannot read certificates in .*\.(pem|key)"):
            RewardClient(f"{scheme}://localhost:1", credentials=wrong)
    with pytest.raises(ConfigError, match="without cert_file"):
        Credentials(key_file=files.key)
    for key, what in (("", "is empty"), ("a\nb", "has a line break"), ("é", "a character that no header takes")):
        with pytest.raises(ConfigError, match=f"the API key .*{what}"):
            Credentials(key)


def test_nobody_is_asked_for_an_encrypted_keys_password(tmp_path: Path) -> None:
    files, encrypted = certificates.made(tmp_path), tmp_path / "encrypted.key"
    key = load_pem_private_key(Path(files.client_key).read_bytes(), None)
    encrypted.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    own = {"cert_file": files.client_cert, "key_file": str(encrypted)}
    code = f"from guerdon.client import Credentials; Credentials(**{own}).tls()"
    keyboard, typed = os.pipe()  # at which nobody sits
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=keyboard, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
            env=environment(), start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(keyboard)
        os.close(typed)
    assert "ConfigError: cannot read certificates in" in done.stderr


def test_user_info_becomes_the_key_of_its_server() -> None:
    first, second = addresses(["http://x:a%2Fb@one:1/", "grpcs://two:2", "http://x:c@one:1"], Credentials("d"))
    assert first == Address("http://one:1", Credentials("a/b"))
    assert second == Address("grpcs://two:2", Credentials("d"))
    assert addresses("x:k@[::1]:5", None) == [Address("http://[::1]:5", Credentials("k"))]


SECRET = "s3cr3t-0123456789"


@pytest.mark.parametrize(
    "url",
    [
        f"http://x:{SECRET}/y@host:1", f"http://x:{SECRET}#y@host:1", f"http://x:{SECRET}?y@host:1",
        f"http://x:{SECRET}@host:port", f"http://x:1/{SECRET}@host:1", f"http://{SECRET}@host:1", f"ftp://x:{SECRET}@h",
        f"grpc://x:{SECRET}@host", f"http://x:{SECRET}%0a@host:1", f"http://x:{SECRET}@", f"x:{SECRET}://y@host:1",
        f"http://x:{SECRET}@[::1", f"http://x:@{SECRET}@host:99999",
    ],
)  # fmt: skip
def test_no_error_shows_a_urls_key(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RewardClient(url)
    assert SECRET not in str(caught.value)


def test_nothing_that_is_said_of_a_server_shows_its_key() -> None:
    assert SECRET not in repr(Credentials(SECRET)) + repr(addresses(f"http://x:{SECRET}@host:1", None))
    for scheme in ("http", "grpc"):
        with RewardClient(f"{scheme}://x:{SECRET}@127.0.0.1:1") as client:
            with pytest.raises(Unreachable) as caught:
                client.score(texts=["a"])
            assert "127.0.0.1:1" in str(caught.value)
            assert SECRET not in str(caught.value)


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
            client.wait_ready(120.0)
        assert request.result(120.0).startswith(b"GET http://model.test:8000/v2/models/reward_model/ready ")


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
