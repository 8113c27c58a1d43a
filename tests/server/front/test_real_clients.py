"""The clients that people already run, unchanged, against the server over both transports."""

import asyncio
import time
from types import ModuleType

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

import served
from guerdon.server.runtime import RunningServer
from served import Serve
from server.echo_service import EOS, EchoService, reward_of, reward_of_text

pytestmark = pytest.mark.filterwarnings("ignore:tritonclient.* doesn't support")

ROWS = [[5, 6, 7], [400, 500, 600, 700], [9]]
REWARDS = [[reward_of(row)] for row in ROWS]


@pytest.fixture(scope="module")
def pytriton() -> ModuleType:
    return pytest.importorskip("pytriton.client", reason="nvidia-pytriton is not installed")


@pytest.fixture(scope="module")
def running_server(serve: Serve) -> RunningServer:
    return serve(grpc_port=0, build=EchoService)


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, running_server: RunningServer) -> str:
    return running_server.http_url if request.param == "http" else running_server.grpc_url or ""


def padded(rows: list[list[int]], dtype: type = np.int64, fill: int = 0) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.full((len(rows), max(map(len, rows))), fill, dtype)
    for out, row in zip(tokens, rows, strict=True):
        out[: len(row)] = row
    return tokens, np.array([[len(row)] for row in rows], np.int64)


def token_inputs(library, *, binary: bool = True) -> list:
    tokens, lengths = padded(ROWS)
    inputs = []
    for name, array in (("tokens", tokens), ("sequence_lengths", lengths)):
        inputs.append(library.InferInput(name, list(array.shape), "INT64"))
        if library in (tritonclient.http, tritonclient.http.aio):
            inputs[-1].set_data_from_numpy(array, binary_data=binary)
        else:
            inputs[-1].set_data_from_numpy(array)
    return inputs


def address(url: str) -> str:
    return url.split("://")[1]


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_tritonclient_http_infers_in_both_forms(running_server, binary, compression):
    with tritonclient.http.InferenceServerClient(address(running_server.http_url)) as client:
        outputs = [tritonclient.http.InferRequestedOutput("rewards", binary_data=binary)]
        result = client.infer(
            "reward_model",
            token_inputs(tritonclient.http, binary=binary),
            outputs=outputs,
            request_id="r-1",
            request_compression_algorithm=compression,
            response_compression_algorithm=compression,
        )
    assert result.as_numpy("rewards").tolist() == REWARDS
    assert result.get_response()["id"] == "r-1"
    assert result.get_response()["parameters"] == {"weights_version": "1"}


def test_tritonclient_http_without_requested_outputs_gets_all_of_them(running_server):
    with tritonclient.http.InferenceServerClient(address(running_server.http_url)) as client:
        result = client.infer("many", token_inputs(tritonclient.http), model_version="1")
    assert result.as_numpy("rewards").tolist() == REWARDS
    assert result.as_numpy("attributes").tolist() == [[3, 5], [4, 400], [1, 9]]
    assert result.as_numpy("values").tolist() == padded(ROWS)[0].tolist()
    assert result.as_numpy("exceeded").tolist() == [[0], [0], [0]]
    assert result.as_numpy("step_rewards") is None


def test_tritonclient_http_reads_health_and_descriptions(running_server):
    with tritonclient.http.InferenceServerClient(address(running_server.http_url)) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("reward_model", "1")
        assert not client.is_model_ready("nobody")
        assert client.get_server_metadata()["name"] == "guerdon"
        assert client.get_model_config("reward_model")["max_batch_size"] == 65536
        names = [output["name"] for output in client.get_model_metadata("many")["outputs"]]
        assert names == [
            "rewards",
            "attributes",
            "values",
            "step_rewards",
            "step_counts",
            "exceeded",
            "sequence_lengths",
            "errors",
        ]
        assert [(model["name"], model["state"]) for model in client.get_model_repository_index()] == [
            ("reward_model", "READY"),
            ("many", "READY"),
        ]


