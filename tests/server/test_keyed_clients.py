"""The clients that people already run, with a key, over TLS and with certificates of their own."""

import ssl
from collections.abc import Iterator
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
from guerdon.server.runtime import RunningServer
from server.echo_service import EchoService, reward_of_text
from server.keys import SCORE, bearer, keyed

TEXTS = ["a first text", "another"]
REWARDS = [reward_of_text(text) for text in TEXTS]
SENTENCES = np.array([[text.encode()] for text in TEXTS], object)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    config = keyed(tmp_path_factory.mktemp("keys"))
    with RunningServer(EchoService(config), config) as server:
        yield server


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates.made(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, files: Certificates) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("mutual")
    config = keyed(folder, tls_cert=files.cert, tls_key=files.key, tls_client_ca=files.ca)
    with RunningServer(EchoService(config), config) as server:
        yield server


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
