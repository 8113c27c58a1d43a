"""The clients that people already run, unchanged, driving a critic as NeMo-Aligner's actor does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import orjson
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from guerdon.client import CriticClient
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from server.arithmetic_critic import ArithmeticService, after, arrays_of, request

pytriton_client = pytest.importorskip("pytriton.client", reason="nvidia-pytriton is not installed")
AsyncioModelClient, FuturesModelClient = pytriton_client.AsyncioModelClient, pytriton_client.FuturesModelClient
ModelClient = pytriton_client.ModelClient

pytestmark = pytest.mark.filterwarnings("ignore:tritonclient.* doesn't support")

TOKENS = np.array([[5, 6, 7, 0], [8, 9, 0, 0]])
LENGTHS = np.array([[3], [2]])


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningServer]:
    service = ArithmeticService(tmp_path, with_rewards=True, global_batch_size=2)
    with RunningServer(service, ServerConfig(port=0, grpc_port=0), grace_s=0.1) as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, running: RunningServer) -> str:
    return running.http_url if request.param == "http" else str(running.grpc_url)


def address(url: str) -> str:
    return url.split("://")[1]


def inputs_of(library: ModuleType, given: dict[str, np.ndarray]) -> list[Any]:
    inputs = []
    for name, array in given.items():
        datatype = {"i": "INT64", "f": "FP32", "O": "BYTES"}[array.dtype.kind]
        inputs.append(library.InferInput(name, list(array.shape), datatype))
        inputs[-1].set_data_from_numpy(array)
    return inputs


class RemoteCritic:
    """Connects as NeMo-Aligner's RemoteGPTRMCriticClient does: one futures client for each model."""

    def __init__(self, url: str) -> None:
        # Its second and later threads forget the URL's scheme and speak HTTP to any port.
        more = {"max_workers": 1} if url.startswith("grpc") else {}
        self._clients = {
            name: FuturesModelClient(url, f"critic_{name}", init_timeout_s=6000, inference_timeout_s=600_000, **more)
            for name in ("infer", "train", "save")
        }

    def infer_rm_critic(self, tokens: np.ndarray, lengths: np.ndarray, pad_to_length: int) -> tuple[Any, Any]:
        padded = np.pad(tokens, ((0, 0), (0, pad_to_length - tokens.shape[1])))
        output = self._clients["infer"].infer_batch(tokens=padded, sequence_lengths=lengths).result()
        return output["rewards"].flatten(), output["values"][:, : tokens.shape[1] - 1]

    def train(self, data: dict[str, np.ndarray]) -> Any:
        return self._clients["train"].infer_sample(**data)

    def save(self) -> Any:
        return self._clients["save"].infer_sample(dummy_var=np.array([0]))

    def __enter__(self) -> RemoteCritic:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()


def test_nemo_aligners_actor(url: str) -> None:
    asked = request("", 4.0, 2.0, 1.0)
    with RemoteCritic(url) as critic:
        rewards, values = critic.infer_rm_critic(TOKENS, LENGTHS, pad_to_length=8)
        assert rewards.tolist() == [18, 17]
        assert values.tolist() == [[5, 6, 7], [8, 9, 0]]
        assert (rewards.dtype, values.dtype) == (np.float32, np.float32)
        output = critic.train(arrays_of(asked)).result()
        assert list(output) == ["loss_mean"]
        assert (output["loss_mean"].dtype, output["loss_mean"].shape) == (np.float32, (1,))
        saved = critic.save().result()
        assert (list(saved), saved["status"].dtype, saved["status"].tolist()) == (["status"], np.int64, [0])
        _, values = critic.infer_rm_critic(TOKENS, LENGTHS, pad_to_length=4)
        assert values[0, 0] == 5 * after([asked], 2)
    with CriticClient(url) as client:
        assert [info.step for info in client.state().checkpoints] == [2]


