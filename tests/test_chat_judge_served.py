"""Judges in words over the wire, asked of a strict stand-in for an OpenAI-compatible server in another process."""

import asyncio
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import served
from guerdon.assembly import build_service
from guerdon.client import AsyncRewardClient, RetryPolicy, RewardClient, Scores
from guerdon.core import Score, ScoreRequest
from guerdon.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from guerdon.server.chat_judge import calling
from guerdon.server.chat_judge.answer_cache import AnswerCache
from guerdon.server.runtime import RunningServer
from guerdon.settings.chat_judges import BudgetConfig, ChatJudgeConfig, ParseConfig
from guerdon.settings.config import ComponentConfig, ModelConfig, RewardConfig, ServerConfig
from ports import free_port
from server.helpers import outcomes, tried_again, wait_until
from stand_in_judge import KEY, MODEL, StandIn, stand_in

PARSE = ParseConfig(regex=r"Score: (\S+)", lowest=-100, highest=100)


@pytest.fixture(scope="module")
def remote() -> Iterator[StandIn]:
    with stand_in() as running:
        yield running


@pytest.fixture(scope="module")
def slow() -> Iterator[StandIn]:
    with stand_in(delay_s=0.2) as running:
        yield running


@pytest.fixture(autouse=True)
def keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setattr(calling, "_FIRST_WAIT_S", 0.01)


def judge(remote: StandIn, folder: Path, **settings: Any) -> ChatJudgeConfig:
    made: dict[str, Any] = {
        "url": remote.url, "model": MODEL, "name": "careful", "api_key_env": "JUDGE_KEY", "parse": PARSE,
        "template": "{prompt}|{response}", "cache": str(folder / "answers"), "timeout_s": 30.0, "call_retries": 3,
    }  # fmt: skip
    return ChatJudgeConfig(**{**made, **settings})


def serve(*models: Any, **settings: Any) -> Any:
    return served.running(*models, grpc_port=0, **settings)


def score(server: RunningServer, responses: list[str], model: str = "careful", prompt: str = "", **more: Any) -> Scores:
    with RewardClient(server.http_url, model) as client:
        return client.score(texts=[prompt + r for r in responses], prompts=[prompt] * len(responses), **more)


def metric(server: RunningServer, name: str, **labels: str) -> float:
    text = httpx.get(f"{server.http_url}/metrics").text
    wanted = f"{name}{{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "} "
    return next((float(line.removeprefix(wanted)) for line in text.splitlines() if line.startswith(wanted)), 0.0)


def asked(remote: StandIn, words: str) -> int:
    return sum(count for question, count in remote.counts()["asked"].items() if words in question)


# -------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("what", "num_asked", "num_unreadable", "error"),
    [
        ("<garbage>", 3, 3, "none of 3 answers can be read; of the last, .* matches nothing; .*simply splendid.'"),
        ("<garbage 2>", 3, 2, ""),
        ("<refuse>", 3, 3, "the judge refused: 'I cannot judge that.'"),
        ("<filter 1>", 2, 1, ""),
        ("<cut>", 3, 3, "the answer was cut at its longest length"),
        ("<parts>", 1, 0, ""),
        ("<open>", 3, 3, "its thinking is not closed; the answer ends with '<think>I think so. Score: 1'"),
        ("<two 1>", 2, 1, ""),
        ("<busy 2>", 3, 0, ""),
        ("<broken>", 4, 0, "answered with status 500: EngineDeadError .4 calls"),
        ("<broken 3>", 4, 0, ""),
        ("<drop 1>", 2, 0, ""),
        ("<html>", 4, 0, "answered with status 200, but it is no chat completion"),
        ("<long>", 1, 0, "answered with status 400: maximum context length"),
    ],
)
def test_each_trouble_is_retried_or_fails_its_sample_alone(
    what: str, num_asked: int, num_unreadable: int, error: str, remote: StandIn, tmp_path: Path
) -> None:
    with serve(judge(remote, tmp_path)) as server:
        scores = score(server, [f"{what} worth 1", "worth 2"], prompt=f"{what[1:-1]}: ")
        failures = metric(server, "guerdon_judge_parse_failures_total", model="careful")
    assert scores.rewards[1] == 2
    assert asked(remote, f"|{what} worth 1") == num_asked
    assert failures == num_unreadable
    if not error:
        assert scores.rewards[0] == 1 and scores.errors[0] is None
        return
    assert np.isnan(scores.rewards[0])
    assert scores.errors[0] is not None
    assert re.search(error, str(scores.errors[0])), scores.errors[0]


