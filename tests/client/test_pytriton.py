"""Both clients against a real PyTriton server of NeMo-Aligner's tensors."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from client import pytriton_server
from guerdon.client import AsyncRewardClient, RewardClient
from guerdon.errors import InvalidRequest, UnknownModel
from ports import free_port

pytest.importorskip("pytriton", reason="nvidia-pytriton is not installed")


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    ports = free_port(), free_port()
    process = pytriton_server.start(*ports)
    try:
        with RewardClient(f"127.0.0.1:{ports[0]}") as client:
            client.wait_ready(120.0)
        yield {"http": f"http://127.0.0.1:{ports[0]}", "grpc": f"grpc://127.0.0.1:{ports[1]}"}
    finally:
        pytriton_server.stop(process)


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, urls: dict[str, str]) -> str:
    return urls[request.param]


def test_tokens_and_sentences_with_hints_that_it_does_not_know(url: str) -> None:
    with RewardClient(url) as client:
        client.wait_ready(5.0)
        assert client.info().outputs == {"rewards": "FP32"}
        scores = client.score(tokens=[[500, 600, 7], [3]], groups=[0, 0], prompt_lengths=[1, 1], priority=2)
        assert (scores.rewards.tolist(), scores.errors) == ([107.0, 3.0], [None, None])
        assert list(client.score(texts=["größe", "a"], timeout_s=10.0)) == [5.0, 1.0]


def test_a_nan_is_a_failed_sample(url: str) -> None:
    with RewardClient(url) as client:
        scores = client.score(texts=["ok", "nan"])
    assert scores.errors == [None, "the server gave no finite reward"]
    assert np.isnan(scores.rewards[1])


@pytest.mark.slow
def test_many_at_once_of_different_widths(url: str) -> None:
    with RewardClient(url) as client:
        futures = [client.submit(tokens=[[1] * (i % 7 + 1)] * 2) for i in range(200)]
        assert [list(f.result(timeout=120.0)) for f in futures] == [[i % 7 + 1.0] * 2 for i in range(200)]


def test_inputs_that_it_lacks_are_refused_by_the_client(url: str) -> None:
    with RewardClient(url) as client, pytest.raises(InvalidRequest, match="takes no input 'messages'; it takes sent"):
        client.score(messages=[[{"role": "user", "content": "hi"}]])
    with RewardClient(url, "critic") as client, pytest.raises(UnknownModel, match="critic"):
        client.score(texts=["a"])


async def test_the_async_client_likewise(url: str) -> None:
    async with AsyncRewardClient(url) as client:
        await client.wait_ready(5.0)
        scores = await asyncio.gather(*(client.score(texts=["x" * i]) for i in range(1, 50)))
    assert [list(s) for s in scores] == [[float(i)] for i in range(1, 50)]
