"""Both clients against a real server, over both transports."""

import asyncio
import copy
import gc
import inspect
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest

from guerdon.client import AsyncCriticClient, AsyncRewardClient, CriticClient, RetryPolicy, RewardClient
from guerdon.client.retry import Describe
from guerdon.core import ScoreReply, ScoreRequest
from guerdon.errors import Cancelled, DeadlineExceeded, GuerdonError, InvalidRequest, Overloaded, UnknownModel
from guerdon.local import LocalRewardModel
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from served import Serve
from server.echo_service import BUSY_TOKEN, NAN_TOKEN, SLOW_TOKEN, EchoService, reward_of
from server.helpers import tried_again, wait_until


def test_httpcore_detects_the_event_loop_cheaply():
    """It imports sniffio each time it asks, four times in an exchange; a missing module is looked for each time."""
    import sniffio  # noqa: F401 - httpcore does without, slowly
    from httpcore._synchronization import current_async_library

    async def asked() -> float:
        current_async_library()
        started = time.process_time()
        for _ in range(1000):
            current_async_library()
        return (time.process_time() - started) / 1000

    assert min(asyncio.run(asked()) for _ in range(3)) < 15e-6


class ScriptedService(EchoService):
    """The echo service, which first raises what stands in `script`, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.script: list[GuerdonError] = []
        self.num_scored = 0
        self.in_progress = 0
        self.most_in_progress = 0
        self.pause_s = 0.03
        self.num_awaited = 0
        """Nothing is answered before so many requests were in progress at once."""

    async def score(self, name: str, request: ScoreRequest, client: str = "", **more: Any) -> ScoreReply:
        self.num_scored += 1
        self.in_progress += 1
        self.most_in_progress = max(self.most_in_progress, self.in_progress)
        try:
            await asyncio.sleep(self.pause_s)
            while self.most_in_progress < self.num_awaited:
                await asyncio.sleep(0.01)
            if self.script:
                raise self.script.pop(0)
            return await super().score(name, request, client, **more)
        finally:
            self.in_progress -= 1


@pytest.fixture(scope="module")
def running(serve: Serve) -> tuple[ScriptedService, RunningServer]:
    service = ScriptedService()
    service.scorer.slow_s = 0.2
    return service, serve(grpc_port=0, build=lambda _: service, grace_s=0.1)


@pytest.fixture
def service(running: tuple[ScriptedService, RunningServer]) -> ScriptedService:
    while running[0].in_progress:  # what an earlier test left behind
        time.sleep(0.01)
    running[0].script.clear()
    running[0].num_scored = running[0].most_in_progress = running[0].num_awaited = 0
    running[0].pause_s = 0.03
    return running[0]


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, running: tuple[ScriptedService, RunningServer]) -> str:
    return running[1].http_url if request.param == "http" else str(running[1].grpc_url)


QUICK = RetryPolicy(backoff_s=0.02, max_backoff_s=0.1)


def test_tokens_texts_and_messages(url: str) -> None:
    with RewardClient(url) as client:
        client.wait_ready(120.0)
        scores = client.score(tokens=[[1, 2, 3], np.array([700, 700])], groups=[0, 1], prompt_lengths=[1, 0])
        assert scores.rewards.tolist() == [6.0, 400.0]
        assert scores.rewards.dtype == np.float32
        assert (scores.errors, scores.weights_version) == ([None, None], "1")
        assert scores.queue_s > 0
        assert scores.compute_s > 0
        assert list(client.score(texts=["four", "größe 🎉"])) == [4.0, 7.0]
        assert len(client.score(messages=[[{"role": "user", "content": "hi"}]])) == 1
        assert "group_ids" in client.info().inputs


def test_all_outputs_arrive_without_padding(url: str) -> None:
    with RewardClient(url, "many") as client:
        scores = client.score(tokens=[[10, 11, 12], [7]], steps=[[0, 2], [0]])
    np.testing.assert_array_equal(scores.attributes, np.array([[3, 10], [1, 7]], np.float32))
    assert [row.tolist() for row in scores.values or []] == [[10, 11, 12], [7]]
    assert [row.tolist() for row in scores.steps or []] == [[10, 12], [7]]
    assert scores.weights_version == "7"


def test_hints_reach_the_server(url: str, service: ScriptedService) -> None:
    with RewardClient(url) as client:
        client.score(tokens=[[1, 2], [1, 3]], groups=[5, 5], prompt_lengths=[1, 1], priority=7, timeout_s=900.0)
    got = service.requests[-1]
    assert got.groups is not None
    assert got.prompt_lengths is not None
    assert (got.groups.tolist(), got.prompt_lengths.tolist(), got.priority) == ([5, 5], [1, 1], 7)
    assert got.timeout_s == pytest.approx(900.0, abs=60)


def test_a_failed_sample_leaves_its_neighbours(url: str) -> None:
    with RewardClient(url) as client:
        scores = client.score(tokens=[[NAN_TOKEN, 1], [3, 4], [-5]])
    assert scores.rewards[1] == 7.0
    assert np.isnan(scores.rewards[[0, 2]]).all()
    assert scores.errors[:2] == ["the reward is not finite", None]
    assert "token id -5" in scores.errors[2]


@pytest.mark.parametrize("message", ["the request is wrong", "größe"])
def test_a_4xx_is_raised_as_it_was_and_sent_once(url: str, service: ScriptedService, message: str) -> None:
    service.script = [InvalidRequest(message)]
    with RewardClient(url, policy=QUICK) as client:
        with pytest.raises(InvalidRequest, match=message):
            client.score(texts=["a"])
        assert service.num_scored == 1
        assert list(client.score(texts=["a"])) == [1.0]


def test_an_unknown_model_is_named(url: str) -> None:
    with RewardClient(url, "no such model") as client, pytest.raises(UnknownModel, match="no such model"):
        client.score(texts=["a"])


def test_a_full_queue_is_waited_for(url: str, service: ScriptedService) -> None:
    service.script = [Overloaded("full", 1.0), Overloaded("full", 0.0)]
    with RewardClient(url, policy=QUICK) as client:
        started = time.monotonic()
        assert list(client.submit(texts=["abc"]).result(timeout=120.0)) == [3.0]
        assert time.monotonic() - started > 0.8  # Retry-After
    assert service.num_scored == 3


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_full_server_is_left_alone_while_another_has_room(kind: str) -> None:
    full, config = ScriptedService(), ServerConfig(port=0, grpc_port=0)
    full.script = [Overloaded("full", 3600.0)] * 20
    with RunningServer(full, config, grace_s=0.1) as first, RunningServer(EchoService(), config, grace_s=0.1) as other:
        urls = [str(getattr(server, f"{kind}_url")) for server in (first, other)]
        with RewardClient(urls, policy=RetryPolicy(timeout_s=30.0)) as client:
            assert [client.score(texts=["x" * n]).rewards[0] for n in range(1, 20)] == list(range(1, 20))
    assert full.num_scored == 1


def test_a_queue_that_stays_full_is_an_error_in_the_end(url: str) -> None:
    policy = RetryPolicy(tries=1)
    with RewardClient(url, policy=policy) as client, pytest.raises(Overloaded) as raised:
        client.score(tokens=[[BUSY_TOKEN]])
    assert raised.value.retry_after_s == 3.0  # 2.5, in the whole seconds of the header


def test_a_deadline_is_kept(url: str, service: ScriptedService) -> None:
    with RewardClient(url) as client, service.scorer.held(), pytest.raises(DeadlineExceeded):
        client.score(tokens=[[SLOW_TOKEN]], timeout_s=0.2)


def test_many_submits_at_once(url: str, service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    performed: list[Any] = []
    service.num_awaited = 64
    with RewardClient(url, max_in_flight=64) as client:
        (transport,) = client._thread.session._transports.values()
        perform = transport.perform
        monkeypatch.setattr(transport, "perform", lambda step: performed.append(type(step)) or perform(step))
        futures = [client.submit(tokens=[[1000 + i, 5]]) for i in range(600)]
        assert [f.result(timeout=120.0).rewards[0] for f in futures] == [reward_of([1000 + i, 5]) for i in range(600)]
    assert service.num_scored == 600
    assert service.most_in_progress == 64
    assert performed.count(Describe) == 1


async def test_the_async_client_likewise(url: str, service: ScriptedService) -> None:
    async with AsyncRewardClient(url, max_in_flight=64, policy=QUICK) as client:
        await client.wait_ready(120.0)
        assert "tokens" in (await client.info()).inputs
        service.num_awaited = 64
        tasks = [client.submit(tokens=[[1000 + i, 5]]) for i in range(500)]
        assert [s.rewards[0] for s in await asyncio.gather(*tasks)] == [reward_of([1000 + i, 5]) for i in range(500)]
        assert service.most_in_progress == 64
        service.script = [InvalidRequest("wrong"), Overloaded("full", 0.0)]
        with pytest.raises(InvalidRequest, match="wrong"):
            await client.score(texts=["a"])
        assert list(await client.score(texts=["a"])) == [1.0]
        with service.scorer.held(), pytest.raises(DeadlineExceeded):
            await client.score(tokens=[[SLOW_TOKEN]], timeout_s=0.2)
    with pytest.raises(Cancelled):
        await client.score(texts=["a"])


async def test_a_cancelled_task_frees_the_server(url: str, service: ScriptedService) -> None:
    async with AsyncRewardClient(url) as client:
        cancelled = service.cancelled
        with service.scorer.held():
            task = client.submit(tokens=[[SLOW_TOKEN]])
            await asyncio.to_thread(wait_until, lambda: service.num_open == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_until, lambda: service.num_open == 0)
        assert service.cancelled == cancelled + 1
        assert list(await client.score(texts=["ab"])) == [2.0]


def test_blocking_calls_and_futures_share_the_limit_on_calls_in_flight(url: str, service: ScriptedService) -> None:
    service.pause_s = 0.005
    with RewardClient(url, max_in_flight=2) as client, ThreadPoolExecutor(8) as threads:

        def score(i: int) -> float:
            return float(client.score(tokens=[[1, i]]).rewards[0])

        blocking = [threads.submit(score, i) for i in range(100)]
        futures = [client.submit(tokens=[[1, i]]) for i in range(100)]
        assert [call.result(120.0) for call in blocking] == [f.result(120.0).rewards[0] for f in futures]
    assert service.most_in_progress <= 2


def test_closing_ends_every_future_at_once(url: str, service: ScriptedService) -> None:
    client = RewardClient(url, max_in_flight=2)
    with service.scorer.held():
        futures: list[Future] = [client.submit(tokens=[[SLOW_TOKEN]]) for _ in range(6)]
        wait_until(lambda: service.num_scored >= 2)
        futures[5].cancel()
        client.close()
        for future in futures[:5]:
            with pytest.raises(Cancelled, match="closed"):
                future.result(timeout=120)
    assert futures[5].cancelled()
    with pytest.raises(Cancelled):
        client.submit(texts=["a"])
    with pytest.raises(Cancelled):
        client.score(texts=["a"])


def test_closing_ends_a_blocking_call_and_the_threads(url: str, service: ScriptedService) -> None:
    client = RewardClient(url, max_in_flight=2)
    client.score(texts=["a"])
    service.num_scored = 0
    ended: list[BaseException] = []

    def score() -> None:
        try:
            client.score(tokens=[[SLOW_TOKEN]])
        except Cancelled as e:
            ended.append(e)

    threads = [threading.Thread(target=score) for _ in range(3)]  # the third waits for a slot
    with service.scorer.held():
        for thread in threads:
            thread.start()
        wait_until(lambda: service.num_scored >= 2)
        time.sleep(0.1)
        client.close()
        for thread in threads:
            thread.join(timeout=120)
        assert len(ended) == 3


def test_calls_within_a_running_event_loop(url: str) -> None:
    async def score(client: RewardClient) -> list[float]:
        return list(client.score(texts=["abc"]))

    with RewardClient(url) as client:
        assert [asyncio.run(score(client)) for _ in range(2)] == [[3.0], [3.0]]


@pytest.fixture
def sigint() -> Iterator[None]:
    """Has SIGINT raise KeyboardInterrupt, also if the tests run in a shell's background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_interrupts_a_call_and_cancels_its_request(url: str, service: ScriptedService, sigint: None) -> None:
    with RewardClient(url) as client, service.scorer.held():
        alarm = threading.Thread(
            target=lambda: (wait_until(lambda: service.num_open == 1), os.kill(os.getpid(), signal.SIGINT))
        )
        alarm.start()
        with pytest.raises(KeyboardInterrupt):
            client.score(tokens=[[SLOW_TOKEN]])
        alarm.join()
        wait_until(lambda: service.num_open == 0)
    with pytest.raises(Cancelled):
        client.score(texts=["a"])


