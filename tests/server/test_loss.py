"""A service that has lost a rank: who waits is told so, what was under way is taken back, and nothing is doubled."""

import asyncio
import errno
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from guerdon import assembly
from guerdon.client import CriticClient, RetryPolicy
from guerdon.core import Command, Sequence
from guerdon.critic_core import ControlRequest, Operation
from guerdon.distributed.commands import Worker
from guerdon.distributed.group import Group
from guerdon.distributed.ranks import ALONE
from guerdon.errors import RanksLost, StorageFailed
from guerdon.server import status
from guerdon.server.critic.controller import Critic
from guerdon.server.runtime import RunningServer, serve
from guerdon.settings.config import CriticConfig, ModelConfig, ServerConfig
from server.arithmetic_critic import WAIT_TOKEN, ArithmeticService, ArithmeticTrainer, after, request
from server.driving import Driver, run
from server.echo_service import EchoService
from server.helpers import INFER, body_of, wait_until

LOST = "rank 1 (host, process 7) has ended"
A, B, LATER = request("a", 3.0), request("b", 5.0), request("later", 9.0)
WAITS = request("waits", 7.0, first_token=WAIT_TOKEN)


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that waits for a lost rank is soon given up."""
    monkeypatch.setattr("guerdon.server.batching.loops._BREAKS_S", 0.2)


async def lose(service: ArithmeticService) -> None:
    await asyncio.to_thread(service.end_after_loss, RanksLost(LOST))


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
    assert time.monotonic() - started > 1.0  # what runs may come to its own end meanwhile
    assert not status.is_ready(service) and service.ending.is_set()
    for call in (service.call("critic_train", B), service.call("critic_state", ControlRequest(Operation.STATE))):
        with pytest.raises(Exception, match="stopping; try again later"):  # no other server has this critic
            await call
    with pytest.raises(RanksLost, match="process 7"):
        service.check_ready()
    # Although it comes to its end after all, of which nobody is told.
    service.trainer.go.set()
    await asyncio.to_thread(service.stop, 5.0)


def test_a_train_that_loses_a_rank_is_withdrawn_and_can_be_retried(tmp_path: Path) -> None:
    asyncio.run(lost_amid_a_train(tmp_path))
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A])
        critic.trainer.go.set()
        critic.do(WAITS, WAITS)
        assert critic.trainer.weight == after([A, WAITS])


async def lost_behind_a_train(tmp_path: Path, is_done: threading.Event) -> None:
    service = ArithmeticService(tmp_path)
    service.start()
    task = asyncio.create_task(service.call("critic_train", A))
    await asyncio.to_thread(is_done.wait)
    await lose(service)
    assert (await task).step == 1  # type: ignore[union-attr]
    await asyncio.to_thread(service.stop, 5.0)


def test_a_train_that_finished_before_the_loss_is_answered(tmp_path: Path) -> None:
    is_done, show = threading.Event(), Critic._show

    def slowly(critic: Critic) -> None:
        if critic.store.num_unsaved:
            is_done.set()
        time.sleep(0.5)
        show(critic)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Critic, "_show", slowly)
        asyncio.run(lost_behind_a_train(tmp_path, is_done))
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A])


async def one_runs_and_one_waits(folder: Path) -> tuple[ArithmeticService, asyncio.Task[Any], asyncio.Task[Any]]:
    """A service with a train that has begun, and one that waits behind it."""
    service = ArithmeticService(folder)
    service.start()
    running = asyncio.create_task(service.call("critic_train", WAITS))
    await begun(service)
    waiting = asyncio.create_task(service.call("critic_train", LATER))
    while not service.loops.depth()["critic_infer"][0]:
        await asyncio.sleep(0.01)
    return service, running, waiting


async def lost_while_the_disk_is_slow(tmp_path: Path, disk: threading.Lock) -> None:
    service, running, waiting = await one_runs_and_one_waits(tmp_path)
    with disk:
        losing = asyncio.create_task(lose(service))
        with pytest.raises(RanksLost, match="process 7"):
            await asyncio.wait_for(waiting, 20.0)
        assert not running.done() and not losing.done()
    await losing
    with pytest.raises(RanksLost, match="process 7"):
        await running
    service.trainer.go.set()
    await asyncio.to_thread(service.stop, 5.0)


@pytest.mark.usefixtures("short_wait")
def test_waiting_requests_fail_before_the_journal_is_written(tmp_path: Path) -> None:
    disk, give_up = threading.Lock(), Critic.give_up

    def slowly(critic: Critic, loss: RanksLost) -> None:
        with disk:
            give_up(critic, loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Critic, "give_up", slowly)
        asyncio.run(lost_while_the_disk_is_slow(tmp_path, disk))


def test_a_loss_before_the_start_is_not_forgotten() -> None:
    service = EchoService()
    service.end_after_loss(RanksLost(LOST))

    async def start() -> None:
        service.start()
        assert not service.ready and service.ending.is_set()
        with pytest.raises(RanksLost, match="process 7"):
            service.check_ready()
        await asyncio.to_thread(service.stop, 5.0)

    asyncio.run(start())
    assert not service.is_computing


async def late(service: ArithmeticService) -> None:
    stop, urls = asyncio.Event(), asyncio.Queue[str]()
    config = ServerConfig(port=0, grpc_port=None)
    serving = asyncio.create_task(
        serve(service, config, on_started=lambda url, _: urls.put_nowait(url), stop=stop, grace_s=0.3)
    )
    url = await urls.get()

    def ask() -> None:
        with CriticClient(url, policy=RetryPolicy(tries=1)) as client:
            told.append(client.train(WAITS.tokens, WAITS.returns, WAITS.prev_values, WAITS.mask).exception(60))

    told: list[BaseException | None] = []
    asking = asyncio.create_task(asyncio.to_thread(ask))
    while not service.trainer.trained:
        await asyncio.sleep(0.01)
    stop.set()
    await serving
    await asking
    assert isinstance(told[0], RanksLost) and "unfinished after the grace period of 0.3 s" in str(told[0]), told
    service.trainer.go.set()
    await asyncio.to_thread(service.stop, 5.0)


@pytest.mark.usefixtures("short_wait")
def test_a_train_unfinished_at_shutdown_is_withdrawn_and_fails(tmp_path: Path) -> None:
    asyncio.run(late(ArithmeticService(tmp_path)))
    with Driver(tmp_path) as critic:
        assert critic.trainer.trained == []


async def lost_before_a_save(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    service = ArithmeticService(tmp_path, save_every=1)
    service.start()
    with patch.context() as for_once:
        for_once.setattr(service.trainer, "save", full)
        await service.call("critic_train", A)
        await service.call("critic_state", ControlRequest(Operation.STATE))  # behind the save that is tried again later
    task = asyncio.create_task(service.call("critic_train", WAITS))
    await begun(service)
    await lose(service)
    with pytest.raises(RanksLost):
        await task
    service.trainer.go.set()
    await asyncio.to_thread(service.stop, 5.0)


@pytest.mark.usefixtures("short_wait")
def test_a_withdrawn_train_is_in_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(lost_before_a_save(tmp_path, monkeypatch))
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A])


async def lost_with_the_disk(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "Input/output error")

    service, running, waiting = await one_runs_and_one_waits(tmp_path)
    with patch.context() as broken:
        broken.setattr(Path, "unlink", refuse)
        await lose(service)
        with pytest.raises(StorageFailed, match="Input/output error"):
            await running
        with pytest.raises(RanksLost):
            await waiting
        service.trainer.go.set()
        await asyncio.to_thread(service.stop, 5.0)


@pytest.mark.usefixtures("short_wait")
def test_a_train_that_the_disk_keeps_must_not_be_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(lost_with_the_disk(tmp_path, monkeypatch))
    assert [path.name for path in (tmp_path / "journal").glob("*.safetensors")] == ["000000000001.safetensors"]


def test_a_rank_told_to_stop_during_a_replay_leaves_between_two_records(tmp_path: Path) -> None:
    run(tmp_path, A, B, LATER)
    config = CriticConfig(model="arithmetic", checkpoint_dir=str(tmp_path))
    trainer, stop = ArithmeticTrainer(config), threading.Event()

    class Told(Group):
        def execute(self, command: Command) -> Any:
            stop.set()
            return super().execute(command)

    group = Told(Worker({trainer.info.name: trainer}, {config.name: trainer}))
    models = assembly._Models([(ModelConfig(name=trainer.info.name), trainer)], trainer)
    with pytest.raises(assembly._Stopped):
        assembly._service(ServerConfig(critic=config), assembly.PLAIN, models, group, ALONE, stop)
    assert trainer.trained == ["a"]
    with Driver(tmp_path) as critic:  # which can have the folder
        assert critic.trainer.weight == after([A, B, LATER])


def test_all_transports_name_the_lost_rank_and_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guerdon.server.batching.loops._BREAKS_S", 600.0)
    service, told, begun, go = EchoService(), [], threading.Event(), threading.Event()
    score = service.scorer.score

    def slowly(sequences: list[Sequence]) -> Any:
        begun.set()
        return score(sequences) if go.wait(120) else []

    monkeypatch.setattr(service.scorer, "score", slowly)
    running = RunningServer(service, ServerConfig(port=0, grpc_port=0))
    url = running.http_url

    def ask(path: str, body: bytes) -> None:
        told.append(httpx.post(url + path, content=body, timeout=120))

    openai = b'{"model": "reward_model", "input": "x"}'
    slow = body_of([[5, 1]])
    threads = [threading.Thread(target=ask, args=(INFER, slow)) for _ in range(3)]
    for thread in threads:
        thread.start()
        assert begun.wait(120)  # the others are in no batch with the first
    wait_until(lambda: sum(n for n, _ in service.loops.depth().values()) == 2)
    with httpx.Client() as kept, InferenceServerClient(str(running.grpc_url).removeprefix("grpc://")) as client:
        kept.get(url + "/v2/health/live")
        tokens = InferInput("tokens", [1, 1], "INT64")
        lost = threading.Thread(target=service.end_after_loss, args=(RanksLost(LOST),))
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
