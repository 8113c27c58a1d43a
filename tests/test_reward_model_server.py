"""RewardModelServer: a user's padded `infer_fn`, driven by the client that NeMo-Aligner uses."""

import dataclasses
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http

import served
import test_critic_server_trainer as critic
import test_reward_model_server as reward
import zoo
from guerdon import RetryPolicy, RewardClient, RewardModelServer
from guerdon.distributed.parts import BatchParts
from guerdon.engine.checkpoint.reward_models import load_reward_model
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.errors import ConfigError, InvalidRequest, SampleFailed, ServerFault
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig, ServerConfig

shapes: list[tuple[int, int]] = []


def infer_fn(inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The sum of the sequence's own tokens; 13 makes it infinite."""
    tokens, lengths = inputs
    shapes.append(tuple(tokens.shape))
    seen = torch.arange(tokens.shape[1])[None] < lengths[:, None]
    rewards = (tokens * seen).sum(1).float()
    return rewards.masked_fill((tokens == 13).any(1), float("inf"))[:, None]


def tokenize_func(sentences: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [torch.tensor([ord(c) for c in text]) for text in sentences]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])


def make(**kw: object) -> RewardModelServer:
    shapes.clear()
    sizes = {"inference_micro_batch_size": 4, "model_forward_micro_batch_size": 2, **kw}
    return RewardModelServer(infer_fn, tokenize_func, "reward_model", 0, **sizes)  # type: ignore[arg-type]


def test_infer_takes_tokens_or_sentences() -> None:
    server = make()
    tokens = np.array([[1, 2, 3, 0], [4, 5, 6, 7]])
    out = server.infer(tokens=tokens, sequence_lengths=np.array([[3], [4]]))
    assert out["rewards"].tolist() == [[6.0], [22.0]] and out["rewards"].dtype == np.float32
    for sentences in ([[b"ab"], [b"c"]], [["ab"], ["c"]]):
        assert server.infer(sentences=np.array(sentences))["rewards"].tolist() == [[195.0], [99.0]]
    assert server.infer(sentences=np.array([["é"]]))["rewards"].item() == ord("é")
    with pytest.raises(InvalidRequest, match="sequence_lengths"):
        server.infer(tokens=tokens)
    with pytest.raises(SampleFailed, match="inf"):
        server.infer(tokens=np.array([[13]]), sequence_lengths=np.array([[1]]))


NO_ROWS = {
    "longer than its row": ([[1, 2, 3]], [4]),
    "negative": ([[1, 2, 3]], [-1]),
    "a length too many": ([[1, 2, 3]], [3, 3]),
    "ids of floats": ([[1.0, 2.5]], [2]),
    "lengths of floats": ([[1, 2]], [1.5]),
    "a flat row": ([1, 2], [1, 1]),
}


@pytest.mark.parametrize("fault", NO_ROWS)
def test_rows_that_would_be_cut_are_refused(fault: str) -> None:
    tokens, lengths = (np.array(given) for given in NO_ROWS[fault])
    trainer = critic.make()
    for infer in (
        lambda: make().infer(tokens=tokens, sequence_lengths=lengths),
        lambda: trainer.run_inference(tokens=tokens, sequence_lengths=lengths),
        lambda: trainer.run_inference({"inputs": torch.from_numpy(tokens), "sequence_length": lengths}),
    ):
        with pytest.raises(InvalidRequest, match=r"lengths are|has length"):
            infer()


@pytest.mark.parametrize("fault", [*NO_ROWS, "two rows for one text"])
def test_a_tokenizer_whose_rows_would_be_cut_is_a_fault_of_the_server(fault: str) -> None:
    tokens, lengths = NO_ROWS.get(fault, ([[1, 2], [3, 4]], [2, 2]))
    server = RewardModelServer(infer_fn, lambda _: (np.array(tokens), np.array(lengths)), "reward_model", 0, 4, 2)
    with pytest.raises(ServerFault, match="tokenize_func"):
        server.infer(sentences=np.array([["ab"]]))
    with (
        RunningServer(server.build_service(), ServerConfig(port=0, grpc_port=None)) as running,
        RewardClient(running.http_url, policy=RetryPolicy(tries=1)) as client,
        pytest.raises(ServerFault, match="tokenize_func"),
    ):
        client.score(texts=["ab"])