def test_waiting_for_cancelled_futures_ends(url: str, service: ScriptedService) -> None:
    client = RewardClient(url, max_in_flight=1)
    with service.scorer.held() as go:
        first, cancelled = [client.submit(tokens=[[SLOW_TOKEN]]) for _ in range(2)]
        assert cancelled.cancel()
        go.set()
        assert list(first.result(timeout=120.0)) == [777.0]
    assert wait([cancelled], timeout=120.0).done
    with service.scorer.held():
        others = [client.submit(tokens=[[SLOW_TOKEN]]) for _ in range(2)]
        assert others[1].cancel()
        client.close()
        assert not wait(others, timeout=120.0).not_done


def test_text_that_is_no_unicode_names_its_row(url: str) -> None:
    with RewardClient(url) as client, pytest.raises(InvalidRequest, match=r"texts\[1\].*surrogates"):
        client.score(texts=["a", "\ud800"])
    with RewardClient(url) as client, pytest.raises(InvalidRequest, match=r"messages\[0\]"):
        client.score(messages=[[{"role": "user", "content": "\ud800"}]])


def test_waiting_for_a_model_that_is_not_served_fails_at_once(url: str) -> None:
    started = time.monotonic()
    with (
        RewardClient(url, "other") as client,
        pytest.raises(UnknownModel, match=r"unknown model 'other'; served here: many, reward_model"),
    ):
        client.wait_ready(300.0)
    assert time.monotonic() - started < 120.0


