"""Groups in single calls: each caller gets its own reward of its group, once, and nothing waits beyond its time."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

import judged
import served
import zoo
from guerdon.assembly import build_service
from guerdon.client import RewardClient
from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.judge_core import GroupKey
from guerdon.server.cohorts import Cohorts
from guerdon.server.metrics import Metrics
from guerdon.server.runtime import RunningServer
from guerdon.server.service import Service
from guerdon.settings.chat_judges import ChatJudgeConfig, ParseConfig
from guerdon.settings.config import ComponentConfig, JudgeConfig, LimitsConfig, RewardConfig, ServerConfig
from guerdon.settings.rubrics import ComparingConfig
from served import Serve
from server.helpers import tried_again
from stand_in_judge import KEY, MODEL, stand_in

SIZE, PROMPT = 8, "two and two? "
WORDS = ["the", "answer", "is", "that", "no", "number", "I", "can", "name"]
LONG_S = 600.0
GROUPS = [[" ".join(WORDS[i : i + 1 + (i + k) % 4]) + f" {k}" for i in range(SIZE)] for k in range(4)]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatJudgeConfig]:
    """A judge in words, which keeps its answers: so many groups are asked about in no time."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "key").write_text(KEY)
    with stand_in() as remote:
        yield ChatJudgeConfig(
            name="words", url=remote.url, model=MODEL, template="{response_a} or {response_b}", cache=str(folder / "c"),
            parse=ParseConfig(regex=r"Score: (\S+)", lowest=0, highest=1), api_key_file=str(folder / "key"),
            compare=ComparingConfig("circular"),
        )  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[JudgeConfig]:
    folder = tmp_path_factory.mktemp("cohorts")
    model = str(zoo.tokenizer(zoo.language_model("llama", folder / "llama")))
    circular = judged.COMPARING.replace("round_robin", "circular")
    rubrics = {"circular": circular, "alone": judged.RUBRIC, "reference": circular.replace("circular", "reference")}
    return [
        JudgeConfig(model=model, name=name, rubric=judged.write(folder, text, f"{name}.yaml"), max_other_mass=1.0)
        for name, text in rubrics.items()
    ]


services: dict[str, Service] = {}
"""The services of the running servers, by their addresses."""


def build(config: ServerConfig) -> Service:
    services["last"] = build_service(config)
    return services["last"]


@pytest.fixture(scope="module")
def server(models: list[JudgeConfig], words: ChatJudgeConfig, serve: Serve) -> RunningServer:
    """One that waits so long that a group which does not become whole would fail the test by its own time."""
    total = RewardConfig(name="total", components=[ComponentConfig("circular", 2.0), ComponentConfig("alone")])
    made = serve(*models, words, rewards=[total], group_size=SIZE, group_wait_s=LONG_S, build=build)
    services[made.http_url] = services["last"]
    return made


def row(text: str, **more: Any) -> dict[str, Any]:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return {"responses_create_params": {"input": PROMPT}, "response": {"output": [message]}, **more}


def want(server: RunningServer, texts: list[str], model: str = "circular") -> np.ndarray:
    """The rewards of the group in one request."""
    said = [[{"role": "user", "content": PROMPT}, {"role": "assistant", "content": text}] for text in texts]
    with RewardClient(server.http_url, model) as client:
        return client.score(messages=said).raise_for_failed().rewards


def run(server: RunningServer, work: Callable[[httpx.AsyncClient], Any]) -> Any:
    async def go() -> Any:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.http_url, timeout=None, limits=limits) as client:
            return await work(client)

    return asyncio.run(go())


async def verify(client: httpx.AsyncClient, value: dict[str, Any], model: str = "circular") -> dict[str, Any]:
    answer = await client.post(f"/verify?model={model}", json=value)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def rewards(client: httpx.AsyncClient, texts: list[str], model: str = "circular", **more: Any) -> list[float]:
    told = await asyncio.gather(
        *(verify(client, row(t, _ng_rollout_index=i, **more), model) for i, t in enumerate(texts))
    )
    assert not any(one["mask_sample"] for one in told), told
    return [one["reward"] for one in told]


def metric(server: RunningServer, name: str, **labels: str) -> float:
    wanted = f"{name}{{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "} "
    lines = httpx.get(f"{server.http_url}/metrics").text.splitlines()
    return next((float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted)), 0.0)


async def waits(service: Service, name: str, number: int) -> Any:
    """Returns the group of that name once so many of its samples wait; those of failed tests have other names."""
    while True:
        for (_, _, key), group in [*service.cohorts._open.items()]:
            if key == repr(name) and group.num_samples >= number:
                return group
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_groups_of_callers_at_once_get_their_own_rewards(count: int, server: RunningServer) -> None:
    """Five groups of eight callers at a time, whose calls come mixed."""
    groups = [[f"worth 0.{i + k} of {i}" for i in range(SIZE)] for k in range(2)]
    wanted = [want(server, texts, "words") for texts in groups]
    assert len({*wanted[0].tolist()}) > 2
    before = metric(server, "guerdon_groups_total", model="words", outcome="whole")

    async def one(client: httpx.AsyncClient, number: int, i: int) -> None:
        told = await verify(client, row(groups[number % 2][i], group=f"{number} of {count}"), "words")
        assert told["reward"] == pytest.approx(wanted[number % 2][i], abs=1e-5), told
        assert told["group"] == f"{number} of {count}" and told["mask_sample"] is False

    async def work(client: httpx.AsyncClient) -> None:
        for first in range(0, count, 5):
            numbers = range(first, first + 5)
            await asyncio.gather(*(one(client, number, i) for i in range(SIZE) for number in numbers))

    run(server, work)
    assert metric(server, "guerdon_groups_total", model="words", outcome="whole") == before + count


