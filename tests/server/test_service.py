"""The data plane over real models and functions: checks, failures that stay alone, limits, deadlines, gauges."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

import scorers
import zoo
from guerdon.assembly import build_service
from guerdon.core import ScoreRequest
from guerdon.errors import (
    ConfigError,
    DeadlineExceeded,
    GuerdonError,
    InvalidRequest,
    Overloaded,
    SampleFailed,
    ServerFault,
    Unavailable,
    UnknownModel,
)
from guerdon.server.service import Service
from guerdon.settings.config import ModelConfig, ServerConfig
from server.helpers import until


@contextlib.asynccontextmanager
async def running(**config: object) -> AsyncIterator[Service]:
    config = {"model": "scorers:score", **config}
    service = build_service(ServerConfig(models=[ModelConfig(**config)]))  # type: ignore[arg-type]
    service.start()
    try:
        yield service
    finally:
        scorers.hold.set()
        await asyncio.to_thread(service.stop)


@pytest.fixture(autouse=True)
def fresh() -> None:
    scorers.calls.clear()
    scorers.hold.clear()


def request(*rows: list[int], **kw: object) -> ScoreRequest:
    return ScoreRequest(tokens=[np.array(row, dtype=np.int64) for row in rows], **kw)  # type: ignore[arg-type]


async def test_scores_come_in_the_order_of_the_samples() -> None:
    async with running(max_batch_tokens=4) as service:
        reply = await service.score("reward_model", request([1, 2], [3], [4, 5, 6], [7, 8, 9, 10, 11]))
    assert [r.reward for r in reply.results] == [3, 3, 15, 45]  # type: ignore[union-attr]
    assert reply.lengths == [2, 1, 3, 5] and reply.compute_s > 0


async def test_one_bad_sample_fails_alone_in_its_request_and_its_batch() -> None:
    async with running() as service:
        replies = await asyncio.gather(
            service.score("reward_model", request([1], [13], [2])),
            service.score("reward_model", request([66], [3])),
            service.score("reward_model", request([4])),
        )
    kinds = [[type(r).__name__ for r in reply.results] for reply in replies]
    assert kinds == [["Score", "SampleFailed", "Score"], ["ServerFault", "Score"], ["Score"]]
    failed = replies[0].results[1], replies[1].results[0]
    assert isinstance(failed[0], SampleFailed) and isinstance(failed[1], ServerFault)
    assert "nan" in str(failed[0]) and "a bug in the user's function" in str(failed[1])


@pytest.mark.parametrize(
    ("row", "steps", "says"),
    [
        ([], None, "no tokens"),
        ([5, -1], None, "token id -1 is negative"),
        ([5, zoo.VOCAB_SIZE], None, f"token id {zoo.VOCAB_SIZE} is outside"),
        ([5] * (zoo.MAX_LENGTH + 1), None, f"takes at most {zoo.MAX_LENGTH}"),
        ([5, 6], np.array([2]), "step position"),
    ],
)
async def test_what_is_wrong_with_a_sample_is_said_in_its_place(
    row: list[int], steps: np.ndarray | None, says: str, tmp_path: Path
) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "llama")
    async with running(model=str(folder)) as service:
        asked = request([5, 6], row, steps=None if steps is None else [np.array([0]), steps])
        fine, wrong = (await service.score("reward_model", asked)).results
    assert not isinstance(fine, GuerdonError)
    assert isinstance(wrong, InvalidRequest) and says in str(wrong)


async def test_text_needs_a_tokenizer_and_messages_a_template(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "llama")
    async with running(model=str(folder)) as service:
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            await service.score("reward_model", ScoreRequest(texts=["hello"]))
    zoo.tokenizer(folder, chat_template=None)
    async with running(model=str(folder)) as service:
        by_text = await service.score("reward_model", ScoreRequest(texts=["hello", ""]))
        assert isinstance(by_text.results[1], InvalidRequest)
        with pytest.raises(InvalidRequest, match="no chat template"):
            await service.score("reward_model", ScoreRequest(messages=[[{"role": "user", "content": "hi"}]]))


async def test_truncation_is_asked_for_by_side(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "llama")
    row = zoo.rows()[0]
    assert len(row) > 20
    for side, kept in (("left", row[-20:]), ("right", row[:20])):
        async with running(model=str(folder), max_length=20, truncation=side) as service:
            (got,) = (await service.score("reward_model", request(row.tolist()))).results
        assert got.reward == pytest.approx(zoo.reference(folder, [kept])[0], abs=1e-5)  # type: ignore[union-attr]


async def test_truncation_hides_no_error_and_is_refused_if_the_model_answers_for_tokens(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "llama")
    async with running(model=str(folder), max_length=20, truncation="right") as service:
        asked = request([5] * 40, [zoo.VOCAB_SIZE] * 40, prompt_lengths=np.array([10, 10]))
        fine, wrong = (await service.score("reward_model", asked)).results
    assert not isinstance(fine, GuerdonError)
    assert isinstance(wrong, InvalidRequest)
    steps = zoo.checkpoint("llama", tmp_path / "steps", "tokcls", num_labels=2)
    with pytest.raises(ConfigError, match="answers for single tokens"):
        async with running(model=str(steps), truncation="left"):
            pass


async def test_one_bad_conversation_fails_in_its_place(tmp_path: Path) -> None:
    folder = zoo.tokenizer(zoo.checkpoint("llama", tmp_path / "llama"))
    chats = [[{"role": role, "content": "hi"}] for role in ("user", "wizard", "assistant")]
    async with running(model=str(folder)) as service:
        results = (await service.score("reward_model", ScoreRequest(messages=chats))).results
    assert [isinstance(r, InvalidRequest) for r in results] == [False, True, False]


async def test_what_a_function_raises_never_ends_the_thread_that_computes() -> None:
    async with running() as service:
        (failed,) = (await service.score("reward_model", request([scorers.EXITS]))).results
        assert isinstance(failed, ServerFault)
        (fine,) = (await service.score("reward_model", request([1]))).results
        assert fine.reward == 1  # type: ignore[union-attr]
        assert service.ready


async def test_time_counts_from_arrival_and_may_exceed_the_servers_own() -> None:
    service = build_service(ServerConfig(models=[ModelConfig(model="scorers:score")], request_timeout_s=0.05))
    service.start()
    try:
        waiting = asyncio.create_task(service.score("reward_model", request([scorers.WAITS], timeout_s=30)))
        await until(lambda: bool(scorers.calls))
        with pytest.raises(DeadlineExceeded):
            await service.score("reward_model", request([1]))
        scorers.hold.set()
        assert len((await waiting).results) == 1
    finally:
        scorers.hold.set()
        await asyncio.to_thread(service.stop)


async def test_an_unknown_model_and_an_empty_request_are_refused() -> None:
    async with running() as service:
        with pytest.raises(UnknownModel, match="served here: reward_model"):
            await service.score("other", request([1]))
        with pytest.raises(InvalidRequest, match="no samples"):
            await service.score("reward_model", request())


async def test_a_full_queue_refuses_at_once_and_answers_what_it_accepted() -> None:
    async with running(max_queue_sequences=3, max_batch_tokens=1) as service:
        running_now = asyncio.create_task(service.score("reward_model", request([77])))
        await until(lambda: bool(scorers.calls))
        waiting = asyncio.create_task(service.score("reward_model", request([1], [2], [3])))
        await until(lambda: service.loops.depth()["reward_model"][0] == 3)
        with pytest.raises(Overloaded) as refused:
            await service.score("reward_model", request([4]))
        assert refused.value.retry_after_s == 1.0
        scorers.hold.set()
        assert len((await waiting).results) == 3 and len((await running_now).results) == 1


async def test_a_client_that_leaves_costs_nothing_more() -> None:
    async with running(max_batch_tokens=1) as service:
        first = asyncio.create_task(service.score("reward_model", request([77])))
        await until(lambda: bool(scorers.calls))
        gone = asyncio.create_task(service.score("reward_model", request([1], [2], [3])))
        await until(lambda: service.loops.depth()["reward_model"][0] == 3)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        scorers.hold.set()
        await first
        await service.score("reward_model", request([4]))
    assert scorers.calls == [1, 1]


async def test_a_request_that_waits_too_long_is_told_so_and_dropped() -> None:
    async with running(max_batch_tokens=1) as service:
        first = asyncio.create_task(service.score("reward_model", request([77])))
        await until(lambda: bool(scorers.calls))
        with pytest.raises(DeadlineExceeded, match="within the 0"):
            await service.score("reward_model", request([1], timeout_s=0.05))
        scorers.hold.set()
        await first
    assert scorers.calls == [1]


async def test_higher_priority_is_answered_first() -> None:
    async with running(max_batch_tokens=1) as service:
        first = asyncio.create_task(service.score("reward_model", request([77])))
        await until(lambda: bool(scorers.calls))
        done: list[str] = []

        async def ask(name: str, priority: int) -> None:
            await service.score("reward_model", request([1], [2], priority=priority))
            done.append(name)

        tasks = [asyncio.create_task(ask("low", 0)), asyncio.create_task(ask("high", 5))]
        await until(lambda: service.loops.depth()["reward_model"][0] == 4)
        scorers.hold.set()
        await asyncio.gather(first, *tasks)
    assert done == ["high", "low"]


async def test_stopping_answers_what_was_accepted_and_refuses_the_rest() -> None:
    async with running(max_batch_tokens=1) as service:
        accepted = asyncio.create_task(service.score("reward_model", request([77], [1], [2])))
        await until(lambda: bool(scorers.calls))
        stopping = asyncio.create_task(asyncio.to_thread(service.stop))
        await until(lambda: not service.ready)
        with pytest.raises(Unavailable):
            await service.score("reward_model", request([3]))
        scorers.hold.set()
        await stopping
        assert [r.reward for r in (await accepted).results] == [77, 1, 2]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
async def test_metrics_tell_what_was_received_and_what_was_computed(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path / name)
    prompt = list(range(10, 50))
    async with running(model=str(folder)) as service:
        await service.score("reward_model", request(*[[*prompt, i] for i in range(100, 104)]))
        text = service.metrics.render().decode()
    assert 'guerdon_received_tokens_total{model="reward_model"} 164.0' in text
    assert 'guerdon_computed_tokens_total{model="reward_model"} 44.0' in text
    assert f'path="{zoo.PATHS[name]}"' in text and 'guerdon_queue_sequences{model="reward_model"} 0.0' in text


def told(service: Service) -> dict[str, float]:
    """Running, waiting and pending requests, and what was answered, of the one model."""
    found = re.findall(
        r'^(\w+)\{model="reward_model"(?:,version="1")?\} (\S+)$', service.metrics.render().decode(), re.MULTILINE
    )
    return {name: float(value) for name, value in found}


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
        await until(lambda: service.loops.depth()["reward_model"][0] == 3 + 6)
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
