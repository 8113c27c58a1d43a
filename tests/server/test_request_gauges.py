"""What a real server tells of its requests: those that run, those that wait, and the same in Triton's words."""

import asyncio
import re

import numpy as np
import pytest

import scorers
from guerdon.assembly import build_service
from guerdon.core import ScoreRequest
from guerdon.server.service import Service
from guerdon.settings.config import ModelConfig, ServerConfig


def request(*rows: list[int]) -> ScoreRequest:
    return ScoreRequest(tokens=[np.array(row, dtype=np.int64) for row in rows])


def told(service: Service) -> dict[str, float]:
    """Running, waiting and pending requests, and what was answered, of the one model."""
    found = re.findall(
        r'^(\w+)\{model="reward_model"(?:,version="1")?\} (\S+)$', service.metrics.render().decode(), re.MULTILINE
    )
    return {name: float(value) for name, value in found}


@pytest.fixture(autouse=True)
def fresh() -> None:
    scorers.calls.clear()
    scorers.hold.clear()


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_requests_wait_until_something_of_them_is_taken_up_and_run_until_their_answer() -> None:
    model = ModelConfig(model="scorers:score", max_batch_tokens=2)
    service = build_service(ServerConfig(models=[model]))
    service.start()
    try:
        idle = told(service)
        assert idle["guerdon_num_requests_running"] == idle["guerdon_num_requests_waiting"] == 0
        assert idle["nv_inference_pending_request_count"] == idle["nv_inference_request_success"] == 0
        # The first has more sequences than a batch holds: while its first batch is held, its others wait, and it runs.
        first = asyncio.create_task(service.score("reward_model", request([77], [1], [2], [3], [4])))
        await until(lambda: bool(scorers.calls))
        others = [asyncio.create_task(service.score("reward_model", request([5], [6]))) for _ in range(3)]
        await until(lambda: service.loops.depth()["reward_model"][0] > 5)
        busy = told(service)
        assert busy["guerdon_num_requests_running"] == 1
        assert busy["guerdon_num_requests_waiting"] == 3
        assert busy["nv_inference_pending_request_count"] == 3
        others[0].cancel()
        await until(lambda: told(service)["guerdon_num_requests_waiting"] == 2)
        scorers.hold.set()
        await asyncio.gather(first, *others[1:])
        await until(lambda: told(service)["guerdon_num_requests_running"] == 0)
        done = told(service)
        assert done["guerdon_num_requests_waiting"] == done["nv_inference_pending_request_count"] == 0
        assert done["nv_inference_count"] == done["guerdon_batch_sequences_sum"] == 9
        assert done["nv_inference_exec_count"] == done["guerdon_batch_seconds_count"]
        assert done["guerdon_request_inference_time_seconds_count"] == 3
        assert done["guerdon_request_inference_time_seconds_sum"] >= done["guerdon_batch_seconds_sum"]
    finally:
        scorers.hold.set()
        await asyncio.to_thread(service.stop)
