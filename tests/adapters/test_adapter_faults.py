"""The adapters of rewards if servers are down, slow or wrong; forked, pickled, and what they load."""

import asyncio
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import served
from adapters.forms import FORMS, OBJECTS, ask
from client.echo_server import EchoProcess
from guerdon import adapters
from guerdon.adapters.judge import JudgeClient as Judge
from guerdon.adapters.judge import judge
from guerdon.client import AsyncRewardClient
from guerdon.errors import DeadlineExceeded, GuerdonError, SampleFailed, Unauthenticated, UnknownModel, Unreachable
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig, ServerConfig
from ports import free_port
from processes import by_itself, end_of_child, environment
from served import Serve
from server import echo_service
from server.echo_service import EchoService
from server.helpers import tried_again, wait_until
from server.keys import SCORE, keyed

ALL = FORMS | OBJECTS


def ask_all(url: str, run: Callable[[Any], Any] = asyncio.run, **settings: Any) -> dict[str, Future[Any]]:
    """All adapters' answers, asked for at once."""
    with ThreadPoolExecutor(len(ALL)) as pool:
        return {name: pool.submit(ask, name, make(url, **settings), "four", run) for name, make in ALL.items()}


def errors(asked: dict[str, Future[Any]]) -> list[GuerdonError]:
    """Returns what each raised; raises AssertionError if one did not."""
    raised = [future.exception() for future in asked.values()]
    assert all(isinstance(error, GuerdonError) for error in raised), dict(zip(asked, raised, strict=True))
    return raised  # type: ignore[return-value]


@pytest.fixture(scope="module")
def url(serve: Serve) -> str:
    """Of a server whose model has no score for some texts."""
    return serve(ModelConfig(model="served:flaky", name="reward_model"), grpc_port=0).http_url


