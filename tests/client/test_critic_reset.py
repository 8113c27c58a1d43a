"""A critic that was set back under its client, and what futures that are kept hold."""

import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from guerdon.client import AsyncCriticClient, CriticClient
from guerdon.critic_core import TrainRequest
from guerdon.errors import CriticReset, InvalidRequest, TrainFailed
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from ports import free_port
from server.arithmetic_critic import FAIL_TOKEN, ArithmeticService, after, arrays_of, request
from server.helpers import wait_until

A, B, C = (arrays_of(request("", value)) for value in (3, 5, 7))


def start(folder: Path | None, port: int = 0, **settings: Any) -> RunningServer:
    config = ServerConfig(port=port or free_port(), grpc_port=0)
    return RunningServer(ArithmeticService(folder, **settings), config, grace_s=0.1)


def port_of(server: RunningServer) -> int:
    return int(server.http_url.rsplit(":", 1)[1])


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[RunningServer]:
    with start(tmp_path, global_batch_size=1) as server:
        yield server


def test_a_critic_that_began_anew_is_not_gone_on_with(caplog: pytest.LogCaptureFixture) -> None:
    with start(None) as server, CriticClient(server.http_url) as client:
        for i in range(3):
            assert client.train(**A, train_id=f"{i}").result().step == i + 1
        server.close()
        with start(None, port_of(server)):
            for name in (None, "mine"):
                future = client.train(**B, train_id=name)
                with pytest.raises(CriticReset, match=r"from step 0 on, .*seen step 3: .*--checkpoint-dir.*load"):
                    future.result()
                assert f"train request {future.train_id} failed" in caplog.text
            with pytest.raises(CriticReset):
                client.validate(**A)
            with CriticClient(server.http_url) as fresh:
                assert fresh.train(**B).result().step == 3


def test_a_critic_that_comes_back_as_it_was_is(tmp_path: Path) -> None:
    with start(tmp_path) as server, CriticClient(server.http_url) as client:
        first = client.train(**A, train_id="first").result()
        client.train(**B).result()
        server.close()
        with start(tmp_path, port_of(server)):
            assert client.train(**C).result().step == 3
            assert str(client.train(**A, train_id="first").result()) == str(first)  # known, and of an older step
            assert client.train(**A, train_id="last").result().step == 4
            assert client.train(**A, train_id="last").result().step == 4
            assert client.validate(**A).step == 4


def test_only_another_clients_load_is_a_reset(durable: RunningServer) -> None:
    with CriticClient(durable.http_url) as client, CriticClient(durable.http_url) as other:
        client.train(**A).result()
        name = client.save().name  # type: ignore[union-attr]
        client.train(**B).result()
        client.load(name)
        assert client.train(**C).result().step == 2
        other.load(name)
        with pytest.raises(CriticReset, match="somebody loaded a checkpoint"):
            client.train(**A).result()
        client.load(name)
        assert client.train(**A).result().step == 2


async def test_the_async_client_notices_too() -> None:
    with start(None) as server:
        async with AsyncCriticClient(server.http_url) as client:
            for _ in range(2):
                await client.train(**A)
            server.close()
            with start(None, port_of(server)):
                for name in (None, "mine"):
                    with pytest.raises(CriticReset):
                        await client.train(**A, train_id=name)
                with pytest.raises(CriticReset):
                    await client.validate(**A)


def alive(*train_ids: str) -> int:
    gc.collect()
    return sum(isinstance(found, TrainRequest) and found.id in train_ids for found in gc.get_objects())


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_futures_that_are_kept_hold_neither_requests_nor_the_client(
    durable: RunningServer, kind: str, young_objects: None
) -> None:
    client = CriticClient(durable.http_url if kind == "http" else str(durable.grpc_url))
    bad = arrays_of(request("", 1, 2, 3))
    bad["tokens"][2, 0] = FAIL_TOKEN
    good, failed, scores = client.train(**A), client.train(**bad), None
    assert good.result().step == 1
    with pytest.raises(TrainFailed):
        failed.result()
    scores = client.submit(tokens=[[1] * 1000])
    scores.result()
    assert not alive(good.train_id, failed.train_id)
    client_ref = weakref.ref(client)
    del client
    wait_until(lambda: (gc.collect(), client_ref() is None)[1])  # the thread that answered lets go last


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_failed_train_reports_its_completed_steps(durable: RunningServer, kind: str) -> None:
    bad = arrays_of(request("", 1, 2, 3))
    bad["tokens"][2, 0] = FAIL_TOKEN
    with CriticClient(durable.http_url if kind == "http" else str(durable.grpc_url)) as client:
        with pytest.raises(TrainFailed) as failed:
            client.train(**bad).result()
        assert failed.value.num_steps == 2
        assert client.infer(tokens=[[1]]).values[0].tolist() == [after([request("", 1, 2)], 1)]


def test_metrics_are_any_librarys_numbers(durable: RunningServer) -> None:
    torch = pytest.importorskip("torch")
    numbers = {"a": np.float32(1.5), "b": np.float64(2.5), "c": torch.tensor(3.5), "d": np.int64(4), "e": 5}
    with CriticClient(durable.http_url) as client:
        assert client.save(numbers).metrics == {"a": 1.5, "b": 2.5, "c": 3.5, "d": 4, "e": 5}  # type: ignore[union-attr]
        for wrong in (float("nan"), np.float32("inf"), "1.5", np.ones(2), None):
            with pytest.raises(InvalidRequest, match=r"metrics\['kl'\]"):
                client.save({"reward": 1.0, "kl": wrong})  # type: ignore[dict-item]


def test_a_reset_is_logged_as_every_failure_of_a_train(caplog: pytest.LogCaptureFixture) -> None:
    with start(None) as server, CriticClient(server.http_url) as client:
        client.train(**A).result()
        server.close()
        with start(None, port_of(server)), caplog.at_level(logging.ERROR):
            client.train(**A)
            with pytest.raises(CriticReset):  # the second time before it is made, as nobody has looked at the future
                [client.infer(tokens=[[1]]) for _ in range(2)]
    assert "CriticReset" not in caplog.text and "had seen step 1" in caplog.text
