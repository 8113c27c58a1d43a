"""RewardModelServer: a user's padded `infer_fn`, driven by the client that NeMo-Aligner uses."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import torch

from guerdon import RewardClient, RewardModelServer
from guerdon.config import ServerConfig
from guerdon.errors import InvalidRequest, SampleFailed
from guerdon.server.runtime import RunningServer

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
    assert server.infer(sentences=np.array([[b"ab"], [b"c"]]))["rewards"].tolist() == [[195.0], [99.0]]
    with pytest.raises(InvalidRequest, match="sequence_lengths"):
        server.infer(tokens=tokens)
    with pytest.raises(SampleFailed, match="inf"):
        server.infer(tokens=np.array([[13]]), sequence_lengths=np.array([[1]]))


def test_lengths_are_rounded_up_and_batches_filled_up_as_asked() -> None:
    server = make(strip_sequence_length_to_multiple=8)
    server.infer(tokens=np.ones((3, 20), dtype=np.int64), sequence_lengths=np.array([[9], [3], [2]]))
    server.infer(tokens=np.ones((1, 20), dtype=np.int64), sequence_lengths=np.array([[20]]))
    assert shapes == [(4, 16), (1, 24)]


def test_requests_wait_for_company_and_share_a_padded_batch() -> None:
    server = make(max_queue_delay_microseconds=5_000_000)
    with (
        RunningServer(server.build_service(), ServerConfig(port=0, grpc_port=None)) as running,
        RewardClient(running.http_url) as client,
    ):
        asked = [client.submit(tokens=[[2] * n]) for n in (3, 5, 2, 4)]
        rewards = [future.result(30).rewards.tolist() for future in asked]
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
        httpx.Client(base_url=running.http_url, timeout=30) as client,
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
        by_tokens = client.infer_batch(tokens=tokens, sequence_lengths=np.array([[3], [4]])).result(30)
        by_text = client.infer_batch(sentences=np.array([[b"ab"], [b"c"]])).result(30)
    assert by_tokens["rewards"].tolist() == [[6.0], [22.0]]
    assert by_text["rewards"].tolist() == [[195.0], [99.0]]