@tried_again
def test_a_model_that_is_not_ready_yet_is_waited_for(url: str, service: ScriptedService) -> None:
    try:
        with RewardClient(url) as client:
            client.wait_ready(120.0)
            service.ready = False
            with pytest.raises(DeadlineExceeded, match="not ready"):
                client.wait_ready(0.3)
            threading.Timer(0.3, setattr, (service, "ready", True)).start()
            client.wait_ready(120.0)
    finally:
        service.ready = True


def test_a_future_keeps_its_client_alive(url: str, service: ScriptedService, young_objects: None) -> None:
    with service.scorer.held() as go:
        future = RewardClient(url).submit(tokens=[[SLOW_TOKEN]])
        gc.collect()
        go.set()
        assert list(future.result(timeout=120.0)) == [777.0]


def test_a_client_that_is_dropped_ends_its_threads(url: str, young_objects: None) -> None:
    def count() -> int:  # the server runs in this process too, and starts threads as it needs them
        return sum(not thread.name.startswith("guerdon-tokenise") for thread in threading.enumerate())

    before = count()
    client = RewardClient(url)
    for future in [client.submit(texts=["a"]) for _ in range(50)]:
        future.result()
    del client, future
    gc.collect()
    deadline = time.monotonic() + 120.0
    while count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count() <= before


