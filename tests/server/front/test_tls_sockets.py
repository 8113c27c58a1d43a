"""TLS on both transports: which versions and certificates pass, and what a connection without it costs."""

import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
import trustme
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from guerdon.errors import ConfigError
from guerdon.server.runtime import RunningServer, check_addresses
from guerdon.settings.config import ServerConfig
from served import Serve
from server.echo_service import EchoService
from server.helpers import INFER, body_of, tried_again, wait_until


@dataclass
class Files:
    """Where the PEM files are."""

    ca: str
    cert: str
    key: str
    client: str
    """A client's certificate and key."""
    stranger: str
    """The same, of another authority."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    names = Files(*(str(folder / name) for name in ("ca", "cert", "key", "client", "stranger")))
    server = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(names.ca)
    server.private_key_pem.write_to_path(names.key)
    for i, part in enumerate(server.cert_chain_pems):
        part.write_to_path(names.cert, append=i > 0)
    for path, made in ((names.client, authority), (names.stranger, trustme.CA())):
        made.issue_cert("trainer@example.org").private_key_and_cert_chain_pem.write_to_path(path)
    return names


def config_of(files: Files, *, mutual: bool = False) -> ServerConfig:
    config = ServerConfig(port=0, grpc_port=0, tls_cert=files.cert, tls_key=files.key, header_timeout_s=60)
    config.tls_client_ca = files.ca if mutual else None
    return config


@pytest.fixture(scope="module")
def server(files: Files, serve: Serve) -> RunningServer:
    return serve(config=config_of(files), build=EchoService)


@pytest.fixture(scope="module")
def mutual(files: Files, serve: Serve) -> RunningServer:
    return serve(config=config_of(files, mutual=True), build=EchoService)


def context_of(files: Files, client: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.ca)
    if client is not None:
        context.load_cert_chain(client)
    return context


def is_live(server: RunningServer, files: Files, client: str | None = None) -> bool:
    """Whether gRPC answers."""
    assert server.grpc_url is not None
    pem = Path(client).read_bytes() if client is not None else None
    credentials = grpc.ssl_channel_credentials(Path(files.ca).read_bytes(), pem, pem)
    with grpc.secure_channel(server.grpc_url.removeprefix("grpcs://"), credentials) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            return stub.ServerLive(pb.ServerLiveRequest(), timeout=120).live
        except grpc.RpcError:
            return False


def test_both_transports_speak_tls_and_say_so(server, files):
    assert server.http_url.startswith("https://")
    assert (server.grpc_url or "").startswith("grpcs://")
    with httpx.Client(base_url=server.http_url, verify=context_of(files)) as client:
        for rows in ([[5, 6]], [[7] * 4000] * 50):  # one record, and many
            response = client.post(INFER, content=body_of(rows))
            assert response.json()["outputs"][0]["data"] == [sum(row) % 1000 for row in rows]
    assert is_live(server, files)


def test_what_is_not_tls_gets_nothing(server):
    plain = server.http_url.replace("https", "http")
    with pytest.raises(httpx.TransportError):
        httpx.get(plain + "/v2/health/live")
    with grpc.insecure_channel((server.grpc_url or "").removeprefix("grpcs://")) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest(), timeout=120)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("version", ["TLSv1_1", "TLSv1_2", "TLSv1_3"])
def test_only_versions_that_hold_are_spoken(server, files, version):
    context = context_of(files)
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    address = httpx.URL(server.http_url)
    with socket.create_connection((address.host, address.port), 30) as raw:
        if version == "TLSv1_1":
            with pytest.raises((ssl.SSLError, ConnectionError)):
                context.wrap_socket(raw, server_hostname="127.0.0.1")
        else:
            with context.wrap_socket(raw, server_hostname="127.0.0.1") as secure:
                assert secure.version() == version.replace("_", ".")


@pytest.mark.parametrize(("who", "passes"), [("client", True), ("stranger", False), (None, False)])
def test_mutual_tls_wants_a_certificate_of_the_authority(mutual, files, who, passes):
    client = getattr(files, who) if who is not None else None
    try:
        with httpx.Client(verify=context_of(files, client)) as asking:
            found = asking.get(mutual.http_url + "/v2/health/live").status_code == 200
    except httpx.TransportError:
        found = False
    assert found is passes
    assert is_live(mutual, files, client) is passes


def test_refused_handshakes_are_told_of_once_a_minute(files, caplog):
    caplog.set_level("INFO", logger="guerdon.server.front.connections")
    with RunningServer(EchoService(), config_of(files, mutual=True)) as server:
        for _ in range(3):
            with pytest.raises(httpx.TransportError), httpx.Client(verify=context_of(files)) as client:
                client.get(server.http_url + "/v2/health/live")
        wait_until(lambda: bool(caplog.messages))
    told = [record.message for record in caplog.records if record.name == "guerdon.server.front.connections"]
    assert told == ["TLS handshake with 127.0.0.1 failed: PEER_DID_NOT_RETURN_A_CERTIFICATE"]


def test_the_core_of_grpc_tells_errors_alone(files, monkeypatch):
    """It would write of every connection without TLS, past the log's form and level."""
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    with RunningServer(EchoService(), config_of(files)):
        assert os.environ["GRPC_VERBOSITY"] == "ERROR"


