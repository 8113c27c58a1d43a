"""The client's event loop and slots: calls that are closed, cancelled or made at the wrong moment end all the same."""

import asyncio
import socket
import threading
import traceback
from queue import SimpleQueue

import pytest

from guerdon.client import AsyncRewardClient, RetryPolicy, RewardClient
from guerdon.client.addresses import addresses
from guerdon.client.calls import make_request, prepare_score
from guerdon.client.driver import Session
from guerdon.client.grpc_transport import GrpcExchange
from guerdon.errors import Cancelled, Unreachable
from guerdon.server.runtime import RunningServer
from ports import free_port
from served import Serve
from server.echo_service import EchoService


@pytest.fixture(scope="module")
def service() -> EchoService:
    return EchoService()


@pytest.fixture(scope="module")
def server(service: EchoService, serve: Serve) -> RunningServer:
    return serve(grpc_port=0, build=lambda _: service, grace_s=0.1)


async def test_closing_ends_calls_that_await_a_models_description_with_cancelled() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = AsyncRewardClient(f"http://127.0.0.1:{silent.getsockname()[1]}")
        tasks = [client.submit(texts=["a"]) for _ in range(2)]
        while not client._session._descriptions:
            await asyncio.sleep(0.01)
        await client.aclose()
        for task in tasks:
            with pytest.raises(Cancelled):
                await asyncio.wait_for(task, 10.0)


async def test_cancelling_a_call_that_awaits_a_description_while_the_client_closes_cancels_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = AsyncRewardClient(f"http://127.0.0.1:{silent.getsockname()[1]}")
        task = client.submit(texts=["a"])
        while not client._session._descriptions:
            await asyncio.sleep(0.01)
        task.cancel()
        await client.aclose()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 10.0)


async def test_each_call_gets_an_error_of_its_own_without_the_librarys_frames() -> None:
    async with AsyncRewardClient(f"http://127.0.0.1:{free_port()}", policy=RetryPolicy(tries=1)) as client:
        results = await asyncio.gather(*(client.score(texts=["a"]) for _ in range(2)), return_exceptions=True)
    assert len({*map(id, results)}) == 2
    for error in results:
        assert isinstance(error, Unreachable) and "cannot connect to" in str(error)
        text = "".join(traceback.format_exception(error))
        assert "httpcore" not in text and "another exception" not in text


def test_an_http_url_of_a_grpc_port_says_so(server: RunningServer) -> None:
    url = str(server.grpc_url).replace("grpc://", "http://")
    said = r"does not speak HTTP: .*; write grpc://host:port for a gRPC port"
    with RewardClient(url, policy=RetryPolicy(tries=1)) as client, pytest.raises(Unreachable, match=said):
        client.score(texts=["a"])


def test_a_grpc_call_whose_client_closes_before_it_is_sent_is_cancelled(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = RewardClient(str(server.grpc_url))
    client.score(texts=["a"])
    request = GrpcExchange.request
    monkeypatch.setattr(GrpcExchange, "request", lambda exchange: (client.close(), request(exchange))[1])
    with pytest.raises(Cancelled, match="closed before the answer"):
        client.score(texts=["a"])


async def test_cancelling_a_call_that_waits_for_a_slot_gives_back_its_share_of_the_server() -> None:
    session = Session(addresses("http://127.0.0.1:1", None), RetryPolicy(), 1)
    call = prepare_score("m", make_request(texts=["a"]))
    steps = session.caller.ask(call)
    step = next(steps)
    (endpoint,) = session.caller.endpoints.all
    assert endpoint.num_requests == 1
    await session._wait_for_slot(0)
    task = asyncio.create_task(session.run(steps, step=step))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert endpoint.num_requests == 0


def test_a_call_works_after_one_for_which_no_thread_could_start(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with RewardClient(server.http_url) as client:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                client.submit(texts=["a"])
        assert list(client.submit(texts=["abc"]).result(120.0)) == [3.0]


def test_a_futures_callbacks_may_make_blocking_calls_and_run_in_order(
    server: RunningServer, service: EchoService
) -> None:
    seen: SimpleQueue[object] = SimpleQueue()
    with RewardClient(server.http_url) as client, service.scorer.held() as go:
        future = client.submit(texts=["<slow>"])
        future.add_done_callback(lambda done: seen.put([*done.result(), *client.score(texts=["ab"])]))
        future.add_done_callback(lambda _: seen.put("second"))
        go.set()
        assert [seen.get(timeout=120.0), seen.get(timeout=120.0)] == [[6.0, 2.0], "second"]


def test_a_callback_that_blocks_holds_up_no_other_call(server: RunningServer, service: EchoService) -> None:
    is_free = threading.Event()
    with RewardClient(server.http_url) as client, service.scorer.held() as go:
        client.submit(texts=["<slow>"]).add_done_callback(lambda _: is_free.wait(120.0))
        go.set()
        assert list(client.score(texts=["ab"])) == [2.0]
        is_free.set()
