"""Servers that die, lie or were never there; interpreters that end, fork, or lack a library."""

import asyncio
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

import ports
from client.echo_server import ENV, EchoProcess
from guerdon.client import AsyncRewardClient, RetryPolicy, RewardClient
from guerdon.errors import DeadlineExceeded, RouteNotFound, Unavailable, Unreachable
from server.echo_service import SLOW_TOKEN, reward_of
from server.helpers import tried_again, wait_until
from stand_in import serving_http
from tiers import slow_but

PATIENT = RetryPolicy(backoff_s=0.1, max_backoff_s=1.0, tries=100_000)
KINDS = ["http", "grpc"]


@pytest.fixture
def free_port() -> int:
    return ports.free_port()


@pytest.fixture(scope="module")
def server() -> Iterator[EchoProcess]:
    with EchoProcess() as process:
        yield process


def url_of(process: EchoProcess, kind: str) -> str:
    return process.http_url if kind == "http" else process.grpc_url


def run_python(code: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=timeout_s)


# --- a server that dies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", slow_but(("http",), KINDS))
def test_requests_in_flight_outlive_a_server_that_is_killed_and_started_again(kind: str) -> None:
    with (
        EchoProcess(slow_s=120) as first,
        RewardClient(url_of(first, kind), policy=PATIENT, max_in_flight=32) as client,
    ):
        client.score(texts=["warm"])
        futures = [client.submit(tokens=[[SLOW_TOKEN, i]]) for i in range(32)]
        futures += [client.submit(tokens=[[1000, i]]) for i in range(200)]
        wait_until(lambda: first.num_requests() == 32)
        first.kill()
        time.sleep(0.3)
        assert not any(future.done() for future in futures)
        with first.again(slow_s=0.05):
            rewards = [future.result(timeout=120.0).rewards[0] for future in futures]
    assert rewards == [reward_of([SLOW_TOKEN, i]) for i in range(32)] + [reward_of([1000, i]) for i in range(200)]


@pytest.mark.parametrize("kind", slow_but(("grpc",), KINDS))
async def test_the_async_client_outlives_it_too(kind: str) -> None:
    with EchoProcess(slow_s=120) as first:
        async with AsyncRewardClient(url_of(first, kind), policy=PATIENT) as client:
            await client.wait_ready(120.0)
            tasks = [client.submit(tokens=[[SLOW_TOKEN, i]]) for i in range(32)]
            await asyncio.to_thread(wait_until, lambda: first.num_requests() == 32)
            first.kill()
            with await asyncio.to_thread(first.again, slow_s=0.05):
                scores = await asyncio.gather(*tasks)
    assert [s.rewards[0] for s in scores] == [reward_of([SLOW_TOKEN, i]) for i in range(32)]