def test_tritonclient_reads_statistics_over_both_transports():
    with (
        served.running(grpc_port=0, build=EchoService) as server,
        tritonclient.http.InferenceServerClient(address(server.http_url)) as over_http,
        tritonclient.grpc.InferenceServerClient(address(server.grpc_url)) as over_grpc,
    ):
        before = time.time()
        over_http.infer("many", token_inputs(tritonclient.http))
        over_grpc.infer("many", token_inputs(tritonclient.grpc))
        with pytest.raises(InferenceServerException):
            over_http.infer("many", [])
        found = over_http.get_inference_statistics()["model_stats"]
        assert [(one["name"], one["version"]) for one in found] == [("reward_model", "1"), ("many", "1")]
        assert found[0]["last_inference"] == found[0]["inference_count"] == 0
        assert (before - 1) * 1e3 < found[1]["last_inference"] < (time.time() + 1) * 1e3
        assert found[1]["inference_count"] == 2 * len(ROWS)
        assert found[1]["execution_count"] >= 2
        stats = found[1]["inference_stats"]
        assert (stats["success"]["count"], stats["fail"]["count"], stats["compute_infer"]["count"]) == (2, 1, 2)
        assert stats["success"]["ns"] >= stats["compute_infer"]["ns"] > 0
        assert stats["fail"]["ns"] > 0
        for arguments in (("many",), ("many", "1")):
            assert over_http.get_inference_statistics(*arguments)["model_stats"] == found[1:]
            (told,) = over_grpc.get_inference_statistics(*arguments).model_stats
            assert told.inference_stats.success.ns == stats["success"]["ns"]
            assert told.inference_count == 2 * len(ROWS)
        assert [one.name for one in over_grpc.get_inference_statistics().model_stats] == ["reward_model", "many"]
        for client in (over_http, over_grpc):
            with pytest.raises(InferenceServerException, match="unknown model 'nobody'"):
                client.get_inference_statistics("nobody")


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def test_outputs_in_forms_that_are_not_offered_are_refused(running_server, module):
    """And not sent in another, which their client would take for what it asked."""
    url = running_server.http_url if module is tritonclient.http else running_server.grpc_url
    shared, ranked = module.InferRequestedOutput("rewards"), module.InferRequestedOutput("rewards", class_count=1)
    shared.set_shared_memory("region", 12)
    with module.InferenceServerClient(address(url)) as client:
        for output, text in ((shared, "output 'rewards': shared memory"), (ranked, "classification .class_count. is")):
            with pytest.raises(InferenceServerException, match=text):
                client.infer("reward_model", token_inputs(module), outputs=[output])


async def test_tritonclient_http_aio(running_server):
    async with tritonclient.http.aio.InferenceServerClient(address(running_server.http_url)) as client:
        assert await client.is_model_ready("reward_model")
        assert (await client.get_model_config("reward_model"))["name"] == "reward_model"
        infer = client.infer
        results = await asyncio.gather(
            *(infer("reward_model", token_inputs(tritonclient.http.aio), request_id=str(i)) for i in range(20))
        )
    assert all(result.as_numpy("rewards").tolist() == REWARDS for result in results)
    assert [result.get_response()["id"] for result in results] == [str(i) for i in range(20)]


def test_tritonclient_grpc(running_server):
    with tritonclient.grpc.InferenceServerClient(address(running_server.grpc_url)) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("reward_model")
        assert client.get_server_metadata().name == "guerdon"
        assert client.get_model_metadata("reward_model").versions == ["1"]
        config = client.get_model_config("reward_model", as_json=True)["config"]
        assert {entry["name"]: entry["data_type"] for entry in config["input"]} == {
            "sentences": "TYPE_STRING",
            "messages": "TYPE_STRING",
            "tokens": "TYPE_INT64",
            "sequence_lengths": "TYPE_INT64",
            "input_ids": "TYPE_INT32",
            "group_ids": "TYPE_INT64",
            "prompt_lengths": "TYPE_INT64",
        }
        assert [model.name for model in client.get_model_repository_index().models] == ["reward_model", "many"]
        outputs = [tritonclient.grpc.InferRequestedOutput("rewards")]
        result = client.infer("reward_model", token_inputs(tritonclient.grpc), outputs=outputs, request_id="g-1")
        assert result.as_numpy("rewards").tolist() == REWARDS
        assert result.get_response().id == "g-1"
        assert result.get_response().parameters["weights_version"].string_param == "1"
        with pytest.raises(InferenceServerException, match="unknown model 'nobody'") as caught:
            client.get_model_metadata("nobody")
        assert caught.value.status() == "StatusCode.NOT_FOUND"


async def test_tritonclient_grpc_aio(running_server):
    async with tritonclient.grpc.aio.InferenceServerClient(address(running_server.grpc_url)) as client:
        assert await client.is_model_ready("reward_model")
        results = await asyncio.gather(
            *(client.infer("reward_model", token_inputs(tritonclient.grpc)) for _ in range(20))
        )
    assert all(result.as_numpy("rewards").tolist() == REWARDS for result in results)


