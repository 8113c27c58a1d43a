"""Train requests with rewards: returns are estimated once, kept in the journal, and answered again as they were."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from guerdon.critic_core import Gae, Operation, TrainReport, TrainRequest
from guerdon.errors import InvalidRequest, Offloaded, StartError, StorageFailed
from guerdon.server.critic import store
from guerdon.server.critic.records import digest_of
from guerdon.server.critic.store import AnsweredEstimates, Journal
from server.arithmetic_critic import WAIT_TOKEN, after, request
from server.critic.test_critic import control, records, running, train
from server.helpers import until


def rewarded(id: str, *rewards: float, length: int = 4) -> TrainRequest:  # noqa: A002
    """A row for each of `rewards`, which stands at all its tokens; the first token is not masked."""
    asked = request(id, *rewards, length=length)
    asked.rewards, asked.gae = asked.returns, Gae()
    asked.mask[:, 1:] = 1
    asked.returns = asked.prev_values = np.empty((len(rewards), 0), np.float32)
    return asked


def expected(asked: TrainRequest, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """Its advantages and returns by a critic of that weight: two tokens count, so the returns are 2 r and r."""
    reward = asked.rewards[:, :1]  # type: ignore[index]
    returns = np.concatenate([0 * reward, 2 * reward, reward], axis=1)
    values = np.float32([0, 2, 3]) * np.float32(weight)
    return np.where(asked.mask > 0, returns - values, 0), returns


def learnt(asked: TrainRequest) -> TrainRequest:
    """The request with its returns, for `after`."""
    made = request(asked.id, *asked.rewards[:, 0], length=4)  # type: ignore[index]
    made.returns, made.mask = expected(asked, 1.0)[1], asked.mask
    return made


def assert_answered(report: TrainReport, asked: TrainRequest, weight: float) -> None:
    for found, wanted in zip((report.advantages, report.returns), expected(asked, weight), strict=True):
        assert found is not None and found.dtype == np.float32
        np.testing.assert_array_equal(found, wanted)


async def test_the_returns_are_estimated_by_the_weights_of_the_moment_and_learnt(tmp_path: Path) -> None:
    a, b = rewarded("a", 3, 5), rewarded("b", 7)
    async with running(tmp_path) as service:
        first, second = await asyncio.gather(train(service, a), train(service, b))
        assert_answered(first, a, 1.0)
        weight = after([learnt(a)])
        assert_answered(second, b, weight)
        assert service.trainer.weight == after([learnt(a), learnt(b)])
        assert service.trainer.estimated == ["a", "b"]


async def test_an_answer_is_repeated_whatever_the_weights_are_now(tmp_path: Path) -> None:
    a, b = rewarded("a", 3, 5), rewarded("b", 7)
    b.updates = 3
    weight = after([learnt(a)])
    for start in ("first", "replayed", "saved", "loaded"):
        async with running(tmp_path) as service:
            for asked, before in ((a, 1.0), (b, weight)):
                assert_answered(await train(service, asked), asked, before)
            assert service.trainer.weight == after([learnt(a), *[learnt(b)] * 3])
            # The values of the moment were journalled with the request.
            assert service.trainer.estimated == (["a", "b"] if start == "first" else [])
            if start == "saved":
                await control(service, Operation.SAVE)
                await train(service, request("c", 1))
                await control(service, Operation.LOAD)  # back to before c
                assert_answered(await train(service, b), b, weight)
            with pytest.raises(InvalidRequest, match="train_id 'a' was used for another request"):
                await train(service, rewarded("a", 3, 6))
            other = rewarded("a", 3, 5)
            other.gae = Gae(0.5)
            with pytest.raises(InvalidRequest, match="train_id 'a' was used for another request"):
                await train(service, other)
    assert start == "loaded"


async def test_a_request_that_waits_already_is_estimated_once() -> None:
    async with running() as service:
        blocked = asyncio.create_task(train(service, request("wait", 4, first_token=WAIT_TOKEN)))
        await until(lambda: bool(service.trainer.trained))
        both = [asyncio.create_task(train(service, rewarded("a", 3))) for _ in range(2)]
        await asyncio.sleep(0.01)
        service.trainer.go.set()
        await blocked
        first, second = [await task for task in both]
        assert service.trainer.estimated == ["a"]
        assert first.advantages is second.advantages is not None


async def test_only_the_newest_answers_keep_their_advantages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_KEPT_BYTES", 20)  # the tokens of one request take 16
    async with running(tmp_path) as service:
        for name in "ab":
            await train(service, rewarded(name, 3))
        step = (await train(service, rewarded("b", 3))).step
        with pytest.raises(
            InvalidRequest, match=r"'a' was applied \(the critic was at step 1 then\), but its advantages"
        ):
            await train(service, rewarded("a", 3))
        assert (step, service.trainer.step) == (2, 2)
        await train(service, rewarded("large", *[1.0] * 10))  # the newest stays, however large
        assert (await train(service, rewarded("large", *[1.0] * 10))).advantages is not None


async def test_an_id_that_is_not_known_any_more_is_a_new_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_OUTCOMES", 1)
    async with running() as service:
        for name in "aba":
            await train(service, rewarded(name, 3))
        assert service.trainer.estimated == ["a", "b", "a"]
        assert len(service.critic.store._answered._tables) == 1


async def test_validation_answers_advantages_and_changes_nothing(tmp_path: Path) -> None:
    a = rewarded("a", 3, 5)
    async with running(tmp_path) as service:
        report = await service.call("critic_validate", a)
        assert isinstance(report, TrainReport)
        assert_answered(report, a, 1.0)
        assert (service.trainer.weight, records(tmp_path)) == (1.0, [])


async def test_a_failure_to_estimate_leaves_nothing_and_may_be_tried_again(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        await control(service, Operation.OFFLOAD)
        with pytest.raises(Offloaded):
            await train(service, rewarded("a", 3))
        await control(service, Operation.ONLOAD)
        estimate = service.trainer.estimate

        def fails(asked: TrainRequest) -> TrainRequest:
            raise StorageFailed("something of the moment")

        service.trainer.estimate = fails  # type: ignore[method-assign]
        with pytest.raises(StorageFailed, match="of the moment"):
            await train(service, rewarded("a", 3))
        assert records(tmp_path) == []
        service.trainer.estimate = estimate  # type: ignore[method-assign]
        assert_answered(await train(service, rewarded("a", 3)), rewarded("a", 3), 1.0)


def test_a_record_has_what_was_estimated_and_shows_its_damage(tmp_path: Path) -> None:
    asked = rewarded("a", 1.5, 2)
    asked.gae = Gae(0.5, 1.0, lam_alpha=0.25)
    digest = digest_of(asked)
    asked.advantages, asked.returns = expected(asked, 2.0)
    asked.prev_values = np.float32(asked.mask * 2)
    assert digest_of(asked) == digest
    journal = Journal(tmp_path)
    journal.append({}, asked, digest)
    journal.mark_done(1)
    journal.append({}, request("b", 1), digest_of(request("b", 1)))
    journal.close()
    again = Journal(tmp_path)
    (record, _) = again.records(0)
    again.close()
    assert record.request is not None and record.request.gae == asked.gae
    for name in ("tokens", "rewards", "mask", "returns", "prev_values", "advantages"):
        np.testing.assert_array_equal(getattr(record.request, name), getattr(asked, name))
    path = tmp_path / "000000000001-done.safetensors"
    whole = path.read_bytes()
    for table in (asked.advantages, asked.rewards, asked.returns):
        at = whole.index(table.tobytes())  # type: ignore[union-attr]
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        damaged = Journal(tmp_path)
        with pytest.raises(StartError, match="is damaged"):
            list(damaged.records(0))
        damaged.close()


def test_kept_answers_keep_their_order_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = AnsweredEstimates()
    assert kept.dumps() is None
    made = [rewarded(name, 1, 2) for name in ("z", "a/b", "ü")]
    for asked in made:
        asked.advantages, asked.returns = expected(asked, 1.0)
        kept.keep(asked)
    again = AnsweredEstimates(kept.dumps())
    report = TrainReport("", 1, "1", 0.5, [0.5], 1, 0.0, 0.0, 1.0, 1.0, 1, 0)
    for asked in made:
        assert_answered(again.complete(report, asked), asked, 1.0)
    monkeypatch.setattr(store, "MOST_KEPT_BYTES", 2 * 2 * 4 * 4)  # two requests of two rows of two tokens
    again.keep(made[1])
    for asked in made[1:]:
        again.complete(report, asked)
    with pytest.raises(InvalidRequest, match="'z' was applied"):
        again.complete(report, made[0])
    assert report.advantages is None