@tried_again
def test_a_judge_that_hangs_fails_its_sample_at_its_timeout(remote: StandIn, tmp_path: Path) -> None:
    with serve(judge(remote, tmp_path, timeout_s=0.3, call_retries=1)) as server:
        scores = score(server, ["<hang> worth 1", "worth 2"], prompt="hangs: ")
        assert metric(server, "guerdon_judge_calls_total", model="careful", outcome="timeout") == 2
    assert np.isnan(scores.rewards[0]) and "did not answer within 0.3 s (2 calls)" in str(scores.errors[0])
    assert scores.rewards[1] == 2


def test_an_address_where_nobody_listens_fails_samples(tmp_path: Path) -> None:
    nobody = StandIn(free_port())
    with serve(judge(nobody, tmp_path, call_retries=1)) as server:
        scores = score(server, ["worth 1"])
    assert np.isnan(scores.rewards[0]) and "cannot be reached" in str(scores.errors[0])


def test_a_wrong_key_is_told_and_never_shown(
    remote: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The stand-in quotes the key in its error."""
    (tmp_path / "key").write_text("sk-another-secret\n")
    wrong = judge(remote, tmp_path, api_key_env=None, api_key_file=str(tmp_path / "key"))
    with caplog.at_level(logging.DEBUG), serve(wrong) as server:
        scores = score(server, ["worth 1"])
        texts = httpx.get(f"{server.http_url}/metrics").text + httpx.get(f"{server.http_url}/v2/models/careful").text
    assert "status 401: Incorrect API key provided: Bearer [key]" in str(scores.errors[0])
    assert "another-secret" not in caplog.text + texts + str(scores.errors[0])


def test_the_reward_is_the_mean_of_several_answers(remote: StandIn, tmp_path: Path) -> None:
    """Of which each is kept for itself, whatever the parser."""
    with serve(judge(remote, tmp_path, samples=3)) as server:
        scores = score(server, ["<garbage 1> worth 5"], prompt="mean: ")
        assert scores.rewards[0] == 5  # the stand-in does not know which sample it is asked for
    assert asked(remote, "mean: |") == 4
    more = judge(remote, tmp_path, samples=4, parse=ParseConfig(regex="(?s).*(I think so|Splendid)", values=VALUES))
    with serve(more) as server:
        assert score(server, ["<garbage 1> worth 5"], prompt="mean: ").rewards[0] == pytest.approx((3 * 2 + 10) / 4)
    assert asked(remote, "mean: |") == 5


VALUES = {"I think so": 2.0, "splendid": 10.0}


def test_a_sum_has_judges_of_both_forms(remote: StandIn, tmp_path: Path) -> None:
    """One by its name, one in the place of a name; both in one folder of answers."""
    inline = judge(
        remote, tmp_path, name="inline", system="Be strict.", temperature=0.0, extra={"reasoning_effort": "low"}
    )
    parts = [ComponentConfig("careful", 0.5), ComponentConfig(judge=inline), ComponentConfig("agreement", 10.0)]
    total = RewardConfig(name="total", components=parts)
    agreement = ModelConfig(model="served:agreement", name="agreement")
    with serve(judge(remote, tmp_path), agreement, rewards=[total]) as server:
        for url in (server.http_url, server.grpc_url):
            assert url is not None
            with RewardClient(url, "total") as client:
                scores = client.score(texts=["sum worth 4", "sum <refuse>"], prompts=["s", "s"], labels=["4", "5"])
            assert scores.rewards[0] == 0.5 * 4 + 4 + 10
            assert scores.attribute_names == ("careful", "inline", "agreement")
            assert scores.attributes is not None
            assert scores.attributes[0].tolist() == [4, 4, 1]
            assert np.isnan(scores.rewards[1]) and "careful: careful: none of 3" in str(scores.errors[1])
        assert metric(server, "guerdon_judge_kept_answers_total", model="inline") == 4
        infos = httpx.get(f"{server.http_url}/metrics").text
    assert 'guerdon_model_info{device="remote",dtype="float32",kind="chat_judge",model="inline",path="chat"' in infos


def test_conversations_and_references_are_read_as_a_rubrics(remote: StandIn, tmp_path: Path) -> None:
    template = "P {prompt} R {reference} A {response}"
    with (
        serve(judge(remote, tmp_path, template=template)) as server,
        RewardClient(server.http_url, "careful") as client,
    ):
        chat = [{"role": "user", "content": "chat"}, {"role": "assistant", "content": "worth 3"}]
        assert client.score(messages=[chat], labels=[{"a": 1}]).rewards[0] == 3
        scores = client.score(messages=[chat[:1]], labels=["x"])
        assert "no response to score" in str(scores.errors[0])
        assert "label was not sent" in str(client.score(messages=[chat]).errors[0])
        with pytest.raises(InvalidRequest, match="takes no input 'tokens'"):
            client.score(tokens=[np.array([1])])
    assert asked(remote, 'P chat R {"a":1} A worth 3') + asked(remote, 'P chat R {"a": 1} A worth 3') == 1


# ------------------------------------------------------------------------------------------- answers that are kept


def test_nothing_is_asked_twice_also_after_a_restart(remote: StandIn, tmp_path: Path) -> None:
    responses = [f"again worth {i}" for i in range(20)] * 3
    for _ in range(2):
        with serve(judge(remote, tmp_path)) as server, ThreadPoolExecutor(4) as threads:
            for scores in threads.map(lambda _: score(server, responses), range(4)):
                assert scores.rewards.tolist() == [*range(20)] * 3
    assert asked(remote, "again worth") == 20


def test_a_budget_outlives_the_server_and_kept_answers_are_free(remote: StandIn, tmp_path: Path) -> None:
    prices: dict[str, Any] = {"prompt_price": 1000.0, "completion_price": 10_000.0}  # 0.2 for a call
    for budget in (BudgetConfig(calls=4), BudgetConfig(tokens=440), BudgetConfig(cost=0.8)):
        folder = tmp_path / str(budget)
        words = f"budget {budget.calls} {budget.tokens} worth "
        settings = {"budget": budget, "concurrency": 1 if budget.calls is None else 16, **prices}
        with serve(judge(remote, folder, **settings)) as server:
            assert score(server, [f"{words}1", f"{words}2", f"{words}3"]).rewards.tolist() == [1, 2, 3]
            cost = metric(server, "guerdon_judge_cost_total", model="careful")
        assert cost == pytest.approx(0.6)
        with serve(judge(remote, folder, **settings)) as server:
            scores = score(server, [f"{words}{i}" for i in range(1, 8)])
            used = metric(server, "guerdon_judge_budget_used", model="careful")
        assert scores.rewards[:3].tolist() == [1, 2, 3] and np.isfinite(scores.rewards).sum() == 4
        assert "its budget is spent: " in str(next(e for e in scores.errors if e is not None))
        assert used == pytest.approx(1)
        assert asked(remote, words) == 4


def test_a_client_that_leaves_has_paid_for_what_is_being_asked(slow: StandIn, tmp_path: Path) -> None:
    responses = [f"left worth {i}" for i in range(8)]

    async def leave(url: str) -> None:
        async with AsyncRewardClient(url, "careful") as client:
            call = asyncio.create_task(client.score(texts=responses, prompts=[""] * 8))
            await asyncio.to_thread(wait_until, lambda: asked(slow, "left worth") == 2)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    with serve(judge(slow, tmp_path, concurrency=2)) as server:
        with slow.held():
            asyncio.run(leave(server.http_url))
            wait_until(lambda: outcomes(server.http_url).get(("careful", "Cancelled")) == 1)
        wait_until(lambda: metric(server, "guerdon_judge_calls_in_progress", model="careful") == 0)
        assert asked(slow, "left worth") == 2
        assert score(server, responses).rewards.tolist() == [*range(8)]
    assert asked(slow, "left worth") == 8


def test_no_more_calls_than_allowed_are_in_progress(tmp_path: Path) -> None:
    with stand_in(delay_s=0.05) as remote, serve(judge(remote, tmp_path, concurrency=3, samples=2)) as server:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda k: score(server, [f"{k} worth {i}" for i in range(6)]), range(4)))
        assert remote.counts()["most_at_once"] == 3


# --------------------------------------------------------------------------------------------- load, and the end


def test_a_full_queue_refuses_and_a_late_request_times_out(slow: StandIn, tmp_path: Path) -> None:
    once, short = RetryPolicy(tries=1), RetryPolicy(timeout_s=0.5, tries=1)
    with serve(judge(slow, tmp_path, concurrency=1, max_queue_sequences=4)) as server, ThreadPoolExecutor(2) as threads:
        with slow.held():
            first = threads.submit(score, server, [f"full worth {i}" for i in range(4)])
            wait_until(lambda: asked(slow, "full worth") == 1)
            with (
                RewardClient(server.http_url, "careful", policy=once) as client,
                pytest.raises(Overloaded, match="the queue has no room"),
            ):
                client.score(texts=["full worth 9"] * 3, prompts=[""] * 3)
        assert first.result().rewards.tolist() == [0, 1, 2, 3]
        with slow.held():
            with (
                RewardClient(server.http_url, "careful", policy=short) as client,
                pytest.raises((DeadlineExceeded, Unavailable)),
            ):
                client.score(texts=[f"late worth {i}" for i in range(20)], prompts=[""] * 20)
            wait_until(lambda: metric(server, "guerdon_queue_sequences", model="careful") == 0)
        assert asked(slow, "late worth") <= 1


def test_a_stop_waits_for_calls_in_progress(slow: StandIn, tmp_path: Path) -> None:
    with serve(judge(slow, tmp_path, concurrency=2)) as server, ThreadPoolExecutor(1) as threads:
        call = threads.submit(score, server, [f"stop worth {i}" for i in range(4)])
        wait_until(lambda: asked(slow, "stop worth") > 0)
        server.close()
        assert call.result().rewards.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_stop_finishes_what_is_queued_or_deserted_in_a_call(leaves: bool, slow: StandIn, tmp_path: Path) -> None:
    config = ServerConfig(port=0, grpc_port=None, models=[judge(slow, tmp_path, concurrency=2)])
    words = "deserted" if leaves else "queued"
    texts = [f"{words} worth {i}" for i in range(2 if leaves else 6)]

    async def stop() -> None:
        service = build_service(config)
        service.start()
        call = asyncio.create_task(service.score("careful", ScoreRequest(texts=texts, prompts=[""] * len(texts))))
        while not await asyncio.to_thread(asked, slow, words):
            await asyncio.sleep(0.01)
        if leaves:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await asyncio.to_thread(service.stop, 30.0)
        if not leaves:
            assert [one.reward for one in (await call).results if isinstance(one, Score)] == [*range(6)]

    asyncio.run(stop())
    num_asked = asked(slow, words)
    with serve(judge(slow, tmp_path)) as server:
        assert score(server, texts).rewards.tolist() == [*range(len(texts))]
        assert metric(server, "guerdon_judge_kept_answers_total", model="careful") == num_asked


def test_a_call_that_hangs_at_the_end_of_the_grace_period_fails_its_sample(remote: StandIn, tmp_path: Path) -> None:
    config = ServerConfig(port=0, grpc_port=0, models=[judge(remote, tmp_path, timeout_s=500.0)])
    server = RunningServer(build_service(config), config, grace_s=0.2)
    once = RetryPolicy(tries=1)
    with ThreadPoolExecutor(1) as threads, RewardClient(server.http_url, "careful", policy=once) as client:
        call = threads.submit(client.score, texts=["<hang> at the end"], prompts=[""])
        wait_until(lambda: asked(remote, "at the end") > 0)
        server.close()
        with pytest.raises(Unavailable, match="withdrawn"):
            call.result()
    AnswerCache(tmp_path / "answers").close()  # which is free again


def test_when_the_grace_period_ends_samples_fail_and_answers_are_kept(remote: StandIn, tmp_path: Path) -> None:
    """The fifth and the sixth question are those that hang then, and are asked again."""
    config = ServerConfig(port=0, grpc_port=0, models=[judge(remote, tmp_path, concurrency=2, timeout_s=500.0)])
    texts = [f"{'<hang 1> ' if i in (4, 5) else ''}grace worth {i}" for i in range(40)]
    server = RunningServer(build_service(config), config, grace_s=0.5)
    once = RetryPolicy(tries=1)
    with ThreadPoolExecutor(1) as threads, RewardClient(server.http_url, "careful", policy=once) as client:
        call = threads.submit(client.score, texts=texts, prompts=[""] * 40)
        wait_until(lambda: asked(remote, "<hang 1> grace") == 2)
        server.close()
        with pytest.raises(Unavailable, match="withdrawn"):
            call.result()
    assert asked(remote, "grace worth") == 6
    with serve(judge(remote, tmp_path)) as again:
        assert score(again, texts).rewards.tolist() == [*range(40)]
        assert metric(again, "guerdon_judge_kept_answers_total", model="careful") == 4