@pytest.mark.parametrize("lazy", [True, False])
def test_pytritons_client_for_each_model(url: str, lazy: bool) -> None:
    def client(name: str) -> ModelClient:
        return ModelClient(url, f"critic_{name}", lazy_init=lazy, init_timeout_s=120)

    data = arrays_of(request("", 4.0, 2.0))
    with client("validate") as validate, client("train") as train, client("infer") as infer:
        assert validate.infer_sample(**data)["loss_mean"] == train.infer_sample(**data)["loss_mean"]
        assert train.infer_sample(**data, parameters={"train_id": "mine"})["loss_mean"] == [10.0]
        assert train.infer_sample(**data, parameters={"train_id": "mine"})["loss_mean"] == [10.0]
        assert infer.infer_batch(tokens=TOKENS, sequence_lengths=LENGTHS)["values"][0, 0] == 5 * 9.25
        sentences = np.char.encode(np.array([["a"], ["bc"]]), "utf-8")
        assert infer.infer_batch(sentences=sentences)["values"].tolist() == [[97 * 9.25, 0], [98 * 9.25, 99 * 9.25]]
        with pytest.raises(Exception, match=r"'mask' must have shape \[N, T-1\] = \[2, 2\]"):
            train.infer_sample(**(data | {"mask": np.ones((2, 3), np.float32)}))
        with pytest.raises(Exception, match="mask is 0 everywhere"):
            train.infer_sample(**(data | {"mask": data["mask"] * 0}))
    with client("offload") as offload, client("onload") as onload, client("state") as state, client("save") as save:
        assert offload.infer_sample(dummy_var=np.array([0]))["status"].tolist() == [0]
        assert orjson.loads(state.infer_sample(dummy_var=np.array([0]))["state"][0])["is_offloaded"]
        with client("train") as train, pytest.raises(Exception, match="offloaded"):
            train.infer_sample(**data)
        assert onload.infer_sample(dummy_var=np.array([0]))["status"].tolist() == [0]
        metrics = np.array([b'{"kl": 0.5}'], dtype=object)
        assert save.infer_sample(dummy_var=np.array([0]), metrics=metrics)["status"].tolist() == [0]
        assert (
            orjson.loads(state.infer_sample(dummy_var=np.array([0]))["state"][0])["checkpoints"][0]["metrics"]["kl"]
            == 0.5
        )
    with client("load") as load, client("infer") as infer:
        assert load.infer_sample(checkpoint=np.array([b"checkpoint-000001-step-2"], dtype=object))["status"] == [0]
        with pytest.raises(Exception, match="nonsense"):
            load.infer_sample(checkpoint=np.array([b"nonsense"], dtype=object))


async def test_pytritons_asyncio_client(url: str) -> None:
    asked = request("", 4.0)
    async with (
        AsyncioModelClient(url, "critic_train", init_timeout_s=120) as train,
        AsyncioModelClient(url, "critic_infer", init_timeout_s=120) as infer,
    ):
        assert (await train.infer_sample(**arrays_of(asked)))["loss_mean"].tolist() == [2.0]
        values = await asyncio.gather(*(infer.infer_batch(tokens=TOKENS, sequence_lengths=LENGTHS) for _ in range(5)))
    assert all(found["values"][0, 0] == 22.5 for found in values)


@pytest.mark.parametrize("library", [tritonclient.http, tritonclient.grpc])
def test_tritonclient(running: RunningServer, library: ModuleType) -> None:
    url = running.http_url if library is tritonclient.http else str(running.grpc_url)
    with library.InferenceServerClient(address(url)) as client:
        assert client.is_model_ready("critic_train")
        trained = client.infer("critic_train", inputs_of(library, arrays_of(request("", 4.0))), request_id="1")
        assert trained.as_numpy("loss_mean").tolist() == [2.0]
        assert orjson.loads(trained.as_numpy("report")[0])["step"] == 1
        outputs = [library.InferRequestedOutput("state")]
        state = client.infer("critic_state", [], outputs=outputs)
        assert orjson.loads(state.as_numpy("state")[0])["weights_version"] == "1+1"
        saved = client.infer("critic_save", [])
        assert saved.as_numpy("status").tolist() == [0]
        assert orjson.loads(saved.as_numpy("report")[0])["name"] == "checkpoint-000001-step-1"
        with pytest.raises(InferenceServerException, match="missing: mask"):
            client.infer("critic_train", inputs_of(library, arrays_of(request("", 4.0)))[:3])
        assert len(client.get_model_repository_index(**({} if library is tritonclient.http else {"as_json": True})))


@pytest.mark.parametrize("library", [tritonclient.http.aio, tritonclient.grpc.aio])
async def test_tritonclient_aio(running: RunningServer, library: ModuleType) -> None:
    is_http = library is tritonclient.http.aio
    plain = tritonclient.http if is_http else tritonclient.grpc
    async with library.InferenceServerClient(address(running.http_url if is_http else str(running.grpc_url))) as client:
        trained = await client.infer("critic_train", inputs_of(plain, arrays_of(request("", 4.0))))
        assert trained.as_numpy("loss_mean").tolist() == [2.0]
        found = await client.infer("critic_infer", inputs_of(plain, {"tokens": TOKENS, "sequence_lengths": LENGTHS}))
        assert found.as_numpy("values").tolist() == [[22.5, 27, 31.5, 0], [36, 40.5, 0, 0]]
        assert found.as_numpy("rewards").tolist() == [[18], [17]]
