import asyncio

import numpy as np
import pytest

from guerdon.core import Score, ScoreReply, ScoreRequest
from guerdon.errors import SampleFailed
from guerdon.server.page import recorder
from guerdon.server.page.drift import total
from guerdon.settings.config import ServerConfig
from server.echo_service import EchoService


async def test_the_counters_are_read_by_themselves_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "FINE_S", 0.02)
    monkeypatch.setattr(recorder, "_LEAST_S", 0.01)
    service = EchoService()
    service.start()
    readings = service.recorder.counters
    try:
        first = readings.last
        async with asyncio.timeout(30):
            while len(readings._fine) < 3:
                await asyncio.sleep(0.01)
        assert readings.last > first > 0
    finally:
        await asyncio.to_thread(service.stop)
    last = readings.last
    await asyncio.sleep(0.1)
    assert readings.last == last


def test_only_rewards_that_a_request_asks_for_are_recorded():
    service = EchoService(ServerConfig(dashboard_samples=True))
    (info, _), tokens = service.catalog.infos(), [np.arange(n) for n in (1, 2, 3)]
    reply = ScoreReply([Score(1.0), SampleFailed("none"), Score(3.0)], [1, 2, 3], "1")
    service.recorder.note(info, ScoreRequest(tokens=tokens, wants_rewards=False), reply)
    assert not service.recorder.rewards._pending
    service.recorder.note(info, ScoreRequest(tokens=tokens), reply)
    ((name, _, rewards, lengths),) = service.recorder.rewards._pending
    assert (name, rewards, lengths) == (info.name, [1.0, 3.0], [1, 3])
    assert [one.reward for one in service.recorder.extremes[info.name].best(0)] == [3, 1]


def test_a_failure_to_note_fails_no_request_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    service = EchoService(ServerConfig(dashboard_samples=True))
    (info, _) = service.catalog.infos()
    request = ScoreRequest(texts=["a secret text"])
    for _ in range(3):
        service.recorder.note(info, request, ScoreReply([Score(1.0), Score(2.0)], [1, 1], "1"))  # one text for two
    (record,) = [record for record in caplog.records if record.name.endswith("recorder")]
    assert "lacks rewards of reward_model" in record.message
    assert "secret" not in caplog.text


async def test_many_rewards_are_counted_a_part_at_a_time() -> None:
    service = EchoService()
    service.start()
    try:
        (info, _) = service.catalog.infos()
        request = ScoreRequest(tokens=[np.array([1])] * 500)
        for _ in range(100):
            service.recorder.note(info, request, ScoreReply([Score(1.0)] * 500, [1] * 500, "1"))
        before = service.recorder.rewards.num_pending
        await asyncio.sleep(0)
        assert before - 6000 < service.recorder.rewards.num_pending < before
        async with asyncio.timeout(30):
            while service.recorder.rewards.num_pending:
                await asyncio.sleep(0)
    finally:
        await asyncio.to_thread(service.stop)
    taken = service.recorder.rewards.taken(info.name, service.recorder.now() - 60, service.recorder.now())
    assert total(bucket.moments for _, bucket in taken.between(0, 1e12)).count == 50_000


async def test_an_answered_request_is_noted_and_a_refused_one_is_not() -> None:
    service = EchoService()
    service.start()
    try:
        await service.score("reward_model", ScoreRequest(tokens=[np.array([5, 6])]))
        with pytest.raises(Exception, match="no samples"):
            await service.score("reward_model", ScoreRequest(tokens=[]))
    finally:
        await asyncio.to_thread(service.stop)
    noted = [(name, rewards, lengths) for name, _, rewards, lengths in service.recorder.rewards._pending]
    assert noted == [("reward_model", [11.0], [2])]