def test_rollouts_of_a_task_are_a_group_without_its_name(server: RunningServer) -> None:
    """Equal prompts of two tasks at once are two groups; a sum waits for its judge's, other judges for nobody."""
    first, second = GROUPS[:2]

    async def work(client: httpx.AsyncClient) -> Any:
        tasks = [rewards(client, texts, _ng_task_index=i) for i, texts in enumerate((first, second))]
        total = rewards(client, first, "total", _ng_task_index=0)
        alone = verify(client, row(first[0]), "alone")
        reference = verify(client, row(first[0], label="4"), "reference")
        return await asyncio.gather(*tasks, total, alone, reference)

    told_first, told_second, total, alone, reference = run(server, work)
    np.testing.assert_allclose(told_first, want(server, first), atol=1e-5)
    np.testing.assert_allclose(told_second, want(server, second), atol=1e-5)
    np.testing.assert_allclose(total, want(server, first, "total"), atol=1e-5)
    assert not alone["mask_sample"] and not reference["mask_sample"]


def test_a_late_caller_and_one_that_fails_do_not_spoil_the_others(server: RunningServer) -> None:
    texts = [*GROUPS[0][:7], "red" * 200]

    async def work(client: httpx.AsyncClient) -> list[dict[str, Any]]:
        calls = [asyncio.create_task(verify(client, row(text, group="late"))) for text in texts[1:]]
        await waits(services[server.http_url], "late", 7)
        assert not any(call.done() for call in calls)
        return [await verify(client, row(texts[0], group="late")), *[await call for call in calls]]

    told = run(server, work)
    assert told[7]["mask_sample"] and "shorten it" in told[7]["failure_reason"]
    said = [[{"role": "user", "content": PROMPT}, {"role": "assistant", "content": text}] for text in texts]
    with RewardClient(server.http_url, "circular") as client:
        scores = client.score(messages=said)
    for one, reward in zip(told, scores.rewards, strict=True):
        assert one["mask_sample"] == bool(np.isnan(reward))
        assert one["mask_sample"] or one["reward"] == pytest.approx(reward, abs=1e-5)


def test_who_leaves_holds_nobody_and_gets_its_reward_when_it_comes_back(server: RunningServer) -> None:
    wanted = want(server, GROUPS[0])
    compared = metric(server, "guerdon_judge_comparisons_total", criterion="right", model="circular")

    async def work(client: httpx.AsyncClient) -> None:
        calls = [asyncio.create_task(verify(client, row(text, group="left"))) for text in GROUPS[0][:5]]
        group = await waits(services[server.http_url], "left", 5)
        for call in calls[:2]:
            call.cancel()
        while sum(call.future is None for call in group.calls) < 2:
            await asyncio.sleep(0.005)
        again = asyncio.create_task(verify(client, row(GROUPS[0][0], group="left")))
        calls += [asyncio.create_task(verify(client, row(text, group="left"))) for text in GROUPS[0][5:]]
        for call, reward in zip([again, *calls[2:]], [wanted[0], *wanted[2:]], strict=True):
            assert (await call)["reward"] == pytest.approx(reward, abs=1e-5)
        last = await verify(client, row(GROUPS[0][1], group="left"))
        assert last["reward"] == pytest.approx(wanted[1], abs=1e-5)

    run(server, work)
    assert metric(server, "guerdon_judge_comparisons_total", criterion="right", model="circular") == compared + SIZE


def test_another_sample_in_the_same_place_takes_it(server: RunningServer) -> None:
    async def work(client: httpx.AsyncClient) -> Any:
        def send(text: str, i: int) -> asyncio.Task[dict[str, Any]]:
            return asyncio.create_task(verify(client, row(text, _ng_rollout_index=i, group="taken")))

        old = send("an old one", 0)
        await waits(services[server.http_url], "taken", 1)
        new = send(GROUPS[0][0], 0)
        await old  # before the others come: the last of them makes the group whole
        others = [send(text, i) for i, text in enumerate(GROUPS[0][1:], 1)]
        return await asyncio.gather(new, *others), await old

    told, old = run(server, work)
    np.testing.assert_allclose([one["reward"] for one in told], want(server, GROUPS[0]), atol=1e-5)
    assert old["mask_sample"] and "another sample has come as number 0 of its group" in old["failure_reason"]