def test_higher_priority_leaves_the_clients_own_queue_first(url: str, service: ScriptedService) -> None:
    done: list[str] = []
    with RewardClient(url, max_in_flight=1) as client, service.scorer.held() as go:
        first = client.submit(tokens=[[SLOW_TOKEN]])
        futures = {name: client.submit(texts=["a"], priority=p) for name, p in (("low", 0), ("high", 5), ("mid", 3))}
        for name, future in futures.items():
            future.add_done_callback(lambda _, name=name: done.append(name))
        go.set()
        first.result()
        for future in futures.values():
            future.result()
    assert done == ["high", "mid", "low"]


def test_clients_are_pickled_and_copied_by_their_settings(url: str) -> None:
    policy = RetryPolicy(tries=3)
    with RewardClient([url], policy=policy) as client, pickle.loads(pickle.dumps(client)) as other:  # noqa: S301
        assert list(other.score(texts=["abc"])) == [3.0]
    assert isinstance(copy.copy(AsyncRewardClient(url)), AsyncRewardClient)


SCORE = {"texts", "messages", "tokens", "groups", "prompt_lengths", "steps", "prompts", "labels"}
SCORE |= {"priority", "timeout_s", "pad_to_length"}
INFER = SCORE - {"steps", "prompts", "labels", "priority"} | {"lengths"}
TRAIN = {"tokens", "returns", "prev_values", "mask", "lengths"}
MORE = {"rewards", "gae", "parents"}


