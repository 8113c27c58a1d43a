"""The critic's clients against a real server, over both transports; its critic computes by arithmetic."""

import asyncio
import copy
import gc
import logging
import pickle
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, as_completed, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.critic_server import CriticProcess
from client.echo_server import ENV
from client.open_sockets import open_sockets
from guerdon.client import AsyncCriticClient, CriticClient, RetryPolicy
from guerdon.core import ScoreReply, ScoreRequest
from guerdon.errors import (
    Cancelled,
    GuerdonError,
    InvalidRequest,
    Offloaded,
    Overloaded,
    StorageFailed,
    TrainFailed,
    Unavailable,
    UnknownModel,
    Unreachable,
)
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from server.arithmetic_critic import FAIL_TOKEN, SLOW_TOKEN, WAIT_TOKEN, ArithmeticService, after, arrays_of, request
from server.helpers import wait_until
from tiers import slow_but


class ScriptedService(ArithmeticService):
    """The service of the arithmetic critic, which first raises what stands in `script` for each model's name."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.script: dict[str, list[GuerdonError]] = {}
        self.num_calls = 0

    async def call(self, name: str, asked: Any, client: str = "") -> Any:
        if not isinstance(asked, ScoreRequest):
            self._act(name)
        return await super().call(name, asked, client)

    async def score(self, name: str, request: ScoreRequest, client: str = "", **more: Any) -> ScoreReply:
        self._act(name)
        return await super().score(name, request, client, **more)

    def _act(self, name: str) -> None:
        self.num_calls += 1
        if self.script.get(name):
            raise self.script[name].pop(0)


@pytest.fixture
def service(tmp_path: Path) -> ScriptedService:
    return ScriptedService(tmp_path, global_batch_size=2)


@pytest.fixture
def server(service: ScriptedService) -> Iterator[RunningServer]:
    with RunningServer(service, ServerConfig(port=0, grpc_port=0), grace_s=0.1) as running:
        yield running
        service.trainer.go.set()


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, server: RunningServer) -> str:
    return server.http_url if request.param == "http" else str(server.grpc_url)


QUICK = RetryPolicy(backoff_s=0.02, max_backoff_s=0.1, tries=100_000)


def weight_of(client: CriticClient) -> float:
    """The critic's weight, which is its value of token 1."""
    return float(client.infer(tokens=[[1]]).values[0][0])


# --- values -----------------------------------------------------------------------------------------------------


def test_values_of_tokens_and_texts(url: str) -> None:
    with CriticClient(url) as client:
        client.wait_ready(120.0)
        scores = client.infer(tokens=[[1, 2, 3], np.array([7])], groups=[0, 1], prompt_lengths=[1, 0])
        assert [row.tolist() for row in scores.values] == [[1, 2, 3], [7]]
        assert {row.dtype for row in scores.values} == {np.dtype(np.float32)}
        assert (scores.rewards, scores.errors, scores.weights_version) == (None, [None, None], "1")
        assert scores.queue_s + scores.compute_s > 0
        assert [row.tolist() for row in client.infer(texts=["abc", "d"]).values] == [[97, 98, 99], [100]]


def test_values_of_padded_rows_are_those_of_the_rows_without_padding(url: str) -> None:
    padded = np.array([[1, 2, 3], [4, 0, 0]])
    with CriticClient(url) as client:
        expected = client.infer(tokens=[[1, 2, 3], [4]]).values
        for got in (client.infer(padded, lengths=[3, 1]), client.submit(padded, lengths=[3, 1]).result()):
            assert [row.tolist() for row in got.values] == [row.tolist() for row in expected]


def test_a_failed_sample_leaves_its_neighbours(url: str) -> None:
    with CriticClient(url) as client:
        scores = client.infer(tokens=[[1, 2], [-5]])
    assert scores.errors[0] is None
    assert "token id -5" in str(scores.errors[1])
    assert scores.values[0].tolist() == [1, 2]
    assert np.isnan(scores.values[1]).all()