def test_other_forms_name_the_group_too(server: RunningServer) -> None:
    texts = GROUPS[0][:3]
    with RewardClient(server.http_url, "circular") as client:
        wanted = client.score(texts=[PROMPT + text for text in texts], prompts=[PROMPT] * 3).rewards
    more = {"model": "circular", "group_size": 3}

    async def work(client: httpx.AsyncClient) -> Any:
        slime = [{"prompt": PROMPT, "response": text, "group": 7, **more} for text in texts]
        openrlhf = [{"query": [PROMPT + text], "prompts": [PROMPT], "group": "7", **more} for text in texts]
        bodies = [*(("/reward", body) for body in slime), *(("/get_reward", body) for body in openrlhf)]
        answers = await asyncio.gather(*(client.post(path, json=body) for path, body in bodies))
        return [answer.raise_for_status().json() for answer in answers]

    told = run(server, work)
    np.testing.assert_allclose(told[:3], wanted, atol=1e-5)
    np.testing.assert_allclose([one["rewards"][0] for one in told[3:]], wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"group_size": 3}, "group_size is 3, and 2 in another call of the group"),
        ({"group_size": 2, "label": "x"}, "one call of the group has"),
        ({"group_size": 0}, "group_size"),
        ({"group": ["a"]}, "group"),
    ],
)
def test_calls_that_contradict_each_other_are_refused(
    other: dict[str, Any], message: str, server: RunningServer
) -> None:
    async def work(client: httpx.AsyncClient) -> Any:
        first = asyncio.create_task(verify(client, row("one", group=message, group_size=2)))
        await waits(services[server.http_url], message, 1)
        refused = await client.post("/verify?model=circular", json=row("two", group=message) | other)
        return refused, await verify(client, row("two", group=message, group_size=2)), await first

    refused, second, first = run(server, work)
    assert refused.status_code == 400 and message in refused.text
    assert not first["mask_sample"] and not second["mask_sample"]


def test_who_comes_back_after_a_cancelled_judgement_begins_another() -> None:
    """All callers of a whole group leave amid its judgement, which ends; then they come again."""
    info, begun, ends = ModelInfo("circular", "judge"), asyncio.Event(), asyncio.Event()

    async def score(name: str, request: ScoreRequest, client: str) -> ScoreReply:
        begun.set()
        await ends.wait()
        return ScoreReply([Score(1.0)] * len(request), [1] * len(request), "")

    async def go() -> list[Any]:
        cohorts = Cohorts(LimitsConfig(group_size=2, group_wait_s=LONG_S), score, Metrics())

        def calls() -> list[asyncio.Task[ScoreReply]]:
            requests = [ScoreRequest(texts=[text], cohort=GroupKey("some")) for text in ("one", "two")]
            return [asyncio.create_task(cohorts.score(info, request, "")) for request in requests]

        left = calls()
        await begun.wait()
        for call in left:
            call.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        ends.set()
        return await asyncio.gather(*calls())

    assert [reply.results[0].reward for reply in asyncio.run(go())] == [1.0, 1.0]


@pytest.mark.parametrize("incomplete", ["fail", "judge"])
@tried_again
def test_a_group_that_stays_incomplete_waits_no_longer_than_its_time(
    incomplete: Any, models: list[JudgeConfig]
) -> None:
    texts, wait_s = GROUPS[0][:5], 0.5
    with served.running(models[0], group_wait_s=wait_s, group_incomplete=incomplete, build=build) as running:
        cohorts = services["last"].cohorts

        async def work(client: httpx.AsyncClient) -> list[dict[str, Any]]:
            calls = [verify(client, row(text, group="some", group_size=SIZE)) for text in texts]
            calls.append(verify(client, row("alone", group="one", group_size=SIZE)))
            return await asyncio.gather(*calls)

        started = time.monotonic()
        told = run(running, work)
        assert time.monotonic() - started >= wait_s
        if incomplete == "judge":
            np.testing.assert_allclose([one["reward"] for one in told[:5]], want(running, texts), atol=1e-5)
            assert told[5]["mask_sample"] and "this sample is alone" in told[5]["failure_reason"]
            assert metric(running, "guerdon_groups_total", model="circular", outcome="incomplete") == 2
        else:
            assert all(one["mask_sample"] and one["reward"] == 0 for one in told)
            assert "its group has 5 of 8 samples after 0.5 s" in told[0]["failure_reason"]
            assert metric(running, "guerdon_groups_total", model="circular", outcome="failed") == 2
        assert not cohorts._open and not cohorts._left


def test_a_server_that_stops_waits_for_no_group(models: list[JudgeConfig]) -> None:
    with served.running(models[0], group_wait_s=LONG_S, shutdown_timeout_s=LONG_S, build=build) as running:
        service = services["last"]

        async def work(client: httpx.AsyncClient) -> dict[str, Any]:
            call = asyncio.create_task(verify(client, row("one", group="last", group_size=2)))
            await waits(service, "last", 1)
            await asyncio.to_thread(running.close)
            return await call

        told = run(running, work)
    assert told["mask_sample"] and "its group has 1 of 2 samples" in told["failure_reason"]
