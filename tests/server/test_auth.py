"""Keys as they are read, and whose they are; what only this machine reaches, and what others do."""

import base64
import hmac
import ssl
from pathlib import Path
from typing import Any

import gevent.ssl
import grpc
import httpx
import numpy as np
import pytest
import requests
import tritonclient.grpc
import tritonclient.grpc.auth
import tritonclient.http
import tritonclient.http.aio
import tritonclient.http.auth
from tritonclient.utils import InferenceServerException

import certificates
from certificates import Certificates
from guerdon.errors import ConfigError, Forbidden, Unauthenticated
from guerdon.server import auth
from guerdon.server.auth import ANYBODY, Access, Caller
from guerdon.server.runtime import RunningServer, check_addresses
from guerdon.settings.access import AccessConfig, Role, check_reach, check_tls, is_loopback, strip_credentials
from guerdon.settings.config import ServerConfig
from guerdon.settings.fields import check_settings
from served import Serve
from server.echo_service import EchoService, reward_of_text
from server.keys import ADMIN, SCORE, TRAIN, bearer, keyed

SCORER = Caller("scorer", Role.SCORE)


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.fixture(autouse=True)
def no_keys_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GUERDON_API_KEYS", raising=False)


def test_a_key_has_its_holder_and_role(tmp_path: Path) -> None:
    access = Access(keyed(tmp_path))
    assert access.names == ("scorer", "trainer", "keeper")
    for header in (f"Bearer {SCORE}", f"bearer  {SCORE} ", f"Bearer {SCORE}".encode(), basic(f"anybody:{SCORE}")):
        assert access.caller(header) == SCORER
    assert access.caller(None, SCORE) == access.caller(None, SCORE.encode()) == SCORER
    assert access.caller(f"Bearer {ADMIN}", SCORE).role is Role.ADMIN


@pytest.mark.parametrize(
    "header",
    [
        None, "", "Bearer", "Bearer ", f"Bearer {SCORE[:-1]}", f"Bearer {SCORE}x", f"Bearer {SCORE} {SCORE}",
        f"Token {SCORE}", SCORE, basic(SCORE), basic(f"{SCORE}:"), basic(f"x:{SCORE} "), "Basic ***", "Basic AAA",
        f"Bearer {SCORE}\xff".encode("latin-1"), "Bearer \ud800",
    ],
)  # fmt: skip
def test_anything_else_is_nobodys(header: str | bytes | None, tmp_path: Path) -> None:
    with pytest.raises(Unauthenticated) as caught:
        Access(keyed(tmp_path)).caller(header)
    assert SCORE not in str(caught.value)


def test_keys_come_from_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUERDON_API_KEYS", f"score scorer {'n' * 16}, train other {'o' * 16}\nadmin third {'t' * 16}\n")
    access = Access(keyed(tmp_path))
    assert access.names == ("scorer", "trainer", "keeper", "other", "third")
    assert access.caller("Bearer " + "n" * 16) == access.caller(f"Bearer {SCORE}") == SCORER  # while one is replaced


def test_a_file_of_keys_can_be_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"# score, train and admin\nscore scorer {SCORE}\n  # one, two\n\ntrain trainer {TRAIN}\n"
    monkeypatch.setenv("GUERDON_API_KEYS", text)
    assert Access(AccessConfig()).names == ("scorer", "trainer")
    monkeypatch.delenv("GUERDON_API_KEYS")
    (tmp_path / "keys").write_text(text, encoding="utf-8-sig")  # as some editors save it
    assert Access(AccessConfig(api_keys_file=str(tmp_path / "keys"))).names == ("scorer", "trainer")