def test_a_server_that_stays_dead_is_an_error_after_the_tries() -> None:
    policy = RetryPolicy(tries=3, backoff_s=0.05)
    with EchoProcess() as server, RewardClient(server.http_url, policy=policy) as client:
        client.score(texts=["warm"])
        server.kill()
        with pytest.raises(Unreachable) as raised:
            client.score(texts=["a"])
    assert raised.value.__notes__ == ["gave up after 3 tries"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_tells_whether_the_request_may_have_arrived(kind: str) -> None:
    with EchoProcess(slow_s=120) as server, RewardClient(url_of(server, kind), policy=RetryPolicy(tries=1)) as client:
        client.score(texts=["warm"])
        future = client.submit(tokens=[[SLOW_TOKEN, 1]])
        wait_until(lambda: server.num_requests() == 1)
        server.kill()
        with pytest.raises(Unreachable) as broke:
            future.result(timeout=120.0)
        assert broke.value.may_have_arrived

        def is_refused() -> bool:
            """Perhaps not at the first call: gRPC may not have noticed yet that the connection is lost."""
            with pytest.raises(Unreachable) as refused:
                client.score(texts=["a"])
            return not refused.value.may_have_arrived

        wait_until(is_refused)


# --- several servers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", slow_but(("http",), KINDS))
def test_of_two_servers_a_dead_one_is_left_out_and_taken_back(kind: str) -> None:
    with EchoProcess(slow_s=120) as dying, EchoProcess(slow_s=0.05) as living:
        urls = [url_of(dying, kind), url_of(living, kind)]
        with RewardClient(urls, policy=PATIENT) as client:
            for future in [client.submit(texts=["x" * 400]) for _ in range(50)]:
                future.result(timeout=120.0)
            books = client._caller.endpoints.all
            assert all(endpoint.seen and endpoint.last_taken > 1 for endpoint in books)  # both had their share

            futures = [client.submit(tokens=[[SLOW_TOKEN, i]]) for i in range(20)]
            wait_until(lambda: dying.num_requests() > 0)
            dying.kill()
            assert [f.result(timeout=120.0).rewards[0] for f in futures] == [
                reward_of([SLOW_TOKEN, i]) for i in range(20)
            ]
            assert [endpoint.num_failures > 0 for endpoint in books] == [True, False]
            started = time.monotonic()
            for _ in range(50):
                client.score(texts=["a"])
            assert time.monotonic() - started < 40.0

            plans = {books[0].probe_at}
            while len(plans) < 4:  # each failed probe plans the next, always at most 1.25 s ahead
                client.score(texts=["a"])
                assert books[0].probe_at - time.monotonic() <= 1.25
                plans.add(books[0].probe_at)
                time.sleep(0.05)

            with dying.again():
                deadline = time.monotonic() + 120.0
                while books[0].num_failures and time.monotonic() < deadline:
                    client.score(texts=["a"])
                    time.sleep(0.05)
                assert books[0].num_failures == 0
                assert [endpoint.outstanding for endpoint in books] == [0, 0]


def test_a_server_that_was_never_there_does_not_hold_up_the_other(server: EchoProcess, free_port: int) -> None:
    with RewardClient([f"127.0.0.1:{free_port}", server.http_url]) as client:
        started = time.monotonic()
        client.wait_ready(120.0)
        futures = [client.submit(tokens=[[1000, i]]) for i in range(200)]
        assert [f.result(timeout=120.0).rewards[0] for f in futures] == [reward_of([1000, i]) for i in range(200)]
        assert time.monotonic() - started < 100.0


# --- an address that is wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_port_is_reported_within_seconds(kind: str, free_port: int) -> None:
    started = time.monotonic()
    with RewardClient(f"{kind}://127.0.0.1:{free_port}") as client:
        with pytest.raises(Unreachable, match=f"{free_port}.*[Rr]efused.*is the server running there.*port"):
            client.score(texts=["a"])
        with pytest.raises(Unreachable):
            client.submit(texts=["a"]).result()
    assert time.monotonic() - started < 40.0  # ten tries would take longer


@pytest.mark.parametrize("kind", KINDS)
async def test_a_wrong_port_is_reported_to_the_async_client(kind: str, free_port: int) -> None:
    async with AsyncRewardClient(f"{kind}://127.0.0.1:{free_port}") as client:
        with pytest.raises(Unreachable, match="is the server running there"):
            await asyncio.wait_for(client.score(texts=["a"]), 20.0)


@pytest.mark.parametrize(("kind", "other"), [("http", "grpc"), ("grpc", "http")])
def test_the_other_protocols_port_is_reported(server: EchoProcess, kind: str, other: str) -> None:
    address = url_of(server, other).partition("://")[2]
    started = time.monotonic()
    with RewardClient(f"{kind}://{address}") as client, pytest.raises(Unreachable, match=f"{other}://host:port"):
        client.score(texts=["a"])
    assert time.monotonic() - started < 40.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_silent_port_is_reported_after_the_connect_time_out(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"{kind}://127.0.0.1:{silent.getsockname()[1]}"
        with RewardClient(url, policy=RetryPolicy(connect_timeout_s=0.5)) as client:
            started = time.monotonic()
            with pytest.raises(Unreachable, match=r"within 0.5 s|cannot connect"):
                client.score(texts=["a"])
            assert time.monotonic() - started < 60.0


def test_a_host_that_drops_packets_is_reported_after_the_connect_time_out() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        fillers = [socket.socket() for _ in range(4)]  # beyond the backlog, the kernel drops what asks to connect
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        started = time.monotonic()
        with (
            RewardClient(f"127.0.0.1:{address[1]}", policy=RetryPolicy(connect_timeout_s=0.5)) as client,
            pytest.raises(Unreachable, match=r"cannot connect.*timed out"),
        ):
            client.score(texts=["a"])
        assert time.monotonic() - started < 60.0
        for filler in fillers:
            filler.close()


def test_a_web_server_of_another_kind_is_no_reward_server() -> None:
    import http.server

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

    with (
        serving_http(Quiet) as url,
        RewardClient(url) as client,
        pytest.raises(RouteNotFound, match=r"404.*KServe v2"),
    ):
        client.score(texts=["a"])


@tried_again
def test_waiting_for_a_server_that_starts_late_and_one_that_never_does(
    free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "guerdon")
    processes: list[EchoProcess] = []
    timer = threading.Timer(0.5, lambda: processes.append(EchoProcess(free_port)))
    with RewardClient(f"127.0.0.1:{free_port}") as client:
        with pytest.raises(DeadlineExceeded, match=r"within 0.2 s: cannot connect.*refused"):
            client.wait_ready(0.2)
        timer.start()
        client.wait_ready(120.0)
        assert list(client.score(texts=["ab"])) == [2.0]
    timer.join()
    processes[0].kill()


# --- the client's own process -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("http", how) for how in ("in flight", "exception")),
        ("grpc", "in flight"),
        *(pytest.param("http", how, marks=pytest.mark.slow) for how in ("idle", "queued", "waiting")),
        *(pytest.param("grpc", how, marks=pytest.mark.slow) for how in ("idle", "queued", "waiting", "exception")),
    ],
)
def test_the_interpreter_ends_without_waiting_for_the_client(server: EchoProcess, kind: str, how: str) -> None:
    work = {
        "idle": "",
        "in flight": "[silent.submit(texts=['a']) for _ in range(4)]; time.sleep(0.2)",
        "queued": f"futures = [client.submit(tokens=[[{SLOW_TOKEN}]]) for _ in range(500)]; time.sleep(0.2)",
        "waiting": "silent._submit(silent._caller.wait_ready('reward_model', 600.0)); time.sleep(0.2)",
        "exception": f"client.submit(tokens=[[{SLOW_TOKEN}]]); print('end', time.time()); raise SystemExit(0)",
    }[how]
    silent = socket.create_server(("127.0.0.1", 0))
    code = f"""
import time
from guerdon.client import RewardClient, RetryPolicy
silent = RewardClient("{kind}://127.0.0.1:{silent.getsockname()[1]}", policy=RetryPolicy(connect_timeout_s=60.0))
client = RewardClient({url_of(server, kind)!r}, max_in_flight=4)
assert list(client.score(texts=["abc"])) == [3.0]
{work}
print("end", time.time())
"""
    with silent:
        done = run_python(code)
    assert time.time() - float(done.stdout.split()[1]) < 30.0  # what is under way would take a minute or two
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_an_async_client_that_nobody_closed_does_not_hold_up_the_end(server: EchoProcess) -> None:
    code = f"""
import asyncio
from guerdon.client import AsyncRewardClient
async def main(url):
    client = AsyncRewardClient(url)
    assert list(await client.score(texts=["abc"])) == [3.0]
    client.submit(tokens=[[{SLOW_TOKEN}]])
    await asyncio.sleep(0.1)
for url in ({server.http_url!r}, {server.grpc_url!r}):
    asyncio.run(main(url))
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_a_client_still_works_after_a_fork(server: EchoProcess) -> None:
    code = f"""
