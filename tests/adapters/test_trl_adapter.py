"""TRL's reward functions against a real server, as TRL calls them."""

import asyncio
import inspect
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import served
from guerdon import RewardClient
from guerdon.adapters.trl import async_reward_function, reward_function
from guerdon.errors import InvalidRequest
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ComponentConfig, ModelConfig, RewardConfig, ServerConfig
from server.echo_service import EchoService

PROMPTS = ["What is 2+2?", "What is 2+2?", "Name a colour."]
COMPLETIONS = [" 4.", " Five, I think.", " Blue."]
TALKS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
ANSWERS = [[{"role": "assistant", "content": completion}] for completion in COMPLETIONS]


@pytest.fixture(scope="module")
def url(sums: RunningServer) -> str:
    return sums.http_url


def ask(function: Any, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
    """What TRL gets: it calls with keywords, and with more of them than any one function names."""
    more = {"completion_ids": [[1, 2]] * len(prompts), "trainer_state": object(), "scores": ["a column"], **columns}
    told = function(prompts=prompts, completions=completions, **more)
    return asyncio.run(told) if inspect.iscoroutine(told) else told


@pytest.mark.parametrize("make", [reward_function, async_reward_function])
def test_rewards_are_the_servers_own(make: Any, url: str) -> None:
    with RewardClient(url, "helpful") as client:
        texts = client.score(texts=[p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)])
        ended = client.score(texts=[p + c + "</s>" for p, c in zip(PROMPTS, COMPLETIONS, strict=True)])
        talks = client.score(messages=[p + c for p, c in zip(TALKS, ANSWERS, strict=True)])
    assert ask(make(url, "helpful"), PROMPTS, COMPLETIONS) == texts.rewards.tolist()
    assert ask(make([url], "helpful", ending="</s>"), PROMPTS, COMPLETIONS) == ended.rewards.tolist()
    of_eos = make(url, "helpful", ending="</s>", eos_token_id=2)  # all but the second completion were truncated
    ids = [[1, 2] if i == 1 else [2, 1] for i in range(len(PROMPTS))]
    wanted = [(ended if i == 1 else texts).rewards[i] for i in range(len(PROMPTS))]
    assert ask(of_eos, PROMPTS, COMPLETIONS, completion_ids=ids) == wanted
    assert ask(make(url, "helpful"), TALKS, ANSWERS) == talks.rewards.tolist()
    assert len({*texts, *ended, *talks}) == 9


