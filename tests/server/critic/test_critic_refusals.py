"""What a critic does not do: that its log and metrics say so, that nothing is held for it, and that faults show."""

import asyncio
import gc
import logging
import re
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from guerdon.core import ScoreRequest
from guerdon.critic_core import ControlRequest, Operation, TrainRequest
from guerdon.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Offloaded,
    Overloaded,
    ServerFault,
    StorageFailed,
    TrainFailed,
    Unavailable,
)
from guerdon.server import status
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from guerdon.wire import kserve
from server.arithmetic_critic import BUG_TOKEN, FAIL_TOKEN, WAIT_TOKEN, ArithmeticService, after, request
from server.critic.test_critic import control, running, state, train, values
from server.critic.test_critic_transports import OverGrpc, OverHttp, Refused
from server.critic.test_critic_transports import control as control_tensors
from server.critic.test_critic_transports import train as train_tensors
from server.helpers import until, wait_until


def counted(service: ArithmeticService) -> dict[str, int]:
    """The train requests by outcome."""
    text = service.metrics.render().decode()
    found = re.findall(r'^guerdon_train_requests_total\{critic="critic",outcome="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {outcome: int(float(count)) for outcome, count in found}


class Coming:
    """A request that is decoded when the test says so; `error` is what decoding raises."""

    def __init__(self, asked: Any, error: Exception | None = None) -> None:
        self.go = asyncio.Event()
        self.is_released = False
        self._asked, self._error = [asked], error

    async def read(self) -> Any:
        await self.go.wait()
        if self._error is not None:
            raise self._error
        return self._asked.pop()

    def release(self) -> None:
        self.is_released = True


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The texts of the warnings, as they come."""
    texts: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.WARNING:
                texts.append(record.getMessage())

    handler = Handler()
    logging.getLogger("guerdon").addHandler(handler)
    yield texts
    logging.getLogger("guerdon").removeHandler(handler)


# --- on the log, and counted ------------------------------------------------------------------------------------------


async def test_whatever_does_not_end_in_success_is_said_once_and_counted(tmp_path: Path, said: list[str]) -> None:
    async with running(tmp_path, max_queue_sequences=3) as service:
        for asked, error, text in (
            (request("nan", float("nan")), InvalidRequest, r"train nan: InvalidRequest: returns is nan in row 0"),
            (request("bad", 1, first_token=FAIL_TOKEN), TrainFailed, "train bad: TrainFailed: global batch 0 failed"),
        ):
            with pytest.raises(error):
                await train(service, asked)
            assert len(said) == 1 and re.match(text, said.pop())
        await control(service, Operation.OFFLOAD)
        with pytest.raises(Offloaded):
            await train(service, request("off", 1))
        with pytest.raises(Offloaded):
            await service.call("critic_validate", request("v", 1))
        await control(service, Operation.ONLOAD)
        with pytest.raises(InvalidRequest):
            await control(service, Operation.LOAD, checkpoint="nobody")
        assert [text.split(": ")[:2] for text in said] == [
            ["train off", "Offloaded"],
            ["validate v", "Offloaded"],
            ["load", "InvalidRequest"],
        ]
        said.clear()
        blocked = asyncio.create_task(train(service, request("wait", 4, first_token=WAIT_TOKEN)))
        await until(lambda: "wait" in service.trainer.trained)
        queued = asyncio.create_task(train(service, request("queued", 1, 2, 3)))
        await until(lambda: service.loops.depth()["critic_infer"][0] == 3)
        with pytest.raises(Overloaded):
            await train(service, request("refused", 1))
        with pytest.raises(Overloaded):
            await state(service)
        assert [text.split(": ")[:2] for text in said] == [["train refused", "Overloaded"], ["state", "Overloaded"]]
        service.trainer.go.set()
        await asyncio.gather(blocked, queued)
        assert counted(service) == {"InvalidRequest": 1, "TrainFailed": 1, "Offloaded": 1, "Overloaded": 1, "ok": 2}


async def test_outcomes_have_their_own_names(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        await train(service, request("a", 1))
        await train(service, request("a", 1))
        with pytest.raises(InvalidRequest):
            await train(service, request("a", 2))
        for _ in range(2):
            with pytest.raises(TrainFailed):
                await train(service, request("bad", 1, first_token=FAIL_TOKEN))
        with pytest.raises(ServerFault):
            await train(service, request("bug", 1, first_token=BUG_TOKEN))
        assert counted(service) == {"ok": 1, "known": 2, "InvalidRequest": 1, "TrainFailed": 1, "ServerFault": 1}


def test_a_request_that_never_arrives_completely_is_logged_and_counted(said: list[str]) -> None:
    service = ArithmeticService(None)
    with RunningServer(service, ServerConfig(port=0, grpc_port=0, max_body_mb=1)) as server:
        large = httpx.post(f"{server.http_url}/v2/models/critic_train/infer", content=b"x" * (2 << 20))
        assert large.status_code == 413
        broken = httpx.post(f"{server.http_url}/v2/models/critic_save/infer", content=b"{")
        assert broken.status_code == 400
        for over in (OverHttp, OverGrpc):
            with pytest.raises(Refused):
                over(server).call("critic_train", control_tensors())
        assert [text.split(": ")[:2] for text in said] == [
            ["train", "PayloadTooLarge"],
            ["save", "InvalidRequest"],
            ["train", "InvalidRequest"],
            ["train", "InvalidRequest"],
        ]
        assert counted(service) == {"PayloadTooLarge": 1, "InvalidRequest": 2}
        text = service.metrics.render().decode()
        assert 'guerdon_requests_total{model="critic_save",outcome="InvalidRequest"} 1.0' in text


# --- places -----------------------------------------------------------------------------------------------------------


async def test_requests_are_done_in_order_of_arrival_however_long_they_take_to_decode() -> None:
    async with running() as service:
        slow = Coming(request("slow", 4))
        first = asyncio.create_task(service.call("critic_train", slow))
        await asyncio.sleep(0)
        second = asyncio.create_task(train(service, request("quick", 2)))
        seen = asyncio.create_task(values(service, 1))
        await asyncio.sleep(0.05)
        assert service.trainer.trained == [] and not seen.done()
        slow.go.set()
        await asyncio.gather(first, second)
        assert service.trainer.trained == ["slow", "quick"]
        assert (await seen)[0] == [after([request("slow", 4), request("quick", 2)])]


@pytest.mark.parametrize("how", ["malformed", "wrong", "left", "known", "bug"])
async def test_a_request_that_cannot_be_read_holds_nobody_up(how: str) -> None:
    async with running() as service:
        await train(service, request("known", 1))
        asked = request("known", 1) if how == "known" else request("wrong", float("inf"))
        error = {"malformed": InvalidRequest("no"), "bug": ZeroDivisionError()}.get(how)
        coming = Coming(asked, error)
        first = asyncio.create_task(service.call("critic_train", coming))
        await asyncio.sleep(0)
        behind = asyncio.create_task(train(service, request("behind", 2)))
        await asyncio.sleep(0.02)
        assert not behind.done()
        first.cancel() if how == "left" else coming.go.set()
        assert (await behind).step == 2
        (told,) = await asyncio.gather(first, return_exceptions=True)
        assert isinstance(told, Exception | asyncio.CancelledError) or how == "known"


async def test_stopping_does_not_wait_for_requests_that_are_not_decoded() -> None:
    async with running() as service:
        coming = Coming(request("a", 1))
        first = asyncio.create_task(service.call("critic_train", coming))
        await asyncio.sleep(0)
        behind = asyncio.create_task(train(service, request("behind", 2)))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(service.stop)
        coming.go.set()
        for one in (first, behind):
            with pytest.raises(Unavailable, match="stopping"):
                await one


async def test_the_same_id_behind_a_return_is_another_request_also_when_decoded_late(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        await control(service, Operation.SAVE)
        late = Coming(request("a", 3))
        first = asyncio.create_task(service.call("critic_train", late))
        await asyncio.sleep(0)
        back = asyncio.create_task(control(service, Operation.LOAD))
        await asyncio.sleep(0)
        again = asyncio.create_task(train(service, request("a", 3)))
        await asyncio.sleep(0.01)
        late.go.set()
        await asyncio.gather(first, back, again)
        assert service.trainer.trained == ["a", "a"] and service.trainer.weight == after([request("a", 3)])


async def test_a_request_that_waits_already_is_not_held_twice() -> None:
    async with running() as service:
        first = asyncio.create_task(train(service, request("a", 1, first_token=WAIT_TOKEN)))
        await until(lambda: bool(service.trainer.trained))
        again = request("a", 1, first_token=WAIT_TOKEN)
        coming, arrays = Coming(again), weakref.ref(again.tokens)
        coming.go.set()
        del again
        second = asyncio.create_task(service.call("critic_train", coming))
        await until(lambda: coming.is_released)
        gc.collect()
        assert arrays() is None and not second.done()
        service.trainer.go.set()
        assert await second is await first


def test_a_request_that_waits_already_gives_its_bytes_back(tmp_path: Path) -> None:
    service = ArithmeticService(tmp_path)
    large = request("w", *range(10), first_token=WAIT_TOKEN, length=4000)
    body, length = kserve.encode_request(train_tensors(large))
    config = ServerConfig(port=0, grpc_port=None, max_body_mb=1, max_bodies_mb=3)
    with RunningServer(service, config) as server:
        url, headers = server.http_url, {"Inference-Header-Content-Length": str(length)}
        with ThreadPoolExecutor(5) as threads:
            for i in range(5):
                threads.submit(
                    httpx.post, f"{url}/v2/models/critic_train/infer", content=body, headers=headers, timeout=30
                )
                wait_until(lambda i=i: bool(service.trainer.trained) and counted(service).get("known", 0) == i)
            service.trainer.go.set()
        assert service.trainer.step == 1


async def test_an_operation_whose_client_has_left_is_dropped_before_it_begins(tmp_path: Path, said: list[str]) -> None:
    async with running(tmp_path) as service:
        blocked = asyncio.create_task(train(service, request("wait", 4, first_token=WAIT_TOKEN)))
        await until(lambda: bool(service.trainer.trained))
        for operation in (Operation.SAVE, Operation.LOAD, Operation.STATE):
            with pytest.raises(DeadlineExceeded, match="had not begun, and is dropped"):
                await control(service, operation, timeout_s=0.01)
        leaves = asyncio.create_task(service.call("critic_validate", request("v", 1)))
        offloads = asyncio.create_task(control(service, Operation.OFFLOAD))
        await until(lambda: service.loops.depth()["critic_infer"] == (2, 3))
        for task in (leaves, offloads):
            task.cancel()
        await asyncio.gather(leaves, offloads, return_exceptions=True)
        assert service.loops.depth()["critic_infer"] == (1, 0)  # what was to change something stays
        service.trainer.go.set()
        await blocked
        told = await state(service)
        assert told.checkpoints == [] and told.is_offloaded
        assert [text.split(": ")[:2] for text in said] == [
            ["save", "DeadlineExceeded"],
            ["load", "DeadlineExceeded"],
            ["state", "DeadlineExceeded"],
            ["validate v", "Cancelled"],
        ]


def test_over_http_too_a_save_is_dropped_when_its_client_leaves(tmp_path: Path) -> None:
    service = ArithmeticService(tmp_path)
    with RunningServer(service, ServerConfig(port=0, grpc_port=0)) as server:
        for over in (OverHttp(server), OverGrpc(server)):

            def has_left(over: Any = over) -> bool:
                with pytest.raises((Refused, httpx.TimeoutException)):
                    over.call("critic_train", train_tensors(request("wait", 4, first_token=WAIT_TOKEN)), timeout_s=0.2)
                return service.trainer.trained == ["wait"]

            wait_until(has_left)
            with pytest.raises((Refused, httpx.TimeoutException)):
                over.call("critic_save", control_tensors(), timeout_s=0.2)
            wait_until(lambda: service.loops.depth()["critic_infer"] == (0, 0))
        service.trainer.go.set()


async def test_a_score_behind_a_train_waits_for_as_long_as_that_takes() -> None:
    service = ArithmeticService(None, server=ServerConfig(request_timeout_s=0.05))
    service.start()
    blocked = asyncio.create_task(train(service, request("wait", 4, first_token=WAIT_TOKEN)))
    await until(lambda: bool(service.trainer.trained))
    waits = asyncio.create_task(values(service, 1))
    with pytest.raises(DeadlineExceeded):
        await service.score("critic_infer", ScoreRequest(tokens=[np.array([1])], timeout_s=0.01))
    await asyncio.sleep(0.1)
    service.trainer.go.set()
    await blocked
    assert (await waits)[0] == [service.trainer.weight]
    await asyncio.to_thread(service.stop)


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_fault_shows_in_readiness_and_metrics_and_does_not_grow(tmp_path: Path) -> None:
    service = ArithmeticService(tmp_path)
    with RunningServer(service, ServerConfig(port=0, grpc_port=0)) as server:
        paths = ["/v2/health/ready", *(f"/v2/models/{name}/ready" for name in ("critic_infer", "critic_train"))]
        fault = 'guerdon_critic_fault{critic="critic"}'
        with httpx.Client(base_url=server.http_url) as client:
            assert [client.get(path).status_code for path in paths] == [200] * 3
            assert f"{fault} 0.0" in client.get("/metrics").text
            with pytest.raises(Refused):
                OverGrpc(server).call("critic_train", train_tensors(request("bug", 1, first_token=BUG_TOKEN)))
            assert [client.get(path).status_code for path in paths] == [400] * 3
            assert f"{fault} 1.0" in client.get("/metrics").text
            index = client.post("/v2/repository/index", json={}).json()
            assert {model["state"] for model in index} == {"UNAVAILABLE"}
        assert service.critic.fault is not service.critic.fault
        for _ in range(3):
            with pytest.raises(Refused, match="broken down"):
                OverHttp(server).call("critic_save", control_tensors())


async def test_a_trainer_that_reports_broken_weights_is_a_fault(tmp_path: Path) -> None:
    async with running(tmp_path) as service:

        def breaks(*_: Any) -> None:
            service.trainer.broken = "a step broke off, which left the weights spoilt"
            raise TrainFailed("global batch 1 failed")

        service.trainer.train = breaks  # type: ignore[method-assign]
        with pytest.raises(TrainFailed):
            await train(service, request("a", 1))
        assert not status.is_ready(service, "critic_infer")
        with pytest.raises(ServerFault, match="left the weights spoilt"):
            await values(service, 1)


@pytest.mark.parametrize(("part", "method"), [("progress", "count"), ("store", "keep_estimates")])
async def test_what_fails_behind_a_trained_request_is_a_fault_and_trains_nothing_twice(
    tmp_path: Path, part: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights have learnt from it, and nothing says so: only a restart knows again what they are."""

    def fails(*_: Any) -> None:
        raise MemoryError

    async with running(tmp_path) as service:
        await train(service, request("a", 1))
        monkeypatch.setattr(getattr(service.critic, part), method, fails)
        for _ in range(2):
            with pytest.raises(ServerFault, match="broken down"):
                await train(service, request("b", 2))
    async with running(tmp_path) as service:
        assert (await state(service)).step == 1
        assert [(await train(service, request("b", 2))).step for _ in range(2)] == [2, 2]


# --- what is told -----------------------------------------------------------------------------------------------------


async def test_gauges_show_what_is_not_finite_and_checkpoints_leave_it_out(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        await train(service, request("a", 1))
        assert 'guerdon_critic_explained_variance{critic="critic"} NaN' in service.metrics.render().decode()
        assert "explained_variance" not in (await control(service, Operation.SAVE)).metrics


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"reward": 1.0, "kl": float("inf")}, "'kl', which is not finite: inf"),
        ({f"{i}": 1.0 for i in range(65)}, "65 numbers; 64 are the most"),
        ({"x" * 101: 1.0}, "101 characters"),
    ],
)
async def test_metrics_of_a_checkpoint_are_few_and_finite(tmp_path: Path, metrics: dict[str, float], told: str) -> None:
    async with running(tmp_path) as service:
        with pytest.raises(InvalidRequest, match=told):
            await control(service, Operation.SAVE, metrics=metrics)
        assert len((await control(service, Operation.SAVE, metrics={"x" * 100: 1.0})).metrics) == 1