@pytest.fixture(scope="module")
def hasty(files: Files, serve: Serve) -> RunningServer:
    config = config_of(files)
    config.header_timeout_s = 1.5
    return serve(config=config, build=EchoService)


@tried_again
def test_handshakes_that_do_not_go_on_end(hasty, files):
    address, process = httpx.URL(hasty.http_url), psutil.Process()
    with httpx.Client(verify=context_of(files)) as client:  # what it opens with the first request stays
        assert client.get(hasty.http_url + "/v2/health/live").status_code == 200
    before = process.num_fds()
    held = [socket.create_connection((address.host, address.port), 30) for _ in range(50)]
    for i, connection in enumerate(held):
        connection.sendall((b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n")[i % 3])
    with httpx.Client(verify=context_of(files)) as client:
        assert client.get(hasty.http_url + "/v2/health/live").status_code == 200
    for connection in held:
        connection.settimeout(30)
        try:
            while connection.recv(4096):
                pass
        except ConnectionError:
            pass
        connection.close()
    wait_until(lambda: process.num_fds() <= before)


def test_a_connection_beyond_the_limit_ends_the_one_that_waits_longest_for_its_tls(files):
    config = config_of(files)
    config.max_connections, config.header_timeout_s = 4, 120.0
    with RunningServer(EchoService(), config) as server:
        address = httpx.URL(server.http_url)
        held = [socket.create_connection((address.host, address.port), 30) for _ in range(4)]
        with httpx.Client(verify=context_of(files)) as client:
            assert client.get(server.http_url + "/v2/health/live").status_code == 200
        assert held[0].recv(1) == b""
        held[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            held[1].recv(1)
        for connection in held:
            connection.close()
        wait_until(lambda: server_connections(server) == 0)


def server_connections(server: RunningServer) -> int:
    """How many connections the server's process has at its HTTP port."""
    port = httpx.URL(server.http_url).port
    found = psutil.Process().net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port for one in found)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tls_cert": "nowhere.pem"}, r"cannot read nowhere\.pem"),
        ({"tls_key": "other"}, r"other cannot be read, or is not the private key of .*cert"),
        ({"tls_key": "text"}, r"text has no private key in PEM"),
        ({"tls_cert": "text"}, r"text has no certificate in PEM"),
        ({"tls_client_ca": "text"}, r"text has no certificate in PEM"),
        ({"tls_key": "encrypted"}, r"encrypted is encrypted"),
    ],
)
def test_files_that_do_not_fit_are_told_before_models_are_loaded(files, tmp_path, change, text):
    (tmp_path / "text").write_text("no certificate")
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(str(tmp_path / "other"))
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    kinds = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    (tmp_path / "encrypted").write_bytes(key.private_bytes(*kinds, serialization.BestAvailableEncryption(b"secret")))
    config = config_of(files)
    for name, value in change.items():
        setattr(config, name, str(tmp_path / value) if (tmp_path / value).exists() else value)
    with pytest.raises(ConfigError, match=text):
        check_addresses(config)
    with pytest.raises(ConfigError, match=text):
        RunningServer(EchoService(), config)
