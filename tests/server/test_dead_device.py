"""A device that is dead, as CUDA leaves it behind an illegal access: no sample is to blame, and the server ends."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from guerdon.core import ScoreRequest
from guerdon.errors import ServerFault, TrainFailed
from guerdon.server import status
from guerdon.server.batching.halving import check_device
from guerdon.server.service import Service
from server.arithmetic_critic import ArithmeticService, request
from server.echo_service import EchoService

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
