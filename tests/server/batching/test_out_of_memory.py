"""Batches that do not fit are halved; a dead device, or a loop that ends by a bug, ends the server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import zoo
from guerdon.core import Command, Score, Scored, ScoreRequest, Sequence, Signal
from guerdon.errors import Offloaded, ServerFault, TrainFailed, Unavailable, is_out_of_memory
from guerdon.server import status
from guerdon.server.batching.halving import Budget, check_device
from guerdon.server.batching.jobs import Job, Limits
from guerdon.server.batching.loop import Loop
from guerdon.server.batching.scheduler import Scheduler
from guerdon.server.metrics import Metrics
from guerdon.server.service import Service
from server.arithmetic_critic import ArithmeticService, request
from server.echo_service import EchoService
from server.helpers import INFER, body_of

TESTS = Path(__file__).parents[2]


class OutOfMemoryError(RuntimeError):
    """As torch names a GPU's."""


class SmallWorker:
    """Gives each sequence its length; has memory for `capacity` tokens at once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sizes: list[int] = []
        self.error: BaseException = OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def execute(self, command: Command) -> Scored | None:
        if command.signal is Signal.EXIT:
            return None
        self.sizes.append(sum(len(s.tokens) for s in command.sequences))
        if self.sizes[-1] > self.capacity:
            raise self.error
        return Scored([Score(float(len(s.tokens))) for s in command.sequences], "1")


class Running:
    """A loop over one model, and its jobs one after another."""

    def __init__(self, worker: Any, **limits: Any) -> None:
        self.metrics = Metrics()
        self.scheduler = Scheduler(Limits(**{"max_batch_tokens": 1000, **limits}))
        self.crashed = False
        self.loop = Loop(worker, {"m": self.scheduler}, self._deliver, self.metrics, on_crash=self._crash)
        self.loop.start()

    def _deliver(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.owner.set()  # type: ignore[attr-defined]

    def _crash(self) -> None:
        self.crashed = True

    def score(self, *lengths: int) -> list[Any]:
        """Of each sequence its reward, or its error."""
        job = Job([Sequence(np.arange(n) + 10_000 * i) for i, n in enumerate(lengths)], owner=threading.Event())
        self.loop.submit("m", job)
        assert job.owner.wait(120)  # type: ignore[attr-defined]
        return [r.reward if isinstance(r, Score) else r for r in job.results]

    def told(self, name: str) -> float | None:
        return self.metrics._registry.get_sample_value(name, {"model": "m"})

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.loop.stop(20) and not self.crashed


def test_a_batch_that_does_not_fit_is_halved_and_later_ones_are_no_larger_than_what_did(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = SmallWorker(300)
    with Running(worker) as running:
        assert running.told("guerdon_batch_budget_tokens") == 1000
        assert running.score(*[100] * 8) == [100.0] * 8
        assert worker.sizes == [800, 400, 200, 200, 400, 200, 200]
        assert running.score(*[100] * 8) == [100.0] * 8
        assert worker.sizes[7:] == [200] * 4
        assert running.told("guerdon_batch_budget_tokens") == 200
        assert running.told("guerdon_out_of_memory_total") == 3
    (warned,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "200 at most for the next 64. Give --max-batch-tokens 200" in warned.getMessage()


def test_a_passing_shortage_in_a_small_batch_is_not_for_ever() -> None:
    worker = SmallWorker(1000)
    with Running(worker) as running:
        running.score(100, 100, 100)
        worker.capacity = 1
        assert running.score(1, 1) == [1.0, 1.0]
        assert running.told("guerdon_batch_budget_tokens") == 300  # as many have fitted
        worker.capacity = 1000
        for budget in (300, 600, 1000):
            assert running.told("guerdon_batch_budget_tokens") == budget
            for _ in range(64):
                running.score(10)
        del worker.sizes[:]
        assert running.score(*[100] * 8) == [100.0] * 8 and worker.sizes == [800]


def test_a_shortage_that_stays_is_tried_ever_less_often() -> None:
    budget, failed = Budget(4096), []
    for batch in range(40_000):  # each as large as it may be
        if budget.num_tokens > 600:
            failed.append(batch)
            budget.did_not_fit(600)
        else:
            budget.fitted(budget.num_tokens)
    waits = np.diff(failed).tolist()
    assert waits[:7] == [65, 129, 257, 513, 1025, 2049, 4097] and set(waits[7:]) == {4097}


def test_a_sample_too_large_for_the_memory_fails_alone_and_costs_the_others_no_budget() -> None:
    worker = SmallWorker(300)
    with Running(worker) as running:
        *others, large = running.score(100, 100, 90, 400)
        assert others == [100.0, 100.0, 90.0] and isinstance(large, ServerFault)
        assert "out of memory" in str(large)
        assert running.told("guerdon_batch_budget_tokens") == 1000


def test_an_error_that_is_not_memorys_leaves_the_budget() -> None:
    worker = SmallWorker(300)
    worker.error = ValueError("a bug")
    with Running(worker) as running:
        assert running.score(*[100] * 4) == [100.0] * 4
        assert running.told("guerdon_batch_budget_tokens") == 1000
        assert running.told("guerdon_out_of_memory_total") is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("could not create a primitive"), True),
        (OutOfMemoryError("any text"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (ServerFault("rank 1 on gpu-2: OutOfMemoryError: CUDA out of memory."), True),
        (ValueError("a bug"), False),
        (Unavailable("the server is stopping"), False),
    ],
)
def test_errors_that_mean_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize(
    ("error", "answered"),
    [
        (ServerFault("out of memory"), ServerFault),
        (OutOfMemoryError("out of memory"), ServerFault),
        (Offloaded("no weights"), Offloaded),
    ],
)
def test_an_error_keeps_no_tensors_once_it_is_answered(error: Exception, answered: type[Exception]) -> None:
    class Failing(SmallWorker):
        def execute(self, command: Command) -> Scored | None:
            if command.signal is Signal.EXIT:
                return None
            activations = np.zeros(10)  # noqa: F841 - what a forward's frame holds
            raise error

    with Running(Failing(0)) as running:
        (answer,) = running.score(5)
    assert isinstance(answer, answered) and answer.__traceback__ is None
    assert error.__traceback__ is None


@pytest.mark.parametrize("where", ["batch", "end"])
def test_memory_that_ends_beside_a_forward_fails_that_batch_and_the_loop_goes_on(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Running(SmallWorker(1000), max_batch_tokens=200) as running:
        owner: Any = running.metrics if where == "batch" else running.scheduler.room.pace
        right, calls = getattr(owner, where), []

        def short(*args: Any) -> None:
            calls.append(args)
            if len(calls) == 1:
                raise MemoryError
            right(*args)

        monkeypatch.setattr(owner, where, short)
        results = running.score(*[100] * 6)  # the rest of the request is not computed in vain
        assert all(isinstance(r, ServerFault) and "memory" in str(r) for r in results) and len(calls) == 1
        assert running.score(100, 50) == [100.0, 50.0]
        assert running.scheduler.num_sequences == running.scheduler.room.sequences.taken == 0
    assert any("outside of a forward" in r.getMessage() for r in caplog.records)


def test_memory_that_ends_while_a_batch_is_chosen_delays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with Running(SmallWorker(1000)) as running:
        right, calls = running.scheduler._queue.head, []

        def short() -> Job | None:
            calls.append(1)
            if len(calls) in (1, 3):
                raise MemoryError
            return right()

        monkeypatch.setattr(running.scheduler._queue, "head", short)
        assert running.score(100, 90, 80) == [100.0, 90.0, 80.0]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="bounds a process's memory as Linux does")
def test_a_real_models_batch_that_the_memory_cannot_hold(tmp_path: Path) -> None:
    folder = zoo.checkpoint(
        "llama", tmp_path / "rm", intermediate_size=4096, num_hidden_layers=2, max_position_embeddings=8192
    )
    done = subprocess.run(
        [sys.executable, TESTS / "short_of_memory.py", folder],
        env=os.environ | {"PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["before"] == {"budget": 10**6, "out_of_memory": 0}
    np.testing.assert_allclose(told["first"], told["alone"], atol=1e-5)
    np.testing.assert_allclose(told["again"], told["alone"], atol=1e-5)
    after = told["after_first"]
    assert after["out_of_memory"] > 0 and 96 <= after["budget"] < 40 * 96
    # What did not fit is not tried again; a batch that just did may not, as what the allocators keep changes.
    assert told["after_again"]["out_of_memory"] <= told["settled"]["out_of_memory"] + 1 <= after["out_of_memory"] + 3
    assert "memory" in told["with_long"].pop(3)
    np.testing.assert_allclose(told["with_long"], told["alone"][:6], atol=1e-5)
    assert told["after_long"]["budget"] >= 96
    np.testing.assert_allclose(told["still"], told["alone"][:5], atol=1e-5)


WHY = "CUDA error: an illegal memory access was encountered"
ROWS = [np.array([5, n]) for n in range(4)]


class AcceleratorError(RuntimeError):
    """As torch names it."""


DEAD = AcceleratorError(f"{WHY}\nCUDA kernel errors might be asynchronously reported at some other API call")


async def check_that_it_ends(service: Service) -> None:
    async with asyncio.timeout(30):
        await service.ending.wait()
    with pytest.raises(ServerFault, match=WHY):
        service.check_ready()
    assert not status.is_ready(service) and WHY in status.why_not_ready(service)
    assert isinstance(service.loss, ServerFault) and service.loss.__cause__ is None  # and so no frames of a forward
    await asyncio.to_thread(service.stop, 5.0)


async def test_a_batch_is_not_halved_and_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    service, calls = EchoService(), []

    def score(sequences: list[Any]) -> None:
        calls.append(len(sequences))
        raise DEAD

    monkeypatch.setattr(service.scorer, "score", score)
    service.start()
    reply = await service.score("reward_model", ScoreRequest(tokens=ROWS))
    assert calls == [len(ROWS)]
    assert all(isinstance(r, ServerFault) and f"the server ends ({WHY})" in str(r) for r in reply.results)
    await check_that_it_ends(service)


@pytest.mark.parametrize(
    "error", [DEAD, TrainFailed(f"global batch 1 of 1 failed (AcceleratorError: {WHY}\n): nothing")]
)
async def test_a_train_is_told_and_is_the_last(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = ArithmeticService(tmp_path)

    def train(*_: Any) -> None:
        raise error

    monkeypatch.setattr(service.trainer, "train", train)
    service.start()
    with pytest.raises(ServerFault, match=WHY):
        await service.call("critic_train", request("a", 3.0))
    await check_that_it_ends(service)


async def test_a_bad_sample_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    service = EchoService()

    def score(sequences: list[Any]) -> None:
        raise ValueError(f"AcceleratorError: {WHY}")  # what a client has written

    monkeypatch.setattr(service.scorer, "score", score)
    service.start()
    reply = await service.score("reward_model", ScoreRequest(tokens=ROWS))
    assert all(isinstance(r, ServerFault) for r in reply.results) and status.is_ready(service)
    await asyncio.to_thread(service.stop, 5.0)


@pytest.mark.parametrize(
    ("error", "is_dead"),
    [
        (AcceleratorError("CUDA error: device-side assert triggered"), True),
        (AcceleratorError("HIP error: unspecified launch failure"), True),
        (ServerFault(f"rank 3 on gpu-2.local: AcceleratorError: {WHY}"), True),
        (TrainFailed(f"global batch 1 of 2 failed (rank 1 on a: AcceleratorError: {WHY}): nothing was changed"), True),
        (AcceleratorError("CUDA error: invalid configuration argument"), False),
        (RuntimeError(WHY), False),
        (ServerFault(f"rank 3 on gpu-2: ValueError: AcceleratorError: {WHY}"), False),
    ],
)
def test_what_says_that_a_device_is_dead(error: Exception, is_dead: bool) -> None:
    if is_dead:
        with pytest.raises(ServerFault, match="computes nothing any more") as raised:
            check_device(error)
        assert raised.value is not error
    else:
        check_device(error)


_SERVED = """\
from guerdon.settings.config import ServerConfig
from guerdon.server.batching.room import Pace
from guerdon.server.runtime import run
from server.echo_service import EchoService
Pace.end = None
run(EchoService(), ServerConfig(port=0, grpc_port=0), on_started=lambda http, _: print(http, flush=True))
"""


async def test_what_is_asked_afterwards_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guerdon.server.batching.room.Pace.end", None)
    service = EchoService()
    service.start()
    reply = await service.score("reward_model", ScoreRequest(tokens=[np.array([5])]))
    assert isinstance(reply.results[0], ServerFault)
    async with asyncio.timeout(30):
        await service.ending.wait()
    with pytest.raises(ServerFault, match="cannot compute any more") as raised:
        service.check_ready()
    assert raised.value is not service.loss and not raised.value.retryable
    assert not status.is_ready(service) and "cannot compute any more" in status.why_not_ready(service)
    await asyncio.to_thread(service.stop, 5.0)


def test_the_process_ends_with_an_error() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _SERVED]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            told = httpx.post(url + INFER, content=body_of([[5]]), timeout=120)
            assert (told.status_code, told.headers["guerdon-error"]) == (500, "ServerFault")
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "the thread that computes has ended" in said and "ServerFault: the server cannot compute" in said