def test_rewards_come_with_the_values_if_requested() -> None:
    with RunningServer(ArithmeticService(with_rewards=True), ServerConfig(port=0, grpc_port=0)) as running:
        for url in (running.http_url, str(running.grpc_url)):
            with CriticClient(url) as client:
                alone, both = client.infer(tokens=[[1, 2], [7]]), client.infer_with_rewards(tokens=[[1, 2], [7]])
                for scores in (alone, both):
                    assert [row.tolist() for row in scores.values] == [[1, 2], [7]]
                assert alone.rewards is None
                assert both.rewards is not None and both.rewards.tolist() == [3, 7]


def test_rewards_are_refused_without_a_reward_model(url: str) -> None:
    with CriticClient(url) as client:
        for _ in range(2):  # the second time the model is known
            with pytest.raises(InvalidRequest, match=r"critic_infer' gives no rewards; .*--reward-model"):
                client.infer_with_rewards(tokens=[[1]])


def test_an_unknown_critic_is_named(url: str) -> None:
    with CriticClient(url, "other") as client:
        with pytest.raises(UnknownModel, match="unknown model 'other_infer'; served here: critic_infer"):
            client.infer(tokens=[[1]])
        with pytest.raises(UnknownModel, match="other_infer"):
            client.wait_ready(120.0)


# --- training ---------------------------------------------------------------------------------------------------


def test_training_is_reported_and_seen_by_the_next_values(url: str) -> None:
    asked = request("", 4.0, 2.0, 1.0)
    with CriticClient(url) as client:
        future = client.train(**arrays_of(asked))
        assert weight_of(client) == after([asked], 2) == (0.5 + 6) / 2 + 1
        report = future.result()
        assert report.id == future.train_id
        assert (report.step, report.num_steps, report.num_tokens, len(report.losses)) == (2, 2, 3, 2)
        assert report.weights_version == client.infer(tokens=[[1]]).weights_version == "1+2"
        assert np.isnan(report.explained_variance)


def test_padding_of_rows_is_not_learnt(url: str) -> None:
    tokens, target = [[1, 2, 3, 4], [5, 6]], [[9, 9, 3.0], [5.0]]
    with CriticClient(url) as client:
        report = client.train(tokens, target, target, [[0, 0, 1], [1]]).result()
        assert report.num_tokens == 2
        assert weight_of(client) == 0.5 + 8


def test_arrays_changed_after_the_call_are_not_trained_on(url: str, service: ScriptedService) -> None:
    service.script["critic_train"] = [Unavailable("not yet")] * 3
    asked = request("", 4.0)
    with CriticClient(url, policy=QUICK) as client:
        future = client.train(**arrays_of(asked))
        asked.returns[:] = 100.0
        future.result()
        assert weight_of(client) == 4.5


def test_a_known_id_is_answered_as_the_first_time(url: str) -> None:
    asked = request("", 4.0)
    with CriticClient(url) as client, CriticClient(url) as other:
        first = client.train(**arrays_of(asked), train_id="mine").result()
        client.train(**arrays_of(asked)).result()
        again = other.train(**arrays_of(asked), train_id="mine").result()
        assert (again.id, again.step) == (first.id, first.step) == ("mine", 1)
        assert client.state().step == 2
        with pytest.raises(InvalidRequest, match="mine"):
            other.train(**arrays_of(request("", 5.0)), train_id="mine").result()


def test_the_order_of_the_calls_is_the_order_at_the_server(url: str, service: ScriptedService) -> None:
    """However many are on their way, and whichever of them is sent again."""
    rng = random.Random(7)
    service.script["critic_train"] = [Unavailable("a") for _ in range(5)]
    service.script["critic_infer"] = [Overloaded("b", 0.0) for _ in range(20)]
    weight = 1.0
    with CriticClient(url, policy=QUICK, max_in_flight=16) as client:
        found: list[tuple[float, Future[Any]]] = []
        for _ in range(120):
            if rng.random() < 0.25:
                asked = request("", float(rng.randrange(8)))
                weight = after([asked], weight=weight)
                client.train(**arrays_of(asked))
            else:
                found.append((weight, client.submit(tokens=[[1]])))
        for expected, future in found:
            np.testing.assert_allclose(future.result(timeout=120.0).values[0][0], expected, rtol=1e-6)
    assert service.num_calls == 145


