"""TRL's reward functions against a real server, as TRL calls them and in its real trainers."""

import asyncio
import inspect
import logging
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import served
import zoo
from guerdon import RewardClient
from guerdon.adapters.trl import async_reward_function, reward_function
from guerdon.errors import InvalidRequest
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ComponentConfig, ModelConfig, RewardConfig, ServerConfig
from served import Serve
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


STEPS, GENERATIONS = 2, 4
TRAINERS_PROMPTS = ["What is 2+2?", "Name a colour.", "Who wrote Faust?", "Say something kind."]


def picky(texts: list[str]) -> list[float]:
    """A user's function that has no score for about a third of all texts."""
    return [math.nan if len(text) % 3 == 0 else float(len(text)) for text in texts]


@pytest.fixture(scope="module")
def trainers_url(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> str:
    models = [
        ModelConfig(model=str(served.reward_model(tmp_path_factory.mktemp("rm"))), name="helpful", deterministic=True),
        ModelConfig(model="adapters.test_trl_adapter:picky", name="picky"),
    ]
    total = RewardConfig(components=[ComponentConfig(model="helpful"), ComponentConfig(model="picky", weight=0.1)])
    return serve(*models, rewards=[total]).http_url


@pytest.mark.parametrize("conversations", [False, True], ids=["plain", "conversations"])
@pytest.mark.parametrize("form", ["grpo", "rloo"])
def test_trainer_logs_the_servers_rewards_and_leaves_failed_samples_out(
    form: str, conversations: bool, trainers_url: str, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    policy = zoo.tokenizer(zoo.language_model("llama", tmp_path / "policy"))
    seen: list[tuple[list[Any], list[Any]]] = []

    def record(prompts: list[Any], completions: list[Any], **_: Any) -> list[None]:
        seen.append((prompts, completions))
        return [None] * len(prompts)

    model = "helpful" if conversations else "reward_model"
    make = reward_function if form == "grpo" else async_reward_function
    rows = [{"prompt": [{"role": "user", "content": text}] if conversations else text} for text in TRAINERS_PROMPTS]
    trainer = getattr(trl, f"{form.upper()}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        reward_funcs=[make(trainers_url, model, name="judge"), record],
        args=getattr(trl, f"{form.upper()}Config")(
            output_dir=str(tmp_path), max_steps=STEPS, num_generations=GENERATIONS,
            per_device_train_batch_size=len(TRAINERS_PROMPTS) * GENERATIONS, max_completion_length=8,
            gradient_checkpointing=False, bf16=False, use_cpu=True, logging_steps=1, save_strategy="no",
            report_to="none", disable_tqdm=True, seed=1,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(policy, padding_side="left"),
    )  # fmt: skip
    trainer.train()
    logs = [line for line in trainer.state.log_history if "reward" in line]
    assert len(logs) == len(seen) == STEPS
    for line, (prompts, completions) in zip(logs, seen, strict=True):
        joined = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        with RewardClient(trainers_url, model) as client:
            scores = client.score(**{"messages" if conversations else "texts": joined})
        scored = scores.rewards[np.isfinite(scores.rewards)]
        assert conversations or 0 < len(scored) < len(scores)
        assert line["reward"] == pytest.approx(scored.mean(), rel=1e-5)
        assert line["rewards/judge/mean"] == pytest.approx(scored.mean(), rel=1e-5)
        assert line["rewards/judge/std"] == pytest.approx(scored.std(ddof=1), rel=1e-4)
        if not conversations:
            assert scores.attributes is not None
            assert line["judge/picky"] == pytest.approx(np.nanmean(scores.attributes[:, 1]), rel=1e-5)
    # The last step's, one a completion.
    told, advantages = np.array(trainer._logs["rewards"]["judge"]), np.array(trainer._logs["advantages"])
    np.testing.assert_array_equal(told.astype(np.float32), scores.rewards)
    assert (advantages[np.isnan(told)] == 0).all() and np.abs(advantages).max() > 0.1
    if form == "grpo":
        groups = told.reshape(-1, GENERATIONS)
        mean, std = np.nanmean(groups, 1, keepdims=True), np.nanstd(groups, 1, ddof=1, keepdims=True)
        wanted = np.nan_to_num((groups - mean) / (std + 1e-4)).ravel()
        np.testing.assert_allclose(advantages, wanted, rtol=1e-3, atol=1e-4)
