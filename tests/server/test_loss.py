"""A service that has lost a rank: who waits is told so, what was under way is taken back, and nothing is doubled."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from guerdon.config import ServerConfig
from guerdon.core import ControlRequest, Operation
from guerdon.errors import RanksLost
from guerdon.server.critic import Critic
from guerdon.server.runtime import RunningServer
from server.arithmetic_critic import WAIT_TOKEN, ArithmeticService, after, request
from server.driving import Driver
from server.echo_service import EchoService
from server.helpers import INFER, body_of, wait_until

LOST = "rank 1 (host, process 7) has ended"
A, B, LATER = request("a", 3.0), request("b", 5.0), request("later", 9.0)
WAITS = request("waits", 7.0, first_token=WAIT_TOKEN)


async def lose(service: ArithmeticService) -> None:
    await asyncio.to_thread(service.lost, RanksLost(LOST))


async def begun(service: ArithmeticService) -> None:
    """Returns when the trainer is inside WAITS."""
    while "waits" not in service.trainer.trained:
        await asyncio.sleep(0.01)


async def lost_amid_a_train(tmp_path: Path) -> None:
    service = ArithmeticService(tmp_path)
    service.start()
    await service.call("critic_train", A)
    calls = [service.call("critic_train", WAITS), service.call("critic_train", LATER)]
    calls.append(service.call("critic_state", ControlRequest(Operation.STATE)))
    tasks = [asyncio.create_task(call) for call in calls]
    await begun(service)
    started = time.monotonic()
    await lose(service)
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, RanksLost) and str(outcome) == LOST
    assert 1.0 < time.monotonic() - started < 4.0  # what runs may come to its own end meanwhile
    assert not service.is_ready() and service.ending.is_set()
    for call in (service.call("critic_train", B), service.call("critic_state", ControlRequest(Operation.STATE))):
        with pytest.raises(Exception, match="stopping"):
            await call
    with pytest.raises(RanksLost, match="process 7"):
        service.check_ready()
    # Although it comes to its end after all, of which nobody is told.
    service.trainer.go.set()
    await asyncio.to_thread(service.stop, 5.0)


def test_a_train_amid_which_a_rank_is_lost_is_not_done_and_may_be_asked_again(tmp_path: Path) -> None:
    asyncio.run(lost_amid_a_train(tmp_path))
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A])
        critic.trainer.go.set()
        critic.train(WAITS)
        critic.train(WAITS)
        assert critic.trainer.weight == after([A, WAITS])


async def lost_behind_a_train(tmp_path: Path, is_done: threading.Event) -> None:
    service = ArithmeticService(tmp_path)
    service.start()
    task = asyncio.create_task(service.call("critic_train", A))
    await asyncio.to_thread(is_done.wait)
    await lose(service)
    assert (await task).step == 1  # type: ignore[union-attr]
    await asyncio.to_thread(service.stop, 5.0)


def test_a_train_that_was_done_before_is_answered(tmp_path: Path) -> None:
    is_done, show = threading.Event(), Critic._show

    def slowly(critic: Critic) -> None:
        if critic._history.num_unsaved:
            is_done.set()
        time.sleep(0.5)
        show(critic)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Critic, "_show", slowly)
        asyncio.run(lost_behind_a_train(tmp_path, is_done))
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A])


def test_all_transports_tell_who_is_lost_and_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guerdon.server.loop._BREAKS_S", 20.0)
    service, told, go = EchoService(), [], threading.Event()
    score = service.scorer.score
    monkeypatch.setattr(service.scorer, "score", lambda sequences: score(sequences) if go.wait(20) else [])
    running = RunningServer(service, ServerConfig(port=0, grpc_port=0))
    url = running.http_url

    def ask(path: str, body: bytes) -> None:
        told.append(httpx.post(url + path, content=body, timeout=10))

    openai = b'{"model": "reward_model", "input": "x"}'
    slow = body_of([[5, 1]])
    threads = [threading.Thread(target=ask, args=(INFER, slow)) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(n for n, _ in service._loop.depth().values()) == 2)
    with httpx.Client() as kept, InferenceServerClient(str(running.grpc_url).removeprefix("grpc://")) as client:
        kept.get(url + "/v2/health/live")
        tokens = InferInput("tokens", [1, 1], "INT64")
        lost = threading.Thread(target=service.lost, args=(RanksLost(LOST),))
        lost.start()
        wait_until(lambda: service.loss is not None)
        assert kept.get(url + "/v2/health/ready").status_code == 400
        response = kept.post(url + "/pooling", content=openai)
        assert (response.status_code, LOST in response.text) == (503, True)

        tokens.set_data_from_numpy(np.ones((1, 1), np.int64))
        with pytest.raises(InferenceServerException, match="process 7") as refused:
            client.infer("reward_model", [tokens])
        assert str(grpc.StatusCode.UNAVAILABLE) in str(refused.value)
        go.set()
        lost.join()
    for thread in threads:
        thread.join()
    outcomes = sorted((r.status_code, r.json().get("error", "")) for r in told)
    assert outcomes[-1] == (503, LOST) and len(outcomes) == 3
    assert all(status == 200 or error == LOST for status, error in outcomes)
    running.close()
    assert isinstance(running._error, RanksLost)