def test_values_under_way_are_not_those_of_a_later_train(url: str, service: ScriptedService) -> None:
    service.script["critic_infer"] = [Unavailable("not yet")] * 5
    with CriticClient(url, policy=QUICK) as client:
        before = client.submit(tokens=[[1]])
        client.train(**arrays_of(request("", 4.0)))
        assert client.submit(tokens=[[1]]).result().values[0][0] == 4.5
        assert before.result().values[0][0] == 1.0


def test_validation_changes_nothing_and_goes_beside_values(url: str) -> None:
    asked = request("", 4.0, 2.0)
    with CriticClient(url) as client:
        report = client.validate(**arrays_of(asked))
        assert (report.loss, report.num_steps, report.step) == (1.0, 1, 0)
        assert weight_of(client) == 1.0


def test_an_error_of_the_critic_names_row_and_column(url: str) -> None:
    asked = request("", 4.0, 2.0)
    asked.returns[1, 1] = np.nan
    with CriticClient(url) as client:
        with pytest.raises(InvalidRequest, match="returns is nan in row 1, column 1"):
            client.train(**arrays_of(asked)).result()
        with pytest.raises(InvalidRequest, match="one row of two tokens"):
            client.validate([[1]], [[]], [[]], [[]])
        assert client.state().step == 0


# --- errors of futures ------------------------------------------------------------------------------------------