@pytest.mark.parametrize(
    ("cls", "calls", "arguments"),
    [
        (RewardClient, ["score", "submit"], SCORE),
        (AsyncRewardClient, ["score", "submit"], SCORE),
        (LocalRewardModel, ["score", "submit"], SCORE),
        (CriticClient, ["infer", "submit"], INFER | {"parents"}),
        (CriticClient, ["infer_with_rewards", "submit_with_rewards"], INFER),
        (AsyncCriticClient, ["infer", "submit"], INFER | {"parents"}),
        (AsyncCriticClient, ["infer_with_rewards"], INFER),
        (CriticClient, ["train"], TRAIN | MORE | {"train_id", "updates"}),
        (CriticClient, ["train_loss"], TRAIN),
        (CriticClient, ["validate"], TRAIN | MORE),
        (AsyncCriticClient, ["train"], TRAIN | MORE | {"train_id", "updates"}),
        (AsyncCriticClient, ["validate"], TRAIN | MORE),
    ],
)
def test_the_arguments_are_in_the_signatures(cls: type, calls: list[str], arguments: set[str]) -> None:
    for call in calls:
        assert {*inspect.signature(getattr(cls, call)).parameters} - {"self"} == arguments, call


def test_the_signatures_have_the_defaults_and_coroutines_stay_coroutines() -> None:
    def defaults(call: Any) -> dict[str, Any]:
        return {
            name: one.default for name, one in inspect.signature(call).parameters.items() if one.default is not None
        }

    assert defaults(RewardClient.score) == {"self": inspect.Parameter.empty, "priority": 0}
    assert {"updates": 1}.items() <= defaults(CriticClient.train).items()
    assert all(map(inspect.iscoroutinefunction, (AsyncRewardClient.score, AsyncCriticClient.infer)))


def test_an_unknown_argument_is_reported_by_the_public_name(url: str) -> None:
    with RewardClient(url) as client, pytest.raises(TypeError, match=r"RewardClient\.score\(\) .* 'text'"):
        client.score(text=["hi"])  # type: ignore[call-arg]


def test_each_argument_arrives_in_its_place(url: str, service: ScriptedService) -> None:
    hints = {"groups": [4, 5], "prompt_lengths": [1, 2], "steps": [[0], [1]], "priority": 3, "timeout_s": 50.0}
    with RewardClient(url, "many") as client:
        for call in (client.score, lambda **samples: client.submit(**samples).result()):
            call(tokens=[[1, 2], [3, 4, 5]], **hints)
            asked = service.requests.pop()
            assert [*map(list, asked.tokens or ())] == [[1, 2], [3, 4, 5]] and asked.steps is not None
            assert (asked.groups.tolist(), asked.prompt_lengths.tolist(), asked.priority) == ([4, 5], [1, 2], 3)
            assert [*map(list, asked.steps)] == [[0], [1]] and 0 < (asked.timeout_s or 0) <= 50


def test_a_client_is_shown_with_its_servers_and_without_its_key() -> None:
    with RewardClient("http://x:SECRET@host:5555") as client:
        assert repr(client) == "RewardClient('http://host:5555', 'reward_model')"
    with CriticClient("host:5556", "other") as critic:
        assert repr(critic) == "CriticClient('http://host:5556', 'other')"
    several = AsyncRewardClient(["http://a:1", "http://b:2"], "sum")
    assert repr(several) == "AsyncRewardClient(['http://a:1', 'http://b:2'], 'sum')"


@pytest.mark.parametrize(
    "bad", ["ftp://host:1", "http://", "grpc://host", "grpc://host:1/path", "http://host:port", []], ids=str
)
def test_a_malformed_url_is_refused_with_the_forms(bad: str) -> None:
    with pytest.raises(InvalidRequest, match="URL"):
        RewardClient(bad)


def test_a_bare_address_means_http(running: tuple[ScriptedService, RunningServer]) -> None:
    with RewardClient(running[1].http_url.removeprefix("http://")) as client:
        assert list(client.score(texts=["abc"])) == [3.0]
