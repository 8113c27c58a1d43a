"""Two keys' holders against one server: who floods it is refused, and the other is served as if alone."""

import asyncio
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np

import scorers
from guerdon.assembly import build_service
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig, ServerConfig
from guerdon.wire import kserve
from server.arithmetic_critic import WAIT_TOKEN, ArithmeticService, request
from server.helpers import INFER, body_of, wait_until
from server.keys import SCORE, TRAIN, bearer, keyed
from server.test_critic_transports import train

KEYS = {"flood": "flood-0123456789abcdef", "small": "small-0123456789abcdef"}
ROW = list(range(10, 60))
BATCH_S = 0.1


def slowly(tokens: list[np.ndarray]) -> list[float]:
    """A user's function: the first ids, after a while, and not before `scorers.hold` is set."""
    scorers.calls.append(len(tokens))
    scorers.hold.wait(60)
    time.sleep(BATCH_S)
    return [float(t[0]) for t in tokens]


async def ask(client: httpx.AsyncClient, key: str, num_rows: int) -> tuple[int, int, float | None]:
    """The status of one request, how many batches began until its answer came, and when to come again."""
    before = len(scorers.calls)
    reply = await client.post(INFER, content=body_of([ROW] * num_rows), headers={"Authorization": f"Bearer {key}"})
    again = reply.headers.get("retry-after")
    return reply.status_code, len(scorers.calls) - before, again and float(again)


async def both(url: str) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        flood = [asyncio.create_task(ask(client, KEYS["flood"], 4)) for _ in range(60)]
        await asyncio.to_thread(wait_until, lambda: sum(task.done() for task in flood) >= 10)  # they are refused
        scorers.hold.set()
        await asyncio.to_thread(wait_until, lambda: len(scorers.calls) > 2)
        mine = [await ask(client, KEYS["small"], 4) for _ in range(3)]
        told = await asyncio.gather(*flood)
    statuses = Counter(status for status, *_ in told)
    assert set(statuses) == {200, 503} and statuses[503] >= 10
    assert [status for status, *_ in mine] == [200] * 3
    assert all(again and again >= 1 for status, _, again in told if status == 503)
    # It waits for what runs and has half of the next batches; the flood's last waits for all before it.
    longest = max(count for status, count, _ in told if status == 200)
    assert longest > 10 and max(count for _, count, _ in mine) < longest / 2


def test_a_flood_is_refused_and_another_client_is_served_soon(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"score {name} {key}\n" for name, key in KEYS.items()))
    model = ModelConfig(model="server.test_fair_over_http:slowly", max_batch_tokens=400, max_queue_sequences=160)
    config = ServerConfig(port=0, grpc_port=None, models=[model], api_keys_file=str(keys))
    scorers.hold.clear()
    scorers.calls.clear()
    with RunningServer(build_service(config), config) as server:
        try:
            asyncio.run(both(server.http_url))
        finally:
            scorers.hold.set()


async def behind_a_train(url: str, service: ArithmeticService) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:

        async def asked(model: str, key: str, body: bytes, json_length: int) -> int:
            headers = bearer(key) | {"Inference-Header-Content-Length": str(json_length)}
            return (await client.post(f"/v2/models/{model}/infer", content=body, headers=headers)).status_code

        def trained(name: str, **more: int) -> asyncio.Task[int]:
            body, json_length = kserve.encode_request(train(request(name, 1, **more)))
            return asyncio.create_task(asked("critic_train", TRAIN, body, json_length))

        trains = [trained("runs", first_token=WAIT_TOKEN)]
        await asyncio.to_thread(wait_until, lambda: bool(service.trainer.trained))
        rows = body_of([[1, 2]])
        flood = [asyncio.create_task(asked("critic_infer", SCORE, rows, len(rows))) for _ in range(40)]
        await asyncio.to_thread(wait_until, lambda: sum(task.done() for task in flood) == 18)  # they are refused
        trains += [trained(f"waits {i}") for i in range(4)]
        await asyncio.to_thread(wait_until, lambda: service.loops.depth()["critic_infer"][0] >= 22 + 4)
        service.trainer.go.set()
        assert await asyncio.gather(*trains) == [200] * 5
        assert Counter(await asyncio.gather(*flood)) == {200: 22, 503: 18}


def test_a_flood_of_scores_leaves_room_for_the_trainers_trains(tmp_path: Path) -> None:
    config = keyed(tmp_path, grpc_port=None)
    service = ArithmeticService(server=config, max_queue_sequences=32)
    with RunningServer(service, config) as server:
        try:
            asyncio.run(behind_a_train(server.http_url, service))
        finally:
            service.trainer.go.set()