def test_a_long_text_is_cut_over_grpc(tmp_path: Path) -> None:
    service = ArithmeticService(tmp_path)
    with RunningServer(service, ServerConfig(port=0, grpc_port=0)) as server:
        for text in ("x" * 200_000, "é\n" * 20_000):
            with pytest.raises(Refused) as refused:
                OverGrpc(server).call("critic_load", control_tensors(checkpoint=text))
            status, kind, told = refused.value.args
            assert (status, kind) == ("INVALID_ARGUMENT", "InvalidRequest")
            assert told.startswith(f"no checkpoint {text[:500]}") and len(told.encode()) < 2100


async def test_weights_of_two_starts_never_share_a_version_if_nothing_is_saved(tmp_path: Path) -> None:
    versions = []
    for folder in (None, None, tmp_path):
        async with running(folder) as service:
            assert (await state(service)).weights_version == "1"
            versions.append((await train(service, request("a", 1))).weights_version)
    assert versions[0].startswith("1+1-run") and versions[0] != versions[1] and versions[2] == "1+1"


def test_an_outcome_after_the_end_of_the_event_loop_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    service = ArithmeticService(None)
    runner = asyncio.Runner()

    async def begin() -> None:
        service.start()
        asked: TrainRequest = request("wait", 4, first_token=WAIT_TOKEN)
        tasks = [asyncio.create_task(train(service, asked)), asyncio.create_task(values(service, 1))]
        await until(lambda: bool(service.trainer.trained))
        del tasks

    runner.run(begin())
    runner.close()
    service.trainer.go.set()
    service.stop()
    assert service.trainer.step == 1
    assert not [record for record in caplog.records if record.exc_info]


async def test_retry_after_counts_requests_held_back_behind_orders() -> None:
    async with running(max_queue_sequences=4) as service:
        await values(service, *range(100))
        scheduler = service.loops.of["critic_infer"]._schedulers["critic_infer"]
        scheduler.room.pace._tokens_per_s = 10.0
        blocked = asyncio.create_task(train(service, request("wait", 4, first_token=WAIT_TOKEN)))
        await until(lambda: bool(service.trainer.trained))
        queued = asyncio.create_task(train(service, request("queued", 1, 2, 3, 4, length=100)))
        await until(lambda: service.loops.depth()["critic_infer"][0] == 4)
        with pytest.raises(Overloaded) as refused:
            await values(service, 1)
        assert refused.value.retry_after_s == 20.0
        service.trainer.go.set()
        await asyncio.gather(blocked, queued)


async def test_a_disk_that_fails_is_said(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async with running(tmp_path) as service:
        monkeypatch.setattr("guerdon.server.critic.store.write_new", full)
        with pytest.raises(StorageFailed):
            await train(service, request("a", 1))
        assert said == [said[0]] and said[0].startswith("train a: StorageFailed: the journal cannot take it")
        assert isinstance(await service.call("critic_state", ControlRequest(Operation.STATE)), object)