@pytest.mark.parametrize("text", [",", " ,\n, ", "# score a key", "\n#one, two\n  # three\n"])
def test_a_variable_in_which_is_no_key_starts_no_server(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever set it would have a server that needs no key, on every address."""
    config = ServerConfig(host="0.0.0.0", port=0, grpc_port=None)
    monkeypatch.setenv("GUERDON_API_KEYS", text)
    for start in (Access, EchoService, check_addresses):
        with pytest.raises(ConfigError, match="GUERDON_API_KEYS is set, and has no keys") as caught:
            start(config)
        assert "ROLE NAME KEY" in caught.value.help
    assert Access(keyed(tmp_path)).names == ("scorer", "trainer", "keeper")  # it only adds to a file
    monkeypatch.setenv("GUERDON_API_KEYS", " \n")  # as if it were not set
    with pytest.raises(ConfigError, match="need no key"):
        check_settings(config)


def test_without_keys_everybody_trains_and_nobody_is_admin() -> None:
    access = Access(AccessConfig())
    assert access.caller(None) == access.caller("Bearer nonsense") == ANYBODY
    ANYBODY.need(Role.TRAIN, "it")
    with pytest.raises(Forbidden, match="needs a key of the role admin, and this server was started without keys"):
        ANYBODY.need(Role.ADMIN, "it")
    with pytest.raises(Forbidden, match="it needs a key of the role train; scorer has the role score"):
        SCORER.need(Role.TRAIN, "it")


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("", "has no keys"),
        ("# only a comment", "has no keys"),
        ("score a", "entry 1 of .* is no key"),
        (f"score a {TRAIN} more", "entry 1 of .* is no key"),
        (f"\nroot a {TRAIN}", "entry 2 of .* does not begin with a role: score, train or admin"),
        (f"{TRAIN} a score", "entry 1 of .* does not begin with a role"),
        (f"score unknown {TRAIN}", "the name cannot be one"),
        (f"score a {TRAIN},", "the key of a cannot travel"),
        (f"score a/b {TRAIN}", "the name cannot be one"),
        ("score a 0123456789abcde", "the key of a has 15 characters"),
        ("score a 0123456789abcdeé", "the key of a cannot travel"),
        (f"score a {TRAIN}\nscore b {TRAIN}", "entry 2 of .* a key a second time"),
        (f"score a {TRAIN}\ntrain a {SCORE}", "entry 2 of .* another role for a"),
    ],
)
def test_a_wrong_file_is_refused_without_showing_a_key(lines: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(lines)
    with pytest.raises(ConfigError, match=says) as caught:
        Access(AccessConfig(api_keys_file=str(tmp_path / "keys")))
    shown = f"{caught.value} {caught.value.help}"
    assert caught.value.help
    assert not any(word in shown for word in lines.split() if len(word) >= 15)


def test_a_file_that_is_away_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the keys in .*absent"):
        Access(AccessConfig(api_keys_file=str(tmp_path / "absent")))


@pytest.mark.parametrize(
    ("host", "reaches"),
    [
        ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
        ("", False), ("10.0.0.1", False), ("example.com", False), ("127.0.0.1.example.com", False),
        ("::ffff:10.0.0.1", False),
    ],
)  # fmt: skip
def test_only_this_machine_reaches_a_loopback(host: str, reaches: bool) -> None:
    assert is_loopback(host) is reaches


def test_an_address_that_others_reach_needs_keys_or_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("0.0.0.0", "::", "", "10.0.0.1"):
        with pytest.raises(ConfigError, match="which other machines reach") as caught:
            check_settings(ServerConfig(host=host))
        assert "--allow-anonymous" in caught.value.help
    check_settings(ServerConfig(host="127.0.0.1"))
    check_settings(ServerConfig(host="0.0.0.0", api_keys_file="keys"))
    check_settings(ServerConfig(host="0.0.0.0", allow_anonymous=True))
    check_reach(AccessConfig(tls_cert="c", tls_key="k", tls_client_ca="a"), "0.0.0.0")
    with pytest.raises(ConfigError):  # TLS alone asks nobody who they are
        check_reach(AccessConfig(tls_cert="c", tls_key="k"), "0.0.0.0")
    monkeypatch.setenv("GUERDON_API_KEYS", f"score a {SCORE}")
    check_settings(ServerConfig(host="0.0.0.0"))


def test_tls_needs_all_of_its_files() -> None:
    for settings, missing in (
        (AccessConfig(tls_cert="c"), "tls_key"),
        (AccessConfig(tls_key="k"), "tls_cert"),
        (AccessConfig(tls_client_ca="a"), "tls_cert"),
    ):
        with pytest.raises(ConfigError, match=f"{missing} is not"):
            check_tls(settings)


def test_a_url_is_shown_without_its_key() -> None:
    for url in (f"http://x:{SCORE}@host:1/p", f"x:{SCORE}@host:1/p", f"http://{SCORE}@{SCORE}@host:1/p"):
        assert strip_credentials(url).removeprefix("http://") == "host:1/p"
    assert strip_credentials("grpc://host:1") == "grpc://host:1"


TEXTS = ["a first text", "another"]
REWARDS = [reward_of_text(text) for text in TEXTS]
SENTENCES = np.array([[text.encode()] for text in TEXTS], object)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> RunningServer:
    config = keyed(tmp_path_factory.mktemp("keys"))
    return serve(config=config, build=EchoService)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates.made(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, files: Certificates, serve: Serve) -> RunningServer:
    folder: Path = tmp_path_factory.mktemp("mutual")
    config = keyed(folder, tls_cert=files.cert, tls_key=files.key, tls_client_ca=files.ca)
    return serve(config=config, build=EchoService)


def address(url: str | None) -> str:
    return str(url).split("://")[1]


def sentences(library: Any) -> list[Any]:
    entry = library.InferInput("sentences", [len(TEXTS), 1], "BYTES")
    entry.set_data_from_numpy(SENTENCES)
    return [entry]


def check_triton(library: Any, client: Any, headers: dict[str, str] | None) -> None:
    """What tritonclient asks, all of it with the key."""
    assert client.is_server_ready()
    assert client.is_model_ready("reward_model", headers=headers)
    assert client.get_model_metadata("reward_model", headers=headers)
    assert client.get_model_config("reward_model", headers=headers)
    assert client.get_model_repository_index(headers=headers)
    result = client.infer("reward_model", sentences(library), headers=headers)
    assert result.as_numpy("rewards").ravel().tolist() == REWARDS


@pytest.mark.parametrize("library", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def test_tritonclient_sends_a_key_as_header_or_by_its_plugin(library: Any, server: RunningServer) -> None:
    url = address(server.http_url if library is tritonclient.http else server.grpc_url)
    with library.InferenceServerClient(url) as client:
        check_triton(library, client, {"authorization": f"Bearer {SCORE}"})
        with pytest.raises(InferenceServerException, match="this server needs a key"):
            client.infer("reward_model", sentences(library))
        client.register_plugin(library.auth.BasicAuth("me", SCORE))
        check_triton(library, client, None)


async def test_tritonclients_asyncio_sends_a_key(server: RunningServer) -> None:
    async with tritonclient.http.aio.InferenceServerClient(address(server.http_url)) as client:
        assert await client.is_model_ready("reward_model", headers=bearer(SCORE))
        result = await client.infer("reward_model", sentences(tritonclient.http), headers=bearer(SCORE))
    assert result.as_numpy("rewards").ravel().tolist() == REWARDS


def test_tritonclient_over_mutual_tls(mutual: RunningServer, files: Certificates) -> None:
    options = {"ca_certs": files.ca, "certfile": files.client_cert, "keyfile": files.client_key}
    http_client = tritonclient.http.InferenceServerClient(
        address(mutual.http_url), ssl=True, ssl_options={**options, "cert_reqs": gevent.ssl.CERT_REQUIRED}
    )
    with http_client as client:
        check_triton(tritonclient.http, client, bearer(SCORE))
    grpc_client = tritonclient.grpc.InferenceServerClient(
        address(mutual.grpc_url),
        ssl=True,
        root_certificates=files.ca,
        private_key=files.client_key,
        certificate_chain=files.client_cert,
    )
    with grpc_client as client:
        check_triton(tritonclient.grpc, client, {"authorization": f"Bearer {SCORE}"})


@pytest.mark.filterwarnings("ignore:tritonclient.* doesn't support")
@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_pytritons_client_shows_its_token_if_it_knows_the_models_config(scheme: str, server: RunningServer) -> None:
    """It asks for readiness and config without the token, and its other clients have none, as is documented."""
    pytest.importorskip("pytriton", reason="nvidia-pytriton is not installed")
    from pytriton.client import AsyncioModelClient, FuturesModelClient, ModelClient
    from pytriton.client.exceptions import PyTritonClientTimeoutError
    from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig

    url = str(server.http_url if scheme == "http" else server.grpc_url)
    config = TritonModelConfig(
        "reward_model",
        inputs=[TensorSpec("sentences", (1,), np.bytes_)],
        outputs=[TensorSpec("rewards", (1,), np.float32)],
    )
    known = {"model_config": config, "ensure_model_is_ready": False, "access_token": SCORE}
    with ModelClient(url, "reward_model", **known) as client:
        assert client.infer_batch(sentences=SENTENCES)["rewards"].ravel().tolist() == REWARDS
    unknowing = ModelClient(url, "reward_model", access_token=SCORE, init_timeout_s=1)
    with unknowing as client, pytest.raises((InferenceServerException, PyTritonClientTimeoutError)):
        client.infer_batch(sentences=SENTENCES)
    for other in (FuturesModelClient, AsyncioModelClient):
        with pytest.raises(TypeError, match="access_token"):
            other(url, "reward_model", access_token=SCORE)


def test_plain_http_clients(server: RunningServer) -> None:
    """A trainer that can only be given a URL writes the key there."""
    url, body = server.http_url.replace("://", f"://me:{SCORE}@"), {"query": TEXTS, "prompts": TEXTS}
    for library in (requests, httpx):
        assert library.post(f"{url}/get_reward", json=body).json()["rewards"] == REWARDS
        answer = library.post(f"{server.http_url}/get_reward", json=body, headers=bearer(SCORE))
        assert answer.json()["rewards"] == REWARDS
        assert library.post(f"{server.http_url}/get_reward", json=body).status_code == 401


def test_plain_http_clients_over_mutual_tls(mutual: RunningServer, files: Certificates) -> None:
    assert mutual.http_url.startswith("https://")
    url, body = mutual.http_url + "/get_reward", {"query": TEXTS, "prompts": TEXTS}
    pair = (files.client_cert, files.client_key)
    assert requests.post(url, json=body, headers=bearer(SCORE), verify=files.ca, cert=pair).json()["rewards"] == REWARDS
    context = ssl.create_default_context(cafile=files.ca)
    with pytest.raises(httpx.TransportError):
        httpx.post(url, json=body, headers=bearer(SCORE), verify=context)
    with pytest.raises(httpx.ConnectError):
        httpx.post(url, json=body, headers=bearer(SCORE))
    context.load_cert_chain(*pair)
    assert httpx.post(url, json=body, headers=bearer(SCORE), verify=context).json()["rewards"] == REWARDS
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert httpx.post(url, json=body, headers=bearer(SCORE), verify=context).json()["rewards"] == REWARDS
    assert httpx.post(url, json=body, verify=context).status_code == 401
    with grpc.insecure_channel(address(mutual.grpc_url)) as channel, pytest.raises(grpc.FutureTimeoutError):
        grpc.channel_ready_future(channel).result(timeout=1)


KEYS = {name: name[0] * 32 for name in ("first", "second", "third")}


def test_every_key_is_compared_to_its_end_whichever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("".join(f"score {name} {key}\n" for name, key in KEYS.items()))
    access = auth.Access(AccessConfig(api_keys_file=str(path)))
    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return hmac.compare_digest(a, b)

    class Watched:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(auth, "hmac", Watched)
    near = [KEYS["first"][:-1], KEYS["first"] + "x", KEYS["first"].upper(), KEYS["first"][:-1] + "x", "", "x" * 100_000]
    for key in (*KEYS.values(), *near):
        compared.clear()
        try:
            access.caller(f"Bearer {key}")
            is_known = True
        except Unauthenticated:
            is_known = False
        assert is_known == (key in KEYS.values())
        # All keys, and of each a digest of the same length, however long the guess is.
        assert compared == [(32, 32)] * len(KEYS)