@pytest.mark.parametrize("lazy", [True, False])
def test_pytriton_model_client(url, lazy, pytriton):
    """As NeMo-Aligner calls it: right-padded tokens and lengths [B, 1]."""
    tokens, lengths = padded(ROWS)
    with pytriton.ModelClient(url, "reward_model", lazy_init=lazy, init_timeout_s=120) as client:
        first = client.infer_batch(tokens=tokens, sequence_lengths=lengths)
        again = client.infer_batch(tokens=tokens[:1], sequence_lengths=lengths[:1])
        one = client.infer_sample(tokens=tokens[1], sequence_lengths=lengths[1])
    assert first["rewards"].dtype == np.float32
    assert first["rewards"].tolist() == REWARDS
    assert first["exceeded"].tolist() == [[0], [0], [0]]
    assert again["rewards"].tolist() == REWARDS[:1]
    assert one["rewards"].tolist() == REWARDS[1]


def test_pytriton_model_client_sends_sentences(url, pytriton):
    texts = ["a first text", "Grüße 🙂", "x"]
    sentences = np.char.encode(np.array(texts)[:, np.newaxis], "utf-8")
    with pytriton.ModelClient(url, "reward_model", init_timeout_s=120) as client:
        result = client.infer_batch(sentences=sentences)
        positional = client.infer_batch(sentences)
    assert result["rewards"].tolist() == [[reward_of_text(text)] for text in texts]
    assert positional["rewards"].tolist() == result["rewards"].tolist()


def test_pytriton_futures_client(url, pytriton):
    tokens, lengths = padded(ROWS)
    # Its second and later threads forget the URL's scheme and speak HTTP to any port, so over gRPC one thread it is.
    num_threads = 8 if url.startswith("http") else 1
    with pytriton.FuturesModelClient(
        url, "reward_model", max_workers=num_threads, init_timeout_s=120, inference_timeout_s=20
    ) as client:
        futures = [client.infer_batch(tokens=tokens, sequence_lengths=lengths) for _ in range(40)]
        assert all(future.result()["rewards"].tolist() == REWARDS for future in futures)


@pytest.mark.parametrize("lazy", [True, False])
async def test_pytriton_asyncio_client(url, lazy, pytriton):
    tokens, lengths = padded(ROWS)
    async with pytriton.AsyncioModelClient(url, "many", lazy_init=lazy, init_timeout_s=120) as client:
        results = await asyncio.gather(
            *(client.infer_batch(tokens=tokens, sequence_lengths=lengths) for _ in range(10))
        )
    for result in results:
        assert result["rewards"].tolist() == REWARDS
        assert result["values"].shape == (3, 4)


def test_trlx_call(running_server):
    """input_ids INT32, EOS appended and EOS-padded, no requested outputs, neither health nor config asked for."""
    ids, _ = padded([[*row, EOS] for row in ROWS], np.int32, fill=EOS)
    entry = tritonclient.grpc.InferInput("input_ids", list(ids.shape), "INT32")
    entry.set_data_from_numpy(ids)
    with tritonclient.grpc.InferenceServerClient(url=address(running_server.grpc_url), verbose=False) as client:
        rewards = client.infer("reward_model", [entry]).as_numpy("rewards")
    assert rewards.tolist() == [reward_of([*row, EOS]) for row in ROWS]


def test_errors_reach_each_client(url, pytriton):
    tokens, lengths = padded(ROWS)
    with pytriton.ModelClient(url, "reward_model", init_timeout_s=120) as client:
        with pytest.raises(Exception, match="sequence_lengths"):
            client.infer_batch(tokens=tokens)
        with pytest.raises(Exception, match="row 1: token id 900000"):
            client.infer_batch(tokens=np.array([[1], [900_000]]), sequence_lengths=np.array([[1], [1]]))
        assert client.infer_batch(tokens=tokens, sequence_lengths=lengths)["rewards"].tolist() == REWARDS


def test_a_message_larger_than_four_mebibytes_passes_both_ways(url, pytriton):
    tokens, lengths = np.ones((300, 4096), np.int64), np.full((300, 1), 4096)
    with pytriton.ModelClient(url, "many", init_timeout_s=120) as client:
        result = client.infer_batch(tokens=tokens, sequence_lengths=lengths)
    assert result["values"].shape == tokens.shape
    assert result["rewards"].tolist() == [[96.0]] * 300