import os
from guerdon.client import RewardClient
client = RewardClient({server.http_url!r}, max_in_flight=1)
assert list(client.submit(texts=["abc"]).result()) == [3.0]
child = os.fork()
if child == 0:
    ok = list(client.submit(texts=["ab"]).result(timeout=120)) == [2.0] and list(client.score(texts=["a"])) == [1.0]
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert list(client.score(texts=["abcd"])) == [4.0]
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_over_grpc_a_fork_works_only_while_no_call_is_under_way() -> None:
    with EchoProcess(slow_s=120) as server:
        code = f"""
import asyncio, os, re, signal, threading, time
from urllib.request import urlopen
from guerdon.client import AsyncRewardClient, RewardClient
from guerdon.errors import GuerdonError

def num_threads():
    return len(os.listdir("/proc/self/task"))

def in_a_fork(work):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        work()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, work

def works():
    assert list(client.submit(texts=["ab"]).result()) == [2.0]
    assert list(client.score(texts=["a"])) == [1.0]

async def open_client():
    other = AsyncRewardClient({server.grpc_url!r})
    assert list(await other.score(texts=["ab"])) == [2.0]
    return other

def works_async():
    asyncio.run(open_client())

def says_so():
    for ask in (works, client.wait_ready, lambda: RewardClient({server.grpc_url!r}), works_async):
        try:
            ask()
        except GuerdonError as e:
            assert "forked while gRPC was at work" in str(e), e
        else:
            raise AssertionError(ask)
    with RewardClient({server.http_url!r}) as other:
        assert "tokens" in other.info().inputs

before = num_threads()
client = RewardClient({server.grpc_url!r})
assert num_threads() == before, "gRPC begins before it is asked"
in_a_fork(works)
works()
in_a_fork(works)
in_a_fork(works_async)
for _ in range(10):  # with connections of its own
    with RewardClient({server.grpc_url!r}) as one, RewardClient({server.grpc_url!r}) as two:
        assert list(one.score(texts=["a"])) == list(two.score(texts=["a"])) == [1.0]
        in_a_fork(lambda: one.score(texts=["a"]))

loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
other = asyncio.run_coroutine_threadsafe(open_client(), loop).result()
in_a_fork(works_async)
asyncio.run_coroutine_threadsafe(other.aclose(), loop).result()
in_a_fork(works_async)

future = client.submit(tokens=[[{SLOW_TOKEN}]])
running = re.compile(rb'guerdon_num_requests_running{{model="reward_model"}} 1')
while not running.search(urlopen({server.http_url!r} + "/metrics").read()):
    time.sleep(0.01)
in_a_fork(says_so)
assert not future.done()
"""
        done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_the_client_imports_neither_torch_nor_transformers_nor_grpc_unasked(server: EchoProcess) -> None:
    code = f"""
import sys
import guerdon.client.score_file
from guerdon import CriticClient, InvalidRequest, RewardClient, TeacherClient, TrainReport
with RewardClient({server.http_url!r}) as client:
    client.score(texts=["a"])
heavy = ("torch", "transformers", "grpc", "tritonclient", "starlette", "uvicorn", "matplotlib", "guerdon.server")
print(*(name for name in heavy if name in sys.modules))
with RewardClient({server.grpc_url!r}) as client:
    client.score(texts=["a"])
print(*(name for name in ("torch", "transformers", "grpc", "guerdon.server") if name in sys.modules))
"""
    done = run_python(code)
    assert done.stdout == "\ngrpc\n", done.stderr


@pytest.mark.slow
def test_grpc_without_its_extra_says_what_to_install() -> None:
    code = """
import sys
sys.modules["grpc"] = None
from guerdon.client import RewardClient
from guerdon.errors import StartError
try:
    RewardClient("grpc://127.0.0.1:1")
except StartError as e:
    print(e)
"""
    assert "pip install '.[grpc]' in a clone" in run_python(code).stdout


def test_unreachable_is_an_unavailable_that_a_retry_may_help() -> None:
    assert issubclass(Unreachable, Unavailable)
    assert Unreachable("x").retryable


@tried_again
def test_calls_that_fail_alike_end_each_at_its_own_time(free_port: int) -> None:
    policy = RetryPolicy(tries=1000, wait_for_start=True, backoff_s=0.02, max_backoff_s=0.1)
    with RewardClient(f"http://127.0.0.1:{free_port}", policy=policy) as client:
        calls = [client.submit(tokens=[[3, 4, 5]], timeout_s=0.2 + 0.03 * i) for i in range(20)]
        for call in calls:  # the first to end frees its error's frames; the others still wait for their next try
            with pytest.raises(Unreachable):
                call.result(timeout=120)