def test_an_error_that_nobody_looked_at_is_raised_by_the_next_call(
    url: str, service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    failing = arrays_of(request("", 4.0, 4.0, 4.0, first_token=WAIT_TOKEN))
    failing["tokens"][2, 0] = FAIL_TOKEN
    with CriticClient(url) as client:
        future = client.train(**failing, train_id="lost")
        with pytest.raises(TimeoutError):
            future.result(timeout=0.0)
        service.trainer.go.set()
        wait([future])  # which is no look either
        assert "train request lost failed: global batch 1 failed" in caplog.text
        with pytest.raises(TrainFailed, match="global batch 1 failed") as raised:
            client.train(**arrays_of(request("", 1.0)))
        assert any("train request lost had failed" in note for note in raised.value.__notes__)
        assert client.state().step == 1  # raised once, and the call that raised was not made
        with pytest.raises(TrainFailed):
            future.result()


@pytest.mark.parametrize("look", ["result", "exception", "as_completed", "callback", "waiting"])
def test_an_error_that_somebody_looked_at_is_raised_there_alone(url: str, look: str, service: ScriptedService) -> None:
    with CriticClient(url) as client:
        asked = arrays_of(request("", 4.0, 4.0, 4.0, first_token=WAIT_TOKEN))
        asked["tokens"][2, 0] = FAIL_TOKEN
        future = client.train(**asked)
        seen: list[BaseException | None] = []
        if look == "callback":
            future.add_done_callback(lambda f: seen.append(f.exception()))
        if look == "waiting":
            threading.Thread(target=lambda: seen.append(future.exception())).start()
            wait_until(lambda: future._condition._waiters)
        with pytest.raises(TimeoutError):
            future.result(timeout=0.01)  # a look that saw nothing
        service.trainer.go.set()
        wait([future])
        if look == "result":
            with pytest.raises(TrainFailed):
                future.result()
        elif look == "exception":
            assert isinstance(future.exception(), TrainFailed)
        elif look == "as_completed":
            assert [type(f.exception()) for f in as_completed([future])] == [TrainFailed]
        assert client.state().step == 1


def test_each_of_several_errors_is_raised(url: str) -> None:
    failing = arrays_of(request("", 4.0, first_token=FAIL_TOKEN))
    with CriticClient(url) as client:
        futures = [client.train(**failing) for _ in range(2)]
        wait(futures)
        for _ in futures:
            with pytest.raises(TrainFailed):
                client.state()
        assert client.state().step == 0


def test_a_full_disk_is_an_error_of_its_own(url: str, service: ScriptedService) -> None:
    service.script["critic_train"] = [StorageFailed("the disk is full")]
    with CriticClient(url) as client:
        with pytest.raises(StorageFailed, match="the disk is full"):
            client.train(**arrays_of(request("", 4.0))).result()
        assert service.num_calls == 1


# --- checkpoints and the device ---------------------------------------------------------------------------------


def test_saving_and_going_back(url: str) -> None:
    with CriticClient(url) as client:
        client.train(**arrays_of(request("", 4.0)))
        first = client.save({"kl": 0.25})
        assert first is not None
        assert (first.step, first.metrics["kl"], first.weights_version) == (1, 0.25, "1+1")
        client.train(**arrays_of(request("", 4.0)))
        state = client.state()
        assert (state.step, state.num_unsaved, state.is_durable, state.is_offloaded) == (2, 1, True, False)
        assert [info.name for info in state.checkpoints] == [first.name]
        loaded = client.load(first.name)
        assert loaded is not None
        assert loaded.step == client.state().step == 1
        assert weight_of(client) == 4.5
        with pytest.raises(InvalidRequest, match="nonsense"):
            client.load("nonsense")
        client.train(**arrays_of(request("", 4.0)))
        client.load()
        assert client.state().step == 1


def test_values_under_way_are_not_those_of_a_checkpoint_loaded_later(url: str, service: ScriptedService) -> None:
    with CriticClient(url, policy=QUICK) as client:
        client.save()
        client.train(**arrays_of(request("", 4.0))).result()
        service.script["critic_infer"] = [Unavailable("not yet")] * 5
        before = client.submit(tokens=[[1]])
        client.load()
        assert before.result().values[0][0] == 4.5
        assert weight_of(client) == 1.0


def test_an_offloaded_critic_refuses_at_once(url: str, service: ScriptedService) -> None:
    with CriticClient(url, policy=RetryPolicy(backoff_s=30.0)) as client:
        client.offload()
        assert client.state().is_offloaded
        with pytest.raises(Offloaded):
            client.infer(tokens=[[1]])
        with pytest.raises(Offloaded):
            client.train(**arrays_of(request("", 4.0))).result()
        client.onload()
        assert weight_of(client) == 1.0


# --- servers that go and come back ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", slow_but(("grpc",), ["http", "grpc"]))
def test_a_killed_server_loses_nothing_and_trains_on_nothing_twice(kind: str, tmp_path: Path) -> None:
    all_asked = [request("", float(i % 7), 1.0, first_token=SLOW_TOKEN if i % 4 == 3 else 1) for i in range(12)]
    process = CriticProcess(str(tmp_path))
    try:
        with CriticClient(process.http_url if kind == "http" else process.grpc_url, policy=QUICK) as client:
            client.wait_ready(120.0)
            futures = [client.train(**arrays_of(asked)) for asked in all_asked]
            last = client.submit(tokens=[[1]])
            for i in (3, 7):  # a slow one
                wait_until(futures[i - 1].done)
                process.kill()
                process = process.again()
            assert last.result(timeout=120.0).values[0][0] == np.float32(after(all_asked))
            assert [future.result().step for future in futures] == list(range(1, 13))
            assert client.state().step == 12
    finally:
        process.kill()


def test_an_address_that_never_answered_fails_at_once() -> None:
    with CriticClient("127.0.0.1:9") as client:
        with pytest.raises(Unreachable, match="is the server running there"):
            client.infer(tokens=[[1]])
        with pytest.raises(Unreachable):
            client.train(**arrays_of(request("", 4.0))).result()


async def test_a_host_that_vanishes_is_noticed_by_the_kernel(server: RunningServer) -> None:
    """A train request may take hours, so no time-out can tell a slow server from one that lost its power."""
    address = ("127.0.0.1", int(server.http_url.rpartition(":")[2]))
    with CriticClient(server.http_url) as client:
        client.state()
        async with AsyncCriticClient(server.http_url) as other:
            await other.state()
            connected = [s for s in open_sockets() if s.getpeername() == address]
            assert len(connected) == 2
            assert all(s.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1 for s in connected)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # needed to notice that sent data is not acknowledged
                assert {s.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for s in connected} == {180_000}
            for opened in connected:
                opened.close()


# --- the client itself ------------------------------------------------------------------------------------------


def test_a_cancelled_call_is_not_sent_and_delays_nobody(url: str, service: ScriptedService) -> None:
    with CriticClient(url) as client:
        first = client.train(**arrays_of(request("", 4.0, first_token=WAIT_TOKEN)))
        wait_until(lambda: service.trainer.trained)
        second, scores = client.train(**arrays_of(request("", 4.0))), client.submit(tokens=[[1]])
        third = client.train(**arrays_of(request("", 2.0)))
        assert not first.cancel()
        assert second.cancel()
        assert scores.cancel()
        assert wait([second, scores], timeout=120.0).done
        service.trainer.go.set()
        assert third.result(timeout=120.0).step == 2
        assert weight_of(client) == 4.5 / 2 + 2


def test_closing_ends_every_future_at_once(
    url: str, service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    client = CriticClient(url, max_in_flight=2)
    values = [client.submit(tokens=[[1]]) for _ in range(3)]
    wait(values)
    futures = [client.train(**arrays_of(request("", 4.0, first_token=WAIT_TOKEN)))]
    futures += [client.train(**arrays_of(request("", 4.0))) for _ in range(1500)]
    wait_until(lambda: service.trainer.trained)
    assert futures[5].cancel()
    client.close()
    for i, future in enumerate(futures):
        if i != 5:
            with pytest.raises(Cancelled, match="closed"):
                future.result(timeout=120.0)
    assert f"train request {futures[0].train_id} failed: the client was closed" in caplog.text
    with pytest.raises(Cancelled):
        client.infer(tokens=[[1]])
    with pytest.raises(Cancelled):
        client.train(**arrays_of(request("", 4.0)))


def test_a_future_keeps_its_client_alive(url: str, service: ScriptedService, young_objects: None) -> None:
    client = CriticClient(url)
    client.train(**arrays_of(request("", 4.0, first_token=SLOW_TOKEN)))
    future = client.submit(tokens=[[1]])
    del client
    gc.collect()
    assert future.result(timeout=120.0).values[0][0] == 4.5


def test_clients_are_pickled_and_copied_by_their_settings(url: str) -> None:
    with CriticClient(url, policy=QUICK) as client, pickle.loads(pickle.dumps(client)) as other:  # noqa: S301
        assert weight_of(other) == 1.0
    assert isinstance(copy.copy(AsyncCriticClient(url)), AsyncCriticClient)


@pytest.mark.slow
def test_a_client_still_works_after_a_fork_and_needs_no_torch(server: RunningServer) -> None:
    code = f"""
import os, sys
from guerdon.client import CriticClient
client = CriticClient({server.http_url!r})
row = dict(tokens=[[1, 2]], returns=[[4.0]], prev_values=[[0.0]], mask=[[1]])
assert client.train(**row).result().step == 1
child = os.fork()
if child == 0:
    ok = client.infer(tokens=[[1]]).values[0][0] == 4.5 and client.train(**row).result(120).step == 2
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert client.state().step == 2
assert not [name for name in ("torch", "transformers", "grpc", "guerdon.server") if name in sys.modules]
client.train(**(row | dict(tokens=[[{SLOW_TOKEN}, 2]])), train_id="unanswered")
"""
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=120.0)
    assert done.returncode == 0, done.stderr
    assert "train request unanswered failed: the client was closed" in done.stderr


# --- asyncio ----------------------------------------------------------------------------------------------------


async def test_the_async_client_keeps_the_same_order(url: str, service: ScriptedService) -> None:
    service.script["critic_train"] = [Unavailable("a") for _ in range(5)]
    service.script["critic_infer"] = [Overloaded("b", 0.0) for _ in range(10)]
    rng, weight = random.Random(8), 1.0
    async with AsyncCriticClient(url, policy=QUICK) as client:
        await client.wait_ready(120.0)
        expected, tasks, trains = [], [], []
        for _ in range(60):
            if rng.random() < 0.25:
                asked = request("", float(rng.randrange(8)))
                weight = after([asked], weight=weight)
                trains.append(client.train(**arrays_of(asked)))
            else:
                expected.append(weight)
                tasks.append(client.submit(tokens=[[1]]))
        np.testing.assert_allclose([(await t).values[0][0] for t in tasks], expected, rtol=1e-6)
        reports = await asyncio.gather(*trains)
        assert [report.step for report in reports] == list(range(1, len(trains) + 1))
        trains = [client.train(**arrays_of(request("", 4.0)))]
        np.testing.assert_allclose((await client.infer(tokens=[[1]])).values[0][0], weight / 2 + 4, rtol=1e-6)
        assert (await client.validate(**arrays_of(request("", 4.0)))).num_tokens == 1
        await trains[0]


async def test_the_async_clients_other_operations(url: str) -> None:
    async with AsyncCriticClient(url) as client:
        saved = await client.save({"kl": 1.0})
        assert saved is not None
        await client.train(**arrays_of(request("", 4.0)))
        assert (await client.load(saved.name)).step == 0
        await client.offload()
        with pytest.raises(Offloaded):
            await client.infer(tokens=[[1]])
        await client.onload()
        state = await client.state()
        assert (state.step, len(state.checkpoints), state.is_offloaded) == (0, 2, False)
        with pytest.raises(InvalidRequest, match="gives no rewards"):
            await client.infer_with_rewards(tokens=[[1]])
    with pytest.raises(Cancelled):
        await client.infer(tokens=[[1]])


@pytest.mark.parametrize("look", ["await", "await later", "gather", "wait_for", "exception", "nobody", "cancelled"])
async def test_an_async_error_is_raised_by_the_future_or_by_the_next_call(
    url: str, look: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncCriticClient(url) as client:
        future = client.train(**arrays_of(request("", 4.0, first_token=FAIL_TOKEN)), train_id="lost")
        match look:
            case "await":
                with pytest.raises(TrainFailed):
                    await future
            case "await later":
                await asyncio.wait([future])
                with pytest.raises(TrainFailed):
                    await future
            case "gather":
                assert isinstance((await asyncio.gather(future, return_exceptions=True))[0], TrainFailed)
            case "wait_for":
                with pytest.raises(TrainFailed):
                    await asyncio.wait_for(future, 60.0)
            case "exception":
                await asyncio.wait([future])
                assert isinstance(future.exception(), TrainFailed)
            case "nobody" | "cancelled":
                if look == "nobody":
                    await asyncio.wait([future])
                else:
                    await asyncio.sleep(0)  # the request is under way
                    future.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await future
                    while "train request lost failed" not in caplog.text:  # the client's word, not the server's
                        await asyncio.sleep(0.01)
                with pytest.raises(TrainFailed) as raised:
                    client.train(**arrays_of(request("", 4.0)))
                assert any("lost" in note for note in raised.value.__notes__)
        assert (await client.state()).step == 0


async def test_cancelled_async_calls_delay_nobody(url: str, service: ScriptedService) -> None:
    async with AsyncCriticClient(url) as client:
        first = client.train(**arrays_of(request("", 4.0, first_token=WAIT_TOKEN)))
        while not service.trainer.trained:
            await asyncio.sleep(0.01)
        second, scores, third = (
            client.train(**arrays_of(request("", 4.0))),
            client.submit(tokens=[[1]]),
            client.train(**arrays_of(request("", 2.0))),
        )
        for future in (first, second, scores):
            future.cancel()
        service.trainer.go.set()
        assert (await asyncio.wait_for(third, 60.0)).step == 2  # what was sent is done: the first
        assert (await client.infer(tokens=[[1]])).values[0][0] == 4.5 / 2 + 2


def test_a_loop_that_ends_says_what_it_left(
    url: str, service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        client = AsyncCriticClient(url)
        client.train(**arrays_of(request("", 4.0, first_token=WAIT_TOKEN)), train_id="left")
        while not service.trainer.trained:
            await asyncio.sleep(0.01)

    caplog.set_level(logging.ERROR)
    asyncio.run(main())
    assert "train request left failed: the event loop ended" in caplog.text