@pytest.mark.parametrize("make", [reward_function, async_reward_function])
def test_failed_sample_is_none_and_the_others_are_scored(make: Any, url: str, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    completions = [" fine", f" {served.FAILS}", ""]
    got = ask(make(url, "flaky"), PROMPTS, completions)
    assert got == [len(PROMPTS[0]) + 5, None, len(PROMPTS[2])] and type(got[0]) is float
    assert "flaky: 1 of 3 samples have no reward: the function returned nan" in caplog.text


@pytest.mark.parametrize("make", [reward_function, async_reward_function])
def test_components_of_a_sum_are_logged_and_labels_are_sent(make: Any, url: str) -> None:
    metrics: dict[str, float] = {}
    extras: dict[str, list[Any]] = {}
    function = make(url, "total", name="judge", labels="answer")
    logs = {"log_metric": metrics.__setitem__, "log_extra": extras.__setitem__}
    rewards = ask(function, PROMPTS, COMPLETIONS, answer=["4", 4, "Bl"], **logs)
    assert extras["judge/agreement"] == [1.0, 0.0, 1.0]
    np.testing.assert_allclose(metrics["judge/helpful"], np.mean(extras["judge/helpful"]), rtol=1e-6)
    wanted = np.array(extras["judge/helpful"]) + 0.5 * np.array(extras["judge/agreement"])
    np.testing.assert_allclose(rewards, wanted, rtol=1e-6)
    assert ask(function, PROMPTS, COMPLETIONS, answer=["4", 4, "Bl"]) == rewards  # where TRL has no logs to give


def test_components_of_a_failed_sample_are_none_and_not_in_the_mean() -> None:
    models = [ModelConfig(model=f"served:{name}", name=name) for name in ("flaky", "agreement")]
    total = RewardConfig(components=[ComponentConfig(model=model.name) for model in models])
    metrics: dict[str, float] = {}
    extras: dict[str, list[Any]] = {}
    logs = {"log_metric": metrics.__setitem__, "log_extra": extras.__setitem__}
    with served.running(*models, rewards=[total]) as server:
        function = reward_function(server.http_url, labels="answer")
        assert ask(function, ["a", "b"], ["bc", served.FAILS], answer=["b", "c"], **logs) == [4.0, None]
        assert metrics == {"reward_model/flaky": 3.0, "reward_model/agreement": 1.0}
        assert extras == {"reward_model/flaky": [3.0, None], "reward_model/agreement": [1.0, None]}
        # All ranks must log the same names, and this one may be the only one where all failed.
        assert ask(function, ["a"], [served.FAILS], answer=["b"], **logs) == [None]
        assert metrics == pytest.approx({"reward_model/flaky": np.nan, "reward_model/agreement": np.nan}, nan_ok=True)
        assert extras == {"reward_model/flaky": [None], "reward_model/agreement": [None]}


def test_trl_finds_the_name_and_the_coroutine() -> None:
    pytest.importorskip("trl")
    from trl.trainer.utils import get_callable_name, is_async_callable

    url = "http://127.0.0.1:1"
    for made, is_async in ((reward_function(url, "rm"), False), (async_reward_function(url, name="rm"), True)):
        for function in (made, pickle.loads(pickle.dumps(made))):  # noqa: S301
            assert get_callable_name(function) == function.__name__ == "rm"
            assert is_async_callable(function) == is_async
            assert inspect.iscoroutinefunction(function) == asyncio.iscoroutinefunction(function) == is_async
            assert inspect.iscoroutinefunction(partial(function)) == is_async


def test_conversations_need_a_chat_template_at_the_server(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"takes no input 'messages'.*chat template"):
        ask(reward_function(url, "flaky"), TALKS, ANSWERS)


@pytest.mark.parametrize(
    ("prompts", "completions", "message"),
    [
        (["a"], [[{"role": "assistant", "content": "b"}]], "sample 0: the completion is a list, and must be a text"),
        ([TALKS[0]], ["a"], "sample 0: the completion is a str, and must be a list of messages"),
        (["a", TALKS[0]], ["b", ANSWERS[0]], "sample 1: the prompt is a list"),
        ([TALKS[0], "a"], [ANSWERS[0], "b"], "sample 1: the prompt is a str"),
        (["a"], [None], "sample 0: the completion is a NoneType"),
        ([TALKS[0]], [[]], "sample 0: the completion is an empty list"),
    ],
)
def test_samples_of_two_kinds_are_refused(prompts: Any, completions: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ask(reward_function("http://127.0.0.1:1", timeout_s=0.1), prompts, completions)


def test_equal_prompts_are_one_group() -> None:
    with RunningServer(service := EchoService(), ServerConfig(port=0, grpc_port=None)) as server:
        function = reward_function(server.http_url)
        for prompts, completions in ((PROMPTS, COMPLETIONS), (TALKS, ANSWERS)):
            function(prompts=prompts, completions=completions)
            first, second, third = service.requests[-1].groups
            assert first == second != third


def test_async_calls_share_a_loops_connections_and_two_loops_have_their_own(url: str) -> None:
    function = async_reward_function(url, "flaky")

    async def many() -> list[list[float | None]]:
        return await asyncio.gather(*(function(prompts=["x" * n], completions=["."]) for n in range(20)))

    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: asyncio.run(many()), range(8)):
            assert got == [[n + 1.0] for n in range(20)]
    asyncio.run(many())
    assert len(function._judge._by_loop) == 1  # those of closed loops are gone