def test_infer_computes_all_rows_in_this_process() -> None:
    server = make()
    server.scorer.parts = BatchParts(0, 2)  # as while it serves on two data-parallel ranks
    out = server.infer(tokens=np.array([[5, 6], [7, 8]]), sequence_lengths=np.array([[2], [2]]))
    assert out["rewards"].tolist() == [[11.0], [15.0]]


def test_lengths_are_rounded_up_and_batches_filled_up_as_asked() -> None:
    server = make(strip_sequence_length_to_multiple=8)
    server.infer(tokens=np.ones((3, 20), dtype=np.int64), sequence_lengths=np.array([[9], [3], [2]]))
    server.infer(tokens=np.ones((1, 20), dtype=np.int64), sequence_lengths=np.array([[20]]))
    assert shapes == [(4, 16), (1, 20)]  # no wider than what was sent


POSITIONS = 40


@pytest.mark.parametrize("length", [31, 33, 40])
def test_no_batch_is_wider_than_what_was_sent(length: int) -> None:
    """As to a model with a table of 40 positions, which 48 would not fit."""
    server = make(strip_sequence_length_to_multiple=16)
    with (
        RunningServer(server.build_service(), ServerConfig(port=0, grpc_port=None)) as running,
        RewardClient(running.http_url) as client,
    ):
        scores = client.score(tokens=[[2] * length, [3]], pad_to_length=POSITIONS)
    assert scores.rewards.tolist() == [2.0 * length, 3.0]
    assert shapes == [(2, min(-(-length // 16) * 16, POSITIONS))]


def test_one_requests_rows_stay_together() -> None:
    """NeMo-Aligner's default size is 1, which is preferred there, and no bound."""
    server = make(inference_micro_batch_size=1)
    with (
        RunningServer(server.build_service(), ServerConfig(port=0, grpc_port=None)) as running,
        RewardClient(running.http_url) as client,
    ):
        scores = client.score(tokens=[[20 + i, 1] for i in range(64)])
    assert scores.rewards.tolist() == [i + 21.0 for i in range(64)]
    assert shapes == [(64, 2)]


def test_infer_fn_runs_in_one_thread_at_a_time() -> None:
    running, overlaps = threading.Lock(), []

    def slow(inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        overlaps.append(not running.acquire(blocking=False))
        time.sleep(0.02)  # for another thread to come
        if not overlaps[-1]:
            running.release()
        return inputs[1].float()

    server = RewardModelServer(slow, tokenize_func, "reward_model", 0, 4, 2)
    start = threading.Barrier(8)

    def ask(length: int) -> float:
        start.wait(120)
        return server.infer(tokens=np.ones((1, 9), int), sequence_lengths=np.array([[length]]))["rewards"].item()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(1, 9))) == list(range(1, 9))
    assert overlaps == [False] * 8


def test_it_is_a_dataclass_with_nemo_aligners_fields() -> None:
    given = {
        "infer_fn": infer_fn,
        "tokenize_func": tokenize_func,
        "model_name": "a",
        "port": 7,
        "inference_micro_batch_size": [2, 4],
        "model_forward_micro_batch_size": 2,
        "strip_sequence_length_to_multiple": 8,
        "max_queue_delay_microseconds": 100.0,
    }
    server = RewardModelServer(*given.values())  # type: ignore[arg-type]
    assert {name: getattr(server, name) for name in given} == given
    assert [field.name for field in dataclasses.fields(server)][:8] == list(given)
    assert make().inference_micro_batch_size == make().preferred_batch_size == [4]


def test_requests_wait_for_company_and_share_a_padded_batch() -> None:
    server = make(max_queue_delay_microseconds=5_000_000)
    with (
        RunningServer(server.build_service(), ServerConfig(port=0, grpc_port=None)) as running,
        RewardClient(running.http_url) as client,
    ):
        asked = [client.submit(tokens=[[2] * n]) for n in (3, 5, 2, 4)]
        rewards = [future.result(120).rewards.tolist() for future in asked]
    assert rewards == [[6.0], [10.0], [4.0], [8.0]]
    assert shapes == [(4, 5)]


@pytest.fixture
def page() -> Iterator[httpx.Client]:
    """The server's page, which keeps samples."""
    server = make()
    server.config.dashboard_samples = True
    config = ServerConfig(port=0, grpc_port=None, dashboard_samples=True)
    with (
        RunningServer(server.build_service(), config) as running,
        httpx.Client(base_url=running.http_url, timeout=120) as client,
    ):
        yield client


def test_texts_are_tried_on_the_page_although_nobody_knows_their_pieces(page: httpx.Client) -> None:
    told = page.post("/dashboard/try", json={"prompt": "a", "responses": ["b", "\r"]})
    assert told.status_code == 200, told.text
    first, second = told.json()["results"]
    assert (first["reward"], first["num_tokens"], first["tokens"]) == (195.0, 2, None)
    assert second["reward"] is None and "inf" in second["error"]


def test_samples_that_were_sent_as_ids_are_told_without_their_text(page: httpx.Client) -> None:
    with RewardClient(str(page.base_url).rstrip("/")) as client:
        client.score(tokens=[[2, 3]])
    told = page.get("/dashboard/samples")
    assert told.status_code == 200, told.text
    (best,) = told.json()["best"]
    assert (best["reward"], best["prompt"], best["response"]) == (5.0, None, None)


def test_messages_are_refused_with_what_can_be_done(page: httpx.Client) -> None:
    """Another name of `infer_fn`'s parameter, which a function of texts is told of, would not help."""
    told = page.post("/pooling", json={"messages": [{"role": "user", "content": "a"}]})
    assert told.status_code == 400
    message = told.json()["error"]["message"]
    assert "reads no messages: it has no chat template; send sentences or tokens" in message


def test_numbers_that_belong_to_no_row_are_no_rows_rewards() -> None:
    def mean(inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return inputs[1].float().mean()

    server = RewardModelServer(mean, tokenize_func, "reward_model", 0, 4, 2)
    with (
        RunningServer(server.build_service(), ServerConfig(port=0, grpc_port=None)) as running,
        RewardClient(running.http_url) as client,
    ):
        errors = client.score(tokens=[[2] * n for n in (3, 5, 2, 4)]).errors
    assert all("infer_fn returned shape [] for" in str(error) for error in errors)


def test_the_client_that_nemo_aligner_uses_is_answered() -> None:
    pytriton_client = pytest.importorskip("pytriton.client")
    server = make()
    with (
        RunningServer(server.build_service(), ServerConfig(port=0, grpc_port=None)) as running,
        pytriton_client.FuturesModelClient(running.http_url, "reward_model") as client,
    ):
        tokens = np.array([[1, 2, 3, 0], [4, 5, 6, 7]])
        by_tokens = client.infer_batch(tokens=tokens, sequence_lengths=np.array([[3], [4]])).result(120)
        by_text = client.infer_batch(sentences=np.array([[b"ab"], [b"c"]])).result(120)
    assert by_tokens["rewards"].tolist() == [[6.0], [22.0]]
    assert by_text["rewards"].tolist() == [[195.0], [99.0]]


def regression(inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Three attributes a row: the sum of its tokens, its length, and the length's half; 13 makes the first infinite."""
    lengths = inputs[1].float()
    return torch.stack([infer_fn(inputs)[:, 0], lengths, lengths / 2], dim=1)


def test_a_regression_models_attributes_are_the_rewards_columns() -> None:
    server = RewardModelServer(regression, tokenize_func, "reward_model", 0, 4, 2)
    server.config.dashboard_samples = True
    tokens, lengths = np.array([[1, 2, 3, 0], [4, 5, 6, 7], [8, 9, 0, 0]]), np.array([[3], [4], [2]])
    want = [[6.0, 3.0, 1.5], [22.0, 4.0, 2.0], [17.0, 2.0, 1.0]]
    told = server.infer(tokens=tokens, sequence_lengths=lengths)["rewards"]
    assert told.tolist() == want and told.dtype == np.float32
    with (
        RunningServer(server.build_service(), ServerConfig(port=0, grpc_port=0, dashboard_samples=True)) as running,
        RewardClient(running.http_url) as by_http,
        RewardClient(running.grpc_url) as by_grpc,
    ):
        for client in (by_http, by_grpc):
            scores = client.score(tokens=[[1, 2, 3], [4, 13], [8, 9]])
            assert scores.attributes is not None
            np.testing.assert_allclose(scores.rewards, [3.5, np.nan, 20 / 3])
            np.testing.assert_allclose(scores.attributes, [want[0], [np.nan] * 3, want[2]])
            assert "inf" in str(scores.errors[1])
        answer = httpx.post(f"{running.http_url}/pooling", json={"input": ["ab"]}).json()
        assert answer["data"][0]["data"] == [195.0, 2.0, 1.0] and answer["data"][0]["reward"] == 66.0
        answer = httpx.post(f"{running.http_url}/classify", json={"input": ["ab"]}).json()
        assert answer["data"][0]["label"] == "LABEL_0"
        answer = httpx.post(f"{running.http_url}/predict", json={"inputs": "ab", "raw_scores": True}).json()
        assert [entry["label"] for entry in answer] == ["LABEL_0", "LABEL_1", "LABEL_2"]
        best = httpx.get(f"{running.http_url}/dashboard/samples").json()["best"][0]
        assert best["attributes"] == {"LABEL_0": 195.0, "LABEL_1": 2.0, "LABEL_2": 1.0}
        outputs = [{"name": "attributes"}, {"name": "rewards"}]
        inputs = [{"name": "sentences", "shape": [1, 1], "datatype": "BYTES", "data": ["ab"]}]
        body = {"inputs": inputs, "outputs": outputs}
        told = httpx.post(f"{running.http_url}/v2/models/reward_model/infer", json=body).json()["outputs"]
        assert {x["name"]: (x["shape"], x["data"]) for x in told} == dict.fromkeys(
            ("attributes", "rewards"), ([1, 3], [195.0, 2.0, 1.0])
        )


def annotate(url: str, model: str, sentences: list[str]) -> list[list[float]]:
    """What NeMo-Aligner's script attribute_annotate does: a request a sentence, and all that `rewards` has of it."""
    pytriton_client = pytest.importorskip("pytriton.client")
    encoded = np.char.encode(np.array(sentences)[..., np.newaxis], "utf-8")
    with pytriton_client.FuturesModelClient(url.removeprefix("http://"), model) as client:
        asked = [client.infer_batch(sentences=one) for one in np.split(encoded, len(encoded))]
        results = [future.result(120) for future in asked]
    assert [result["exceeded"].tolist() for result in results] == [[[0]]] * len(sentences)
    return [result["rewards"].flatten().tolist() for result in results]


def test_nemo_aligners_annotation_gets_every_attribute(tmp_path: Path) -> None:
    server = RewardModelServer(regression, tokenize_func, "reward_model", 0, 4, 2)
    with RunningServer(server.build_service(), ServerConfig(port=0, grpc_port=None)) as running:
        assert annotate(running.http_url, "reward_model", ["ab", "c"]) == [[195.0, 2.0, 1.0], [99.0, 1.0, 0.5]]

    folder = zoo.tokenizer(zoo.checkpoint("llama", tmp_path, num_labels=9))
    models = [
        ModelConfig(model=str(folder), name="apart", merge_attributes=False),
        ModelConfig(model=str(folder), name="merged"),
    ]
    texts = ["Say yes.", "no"]
    with served.running(*models) as running, RewardClient(running.http_url, "apart") as client:
        rows = TextEncoder.load(folder).encode(texts)
        want = zoo.reference_outputs(folder, rows)
        np.testing.assert_allclose(annotate(running.http_url, "apart", texts), want, atol=1e-4)
        merged = annotate(running.http_url, "merged", texts)
        np.testing.assert_allclose(merged, want.mean(axis=1, keepdims=True), atol=1e-4)
        scores = client.score(texts=texts)
        np.testing.assert_allclose(scores.attributes, want, atol=1e-4)
        np.testing.assert_allclose(scores.rewards, want.mean(axis=1), atol=1e-4)
        assert scores.attribute_names == tuple(f"LABEL_{i}" for i in range(9))


def test_rewards_that_are_not_merged_have_no_weights(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path, num_labels=3)
    for more in ({"attribute_weights": [1.0, 0.0, 0.0]}, {"mean": 1.0}, {"std": 2.0}):
        with pytest.raises(ConfigError, match="merge_attributes is off"):
            load_reward_model(ModelConfig(model=str(folder), merge_attributes=False, **more))


MAKE: list[Callable[..., Any]] = [reward.make, critic.make]


@pytest.fixture
def warned() -> Iterator[list[warnings.WarningMessage]]:
    """Records all warnings, of all threads and also repeated ones."""
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield seen
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_queue_delay_microseconds", -1),
        ("max_queue_delay_microseconds", math.nan),
        ("max_queue_delay_microseconds", math.inf),
        ("strip_sequence_length_to_multiple", 0),
        ("strip_sequence_length_to_multiple", -8),
    ],
)
def test_invalid_batch_settings_are_refused(make: Callable[..., Any], name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}") as refused:
        make(**{name: value})
    assert refused.value.help.startswith("give ")


@pytest.mark.parametrize("make", MAKE)
def test_the_smallest_settings_are_accepted(make: Callable[..., Any]) -> None:
    make(max_queue_delay_microseconds=0, strip_sequence_length_to_multiple=1)
    make(max_queue_delay_microseconds=0.5, strip_sequence_length_to_multiple=None)


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
@pytest.mark.parametrize("make", MAKE)
def test_rows_of_a_request_cause_no_warning(
    make: Callable[..., Any], module: Any, warned: list[warnings.WarningMessage]
) -> None:
    server, config = make(), ServerConfig(port=0, grpc_port=0)
    arrays = {"tokens": np.full((3, 5), 7), "sequence_lengths": np.full((3, 1), 5)}
    with RunningServer(server.build_service(), config) as running:
        url = running.http_url if module is tritonclient.http else running.grpc_url or ""
        with module.InferenceServerClient(url.partition("://")[2]) as client:
            inputs = [module.InferInput(name, array.shape, "INT64") for name, array in arrays.items()]
            for made, array in zip(inputs, arrays.values(), strict=True):
                made.set_data_from_numpy(array)
            client.infer("reward_model" if make is reward.make else "critic_infer", inputs)
    assert not [warning for warning in warned if "not writable" in str(warning.message)]


def test_read_only_arrays_cause_no_warning(warned: list[warnings.WarningMessage]) -> None:
    tokens, lengths = np.full((2, 5), 7), np.full((2, 1), 5)
    tokens.flags.writeable = lengths.flags.writeable = False
    _, values = critic.make().run_inference({"inputs": tokens, "sequence_length": lengths})
    rewards = reward.make().infer(tokens=tokens, sequence_lengths=lengths)["rewards"]
    assert values.shape == (2, 5) and rewards.tolist() == [[35.0], [35.0]]
    assert not [warning for warning in warned if "not writable" in str(warning.message)]
