"""AReaL's reward functions, called as its workflows do: by a pool of processes, or awaited."""

import asyncio
import functools
import multiprocessing
import pickle
import socket
import time
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest

from client.echo_server import EchoProcess
from guerdon import RewardClient
from guerdon.adapters import judge as judge_module
from guerdon.adapters.areal import async_reward_function, reward_function
from guerdon.errors import ConfigError, DeadlineExceeded, SampleFailed, Unavailable, Unreachable
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from server.echo_service import NAN_TOKEN, SLOW_TOKEN, EchoService, reward_of
from server.helpers import tried_again

DATA = {"messages": [{"role": "user", "content": "What is 2+2?"}], "answer": "4"}


@pytest.fixture(scope="module")
def url(sums: RunningServer) -> str:
    return sums.http_url


def test_reward_is_the_servers_own_of_the_text(url: str) -> None:
    with RewardClient(url, "total") as client:
        (wanted,) = client.score(texts=["What is 2+2? 4"], labels=["4"])
    arguments = ("What is 2+2?", " 4", [1, 2], [3])
    assert reward_function(url, "total", labels="answer")(*arguments, **DATA) == wanted
    assert asyncio.run(async_reward_function(url, "total", labels="answer")(*arguments, **DATA)) == wanted
    named = dict(zip(("prompt", "completions", "prompt_ids", "completion_ids"), arguments, strict=True))
    assert reward_function(url, "total", labels="answer")(**named, **DATA) == wanted


def test_tokens_are_sent_as_they_are_with_the_prompts_length() -> None:
    with RunningServer(service := EchoService(), ServerConfig(port=0, grpc_port=None)) as server:
        function = reward_function(server.http_url, send="tokens")
        assert function("a", "b", [5, 6, 7], [8, 9], **DATA) == reward_of([5, 6, 7, 8, 9])
        assert service.requests[-1].tokens[0].tolist() == [5, 6, 7, 8, 9]
        assert service.requests[-1].prompt_lengths.tolist() == [3]


@pytest.mark.slow
@tried_again
def test_pool_of_processes_keeps_its_connections_and_gets_its_errors_back() -> None:
    with EchoProcess(slow_s=120) as server, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        function = reward_function(server.http_url, send="tokens")
        hasty = reward_function(server.http_url, send="tokens", timeout_s=0.9)
        for ids in ([3], [3, 4]):
            assert pool.submit(functools.partial(function, "a", "b", [9], ids, **DATA)).result() == 9.0 + sum(ids)
        with pytest.raises(SampleFailed, match="not finite"):
            pool.submit(functools.partial(function, "a", "b", [NAN_TOKEN], [1], **DATA)).result()
        with pytest.raises(DeadlineExceeded):
            pool.submit(functools.partial(hasty, "a", "b", [SLOW_TOKEN], [1], **DATA)).result()
        assert pickle.loads(pickle.dumps(function))._judge is function._judge  # noqa: S301


@tried_again
def test_calls_behind_one_that_found_no_server_do_not_wait_for_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(judge_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        function = reward_function(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.5)
        started = time.monotonic()
        with pytest.raises(Unreachable, match="said nothing within"):
            function("a", "b", [1], [2])
        assert time.monotonic() - started > 0.4
        for _ in range(11):
            with pytest.raises(
                Unavailable, match=r"not sent, because the call before it failed: .*said nothing within"
            ):
                function("a", "b", [1], [2])
        now_s += 1.1
        with pytest.raises(Unreachable):  # asked again
            function("a", "b", [1], [2])


def test_blocking_calls_end_before_areal_takes_them_for_zero() -> None:
    blocking, awaited = reward_function("http://127.0.0.1:1"), async_reward_function("http://127.0.0.1:1")
    assert blocking._judge._policy.timeout_s < 15 < awaited._judge._policy.timeout_s


def test_settings_that_it_does_not_know() -> None:
    for make in (reward_function, async_reward_function):
        with pytest.raises(ConfigError, match="send is 'token'"):
            make("http://127.0.0.1:1", send="token")
        with pytest.raises(TypeError, match="modle"):
            make("http://127.0.0.1:1", modle="other")