@pytest.fixture
def on_one_loop() -> Iterator[Callable[[Any], Any]]:
    """Runs coroutines on one event loop beside the threads that want their results, as TRL does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize("name", ALL)
def test_failed_sample_is_none_for_trl_and_raises_elsewhere(name: str, url: str) -> None:
    function = ALL[name](url)
    assert ask(name, function, "12345") == 5.0
    if name.startswith("trl"):
        assert ask(name, function, served.FAILS) is None
    else:
        with pytest.raises(SampleFailed, match=r"row 0: the function returned nan"):
            ask(name, function, served.FAILS)


def test_first_call_waits_for_a_server_that_starts_late(
    on_one_loop: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    ports = [free_port(), free_port()]
    url = f"http://127.0.0.1:{ports[0]}"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_all, url, on_one_loop, timeout_s=120)
        wait_until(lambda: len(caplog.records) >= 2)
        time.sleep(0.5)
        told = [record.getMessage() for record in caplog.records]
        with EchoProcess(*ports):
            assert [future.result() for future in asked.result().values()] == [4.0] * len(ALL)
    # One for the threads and one for the loop, however many calls wait.
    assert len(told) == 2 and all(url in line and "waiting for it, up to 120 s" in line for line in told)


@tried_again
def test_without_a_server_they_raise_when_their_time_is_over() -> None:
    started = time.monotonic()
    for error in errors(ask_all(f"http://127.0.0.1:{free_port()}", timeout_s=0.6)):
        assert isinstance(error, Unreachable) and "is the server running there?" in str(error)
    assert 0.1 < time.monotonic() - started < 120


def test_one_judge_for_all_threads() -> None:
    ready = threading.Barrier(16)

    def make(_: int) -> Judge:
        ready.wait()
        return judge("http://127.0.0.1:1", "of many threads", 1.0)

    with ThreadPoolExecutor(16) as pool:
        assert len({id(one) for one in list(pool.map(make, range(16)))}) == 1


def test_a_key_that_comes_after_a_refusal_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = keyed(tmp_path, grpc_port=None)
    with served.running(config=config, build=EchoService) as server:
        for wanted in (Unauthenticated, None):
            for name, made in FORMS.items():
                function = made(server.http_url)
                if wanted is not None:
                    with pytest.raises(wanted):
                        ask(name, function, "four")
                else:
                    assert ask(name, function, "four") == 4.0
                    assert SCORE.encode() not in pickle.dumps(function)
            monkeypatch.setenv("GUERDON_API_KEY", SCORE)


@tried_again
def test_loops_that_are_closed_are_forgotten_though_another_thread_has_done_it() -> None:
    scorer = judge("http://127.0.0.1:1", "of many loops", 0.05)

    class Closed(asyncio.SelectorEventLoop):
        def is_closed(self) -> bool:
            scorer._by_loop.pop(self, None)  # as another thread does, just now
            return True

    loop = Closed()
    scorer._by_loop[loop] = AsyncRewardClient("http://127.0.0.1:1")
    with pytest.raises(Unreachable):
        asyncio.run(scorer.score_async(texts=["a"]))
    asyncio.SelectorEventLoop.close(loop)


def test_wrong_model_raises_and_names_the_right_one(url: str) -> None:
    for error in errors(ask_all(url, model="rewarrd_model")):
        assert isinstance(error, UnknownModel) and "rewarrd_model" in str(error) and "reward_model" in str(error)


@tried_again
def test_server_that_is_too_slow_raises_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo_service, "TEXT_TOKEN", echo_service.SLOW_TOKEN)
    service = EchoService()
    with RunningServer(service, ServerConfig(port=0, grpc_port=None)) as server, service.scorer.held():
        for error in errors(ask_all(server.http_url, timeout_s=0.8)):
            assert isinstance(error, DeadlineExceeded)


@tried_again
def test_a_lost_server_is_given_up_after_the_time_out_and_found_again(on_one_loop: Callable[[Any], Any]) -> None:
    def ask_within(timeout_s: float) -> dict[str, Future[Any]]:
        return ask_all(server.http_url, on_one_loop, timeout_s=timeout_s)

    def all_are_answered(timeout_s: float) -> bool:
        asked = ask_within(timeout_s).values()
        return all(future.exception() is None and future.result() == 4.0 for future in asked)

    with EchoProcess() as server:
        for timeout_s in (1.5, 60):
            wait_until(partial(all_are_answered, timeout_s))
        server.kill()
        started = time.monotonic()
        for error in errors(ask_within(1.5)):
            assert isinstance(error, Unreachable) and "gave up after" in error.__notes__[0]
        assert time.monotonic() - started < 120
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask_within, 60)
            time.sleep(0.3)
            with server.again():
                assert [future.result() for future in asked.result().values()] == [4.0] * len(ALL)


@pytest.mark.parametrize("name", FORMS)
def test_they_are_called_from_many_threads(name: str, url: str) -> None:
    function = FORMS[name](url)
    texts = ["x" * n for n in range(1, 33)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: ask(name, function, text), texts)) == [float(len(text)) for text in texts]


@pytest.fixture
def forks_url() -> Iterator[str]:
    # The test's own process imports this module, and needs no server.
    from server.echo_service import EchoService

    with served.running(build=EchoService) as server:
        yield server.http_url


@pytest.mark.slow
@by_itself
def test_they_work_after_a_fork_and_when_pickled_after_use(forks_url: str) -> None:
    def works(name: str, function: Any, text: str) -> None:
        assert ask(name, function, text) == float(len(text))

    for name, make in FORMS.items():
        function = make(forks_url)
        fresh = pickle.dumps(function)
        works(name, function, "123")
        assert end_of_child(partial(works, name, function, "1234")) == 0, name
        for pickled in (fresh, pickle.dumps(function)):
            works(name, pickle.loads(pickled), "12")  # noqa: S301
            assert end_of_child(lambda it=(name, pickled): works(it[0], pickle.loads(it[1]), "12")) == 0, name  # noqa: S301
        works(name, function, "123")


FOLDER = Path(adapters.__file__).parent
SERVING = ("critic_server_trainer", "reinforce_actor", "reward_model_server")
"""NeMo-Aligner's server side: it runs models itself."""
MODULES_OF_TRL = ("trl_models", "trl_critic")
"""Their classes are torch's modules and transformers' callbacks, because TRL asks for such."""
MODULES = sorted(
    "guerdon.adapters." + ".".join(path.relative_to(FOLDER).with_suffix("").parts)
    for path in [*FOLDER.glob("*.py"), *FOLDER.glob("*/*.py")]
    if (path.name != "__init__.py" or path.parent != FOLDER) and path.stem not in SERVING + MODULES_OF_TRL
)
HEAVY = ("torch", "transformers", "starlette", "uvicorn", "ray", "grpc", "yaml", "nemo_rl", "rewardbench", "trl",
         "verifiers", "openenv", "guerdon.local", "guerdon.server", "guerdon.engine", "guerdon.assembly")  # fmt: skip


def test_importing_adapters_loads_none_of_it() -> None:
    code = f"""
import importlib, sys
for module in {MODULES}:
    before = set(sys.modules)
    importlib.import_module(module.removesuffix(".__init__"))
    for heavy in {HEAVY}:
        if heavy in sys.modules and heavy not in before:
            print(module, "loads", heavy)
"""
    assert {"guerdon.adapters.nemo_rl", "guerdon.adapters.trlx"} < {*MODULES} and len(MODULES) > 9
    in_a_package = {path.stem for path in (FOLDER / "nemo_aligner").glob("*.py")} - {*SERVING}
    assert {"remote_clients", "__init__"} <= in_a_package <= {name.rpartition(".")[2] for name in MODULES}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout == ""
