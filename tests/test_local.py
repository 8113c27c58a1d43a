"""A reward model or a teacher in this process gives the answers, and the errors, of a served one."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import judged
import scorers
import zoo
from guerdon import LocalJudge, LocalRewardModel, LocalTeacher, RewardClient, TeacherClient
from guerdon.assembly import build_service
from guerdon.client.score_file import score_file
from guerdon.errors import Cancelled, ConfigError, DeadlineExceeded, InvalidRequest
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import JudgeConfig, ModelConfig, ServerConfig, TeacherConfig
from processes import environment
from server.helpers import wait_until
from troubles import RAISED

TEXTS = ["the answer", "größer", "x" * 60, "the the the"]
CHAT = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "the reason"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = zoo.checkpoint("llama", tmp_path_factory.mktemp("local"), num_labels=2)
    return zoo.tokenizer(folder)


@pytest.fixture(scope="module")
def local(checkpoint: Path) -> Iterator[LocalRewardModel]:
    with LocalRewardModel(checkpoint, device="cpu") as model:
        yield model


@pytest.fixture(scope="module")
def client(checkpoint: Path) -> Iterator[RewardClient]:
    config = ServerConfig(port=0, grpc_port=None, models=[ModelConfig(model=str(checkpoint), device="cpu")])
    with RunningServer(build_service(config), config, grace_s=0) as server, RewardClient(server.http_url) as client:
        yield client


@pytest.fixture
def summing() -> Iterator[LocalRewardModel]:
    """The model of `scorers`, whose sequences can wait for `scorers.hold`."""
    scorers.hold.clear()
    scorers.calls.clear()
    with LocalRewardModel("scorers:score") as model:
        yield model
        scorers.hold.set()


@pytest.mark.parametrize(
    "samples",
    [
        {"texts": TEXTS, "groups": [0, 0, 1, 0]},
        {"messages": [CHAT, CHAT[:1]]},
        {"tokens": zoo.rows(), "prompt_lengths": [1] * len(zoo.rows())},
        {"tokens": [[5, 6, 7], [zoo.VOCAB_SIZE], list(range(4, 4 + zoo.MAX_LENGTH + 1))]},
    ],
    ids=["texts", "messages", "tokens", "failed"],
)
def test_scores_are_those_of_a_server(samples: dict[str, Any], client: RewardClient, local: LocalRewardModel) -> None:
    served, ours = client.score(**samples), local.score(**samples)
    assert client.info() == local.info()
    np.testing.assert_array_equal(ours.rewards, served.rewards)
    np.testing.assert_array_equal(ours.attributes, served.attributes)
    assert (ours.errors, ours.weights_version) == (served.errors, served.weights_version)
    assert [error is None for error in ours.errors] == np.isfinite(ours.rewards).tolist()


def test_settings_are_a_served_models(checkpoint: Path) -> None:
    with LocalRewardModel(
        str(checkpoint), device="cpu", name="mine", attribute_weights=[1.0, 0.0], mean="auto"
    ) as model:
        scores = model.score(texts=TEXTS)
        assert model.info().name == "mine"
        assert scores.attributes is not None
        np.testing.assert_array_equal(scores.rewards, scores.attributes[:, 0])
    with pytest.raises(ConfigError, match="unknown setting dtyp"):
        LocalRewardModel(checkpoint, dtyp="float16")
    with pytest.raises(ConfigError, match="max_batch_tokens is 0"):
        LocalRewardModel(checkpoint, max_batch_tokens=0)


@pytest.mark.slow
def test_many_threads_and_more_than_a_server_would_take(summing: LocalRewardModel) -> None:
    summing.submit(tokens=[[scorers.WAITS]])
    threading.Timer(0.5, scorers.hold.set).start()
    futures = [summing.submit(tokens=[[100 + i, 100 + j] for j in range(20)]) for i in range(1000)]
    assert [list(f.result(timeout=120)) for f in futures] == [[200.0 + i + j for j in range(20)] for i in range(1000)]
    with ThreadPoolExecutor(8) as pool:
        scores = pool.map(lambda i: list(summing.score(tokens=[[100 + i]])), range(100))
        assert list(scores) == [[100.0 + i] for i in range(100)]


def test_errors_are_a_servers(summing: LocalRewardModel) -> None:
    with pytest.raises(InvalidRequest, match="takes no input 'sentences'"):
        summing.score(texts=["a"])
    with pytest.raises(InvalidRequest, match="exactly one of texts"):
        summing.submit()
    scores = summing.score(tokens=[[1], [scorers.NAN]])
    assert (scores.errors[0], np.isnan(scores.rewards).tolist()) == (None, [False, True])
    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        summing.score(tokens=[[scorers.WAITS]], timeout_s=0.05)


def test_closing_ends_what_is_under_way(summing: LocalRewardModel) -> None:
    futures = [summing.submit(tokens=[[scorers.WAITS, i]]) for i in range(50)]
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(summing.close)
        assert all(isinstance(future.exception(120), Cancelled) for future in futures[1:])
        scorers.hold.set()
        closing.result()
    assert futures[0].done()
    with pytest.raises(Cancelled, match="closed"):
        summing.score(tokens=[[1]])
    summing.close()


def test_cancelled_futures_and_a_close_leave_no_noise(
    summing: LocalRewardModel, caplog: pytest.LogCaptureFixture
) -> None:
    futures = [summing.submit(tokens=[[scorers.WAITS, i]]) for i in range(50)]
    wait_until(lambda: bool(scorers.calls))
    summing._loop.call_soon_threadsafe(scorers.hold.wait)  # so that it closes before a cancellation comes through
    assert all(future.cancel() for future in futures[10:])
    threading.Timer(0.1, scorers.hold.set).start()
    summing.close()
    wait(futures, timeout=120)
    del futures
    gc.collect()
    assert not caplog.records  # asyncio logs each error that nobody has looked at


def test_it_closes_by_itself_and_not_before_what_it_was_asked() -> None:
    scorers.hold.clear()
    before = set(threading.enumerate())
    model = LocalRewardModel("scorers:score")
    future, gone = model.submit(tokens=[[scorers.WAITS, 5]]), weakref.ref(model)
    del model
    scorers.hold.set()
    assert list(future.result(timeout=120)) == [scorers.WAITS + 5.0]
    for _ in range(5000):
        gc.collect()
        if gone() is None and set(threading.enumerate()) <= before:
            return
        time.sleep(0.01)
    pytest.fail(f"there are still {set(threading.enumerate()) - before}")


def test_a_cancelled_future_drops_its_samples(summing: LocalRewardModel) -> None:
    blocking = summing.submit(tokens=[[scorers.WAITS]])
    wait_until(lambda: bool(scorers.calls))
    cancelled = summing.submit(tokens=[[1]] * 7)
    assert cancelled.cancel()
    summing.submit(tokens=[[2]])  # behind which the cancellation has come through
    wait_until(lambda: [waiting for waiting, _ in summing._service.loops.depth().values()] == [1])
    scorers.hold.set()
    blocking.result(timeout=120)
    assert list(summing.score(tokens=[[3]])) == [3.0]
    assert 7 not in scorers.calls


@pytest.mark.slow
def test_a_forked_child_is_told_so_and_ends() -> None:
    code = (
        "import os, gc, sys; from guerdon import LocalRewardModel; from guerdon.errors import GuerdonError\n"
        "m = LocalRewardModel('scorers:length')\n"
        "m._lock.acquire()\n"  # as another thread may hold it at that moment
        "for how in ('score', 'close', 'collect'):\n"
        "    pid = os.fork()\n"
        "    if pid:\n"
        "        print(how, os.waitpid(pid, 0)[1], flush=True)\n"
        "        continue\n"
        "    try:\n"
        "        m.score(texts=['a']) if how == 'score' else m.close() if how == 'close' else None\n"
        "    except GuerdonError as e:\n"
        "        print(e, flush=True)\n"
        "    m = None; gc.collect(); sys.exit(0)\n"
        "m._lock.release()\n"
        "print(list(m.score(texts=['abc'])))\n"
    )
    done = _python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "the model was loaded before this process was forked: load it in this process",
        *("score 0", "close 0", "collect 0", "[3.0]"),
    ]


def test_a_batch_that_does_not_end_is_not_waited_for_long(summing: LocalRewardModel) -> None:
    summing.submit(tokens=[[scorers.WAITS]])
    wait_until(lambda: bool(scorers.calls))
    began = time.monotonic()
    summing.close()
    assert time.monotonic() - began < 20


def test_files_are_scored_by_it(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": "bb"}\n')
    with LocalRewardModel("scorers:length") as model:
        summary = score_file(model, tmp_path / "in.jsonl", tmp_path / "out.jsonl", progress=False)
    assert (summary.num_failed, summary.rewards) == (0, [1.0, 2.0])


@pytest.mark.slow
def test_a_program_that_forgets_it_ends() -> None:
    code = (
        "from guerdon import LocalRewardModel; m = LocalRewardModel('scorers:length');"
        "m.submit(texts=['a']); print(list(m.score(texts=['abc'])))"
    )
    done = _python(code)
    assert (done.stdout.strip(), done.returncode) == ("[3.0]", 0)


def _python(code: str) -> subprocess.CompletedProcess[str]:
    env = environment() | {"PYTHONPATH": os.pathsep.join([environment()["PYTHONPATH"], str(Path(__file__).parent)])}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)


def test_a_teacher_answers_as_a_served_one(tmp_path: Path) -> None:
    """A question of each kind, in bfloat16, whose bits come another way than over a wire."""
    path = zoo.tokenizer(zoo.language_model("llama", tmp_path))
    rows: dict[str, Any] = {"tokens": zoo.rows(), "prompt_lengths": [1] * len(zoo.rows()), "temperature": 0.7}
    questions: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("logprobs", (), {**rows, "entropy": True}),
        ("logprobs", (), {"responses": [" thing", "e"], "prompts": ["in the", "a th"]}),
        ("top", (5,), rows),
        ("given", ([[[3, 7]] * (len(row) - 1) for row in zoo.rows()],), rows),
        ("hidden", (), rows),
        ("logprobs", (), {"messages": [CHAT]}),
    ]
    settings: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True}
    config = ServerConfig(port=0, grpc_port=None, models=[TeacherConfig(model=str(path), **settings)])
    with (
        RunningServer(build_service(config), config, grace_s=0) as server,
        TeacherClient(server.http_url) as client,
        LocalTeacher(path, **settings) as local,
    ):
        assert client.info() == local.info()
        for method, args, samples in questions:
            served, ours = (getattr(one, method)(*args, **samples) for one in (client, local))
            assert (ours.errors, ours.weights_version) == (served.errors, served.weights_version)
            for name in ("logprobs", "entropy", "top_ids", "top_logprobs", "given_logprobs", "hidden"):
                expected, got = getattr(served, name), getattr(ours, name)
                assert (expected is None) == (got is None)
                for one, other in zip(expected or (), got or (), strict=True):
                    assert one.dtype == other.dtype
                    np.testing.assert_array_equal(one, other)
        head = local.head()
        np.testing.assert_array_equal(head.weight, client.head().weight)
        assert client.head(head) is head and local.head(head) is head
        with pytest.raises(InvalidRequest, match="top_k is 129; it must be from 0 to 128"):
            local.top(129, tokens=[[5, 6]])
    with pytest.raises(ConfigError, match="unknown setting"):
        LocalTeacher(path, pooling="last")


def test_a_local_judge_gives_a_served_judges_scores(tmp_path: Path) -> None:
    path, rubric = zoo.tokenizer(zoo.language_model("llama", tmp_path / "model")), judged.write(tmp_path)
    settings: dict[str, Any] = {"max_other_mass": 1.0, "deterministic": True}
    models = [JudgeConfig(model=str(path), rubric=rubric, **settings)]
    config = ServerConfig(port=0, grpc_port=None, models=[*models])
    asked: dict[str, Any] = {"texts": judged.TEXTS, "prompts": judged.PROMPTS}
    with (
        RunningServer(build_service(config), config, grace_s=0) as server,
        RewardClient(server.http_url, "judge") as client,
        LocalJudge(path, rubric, **settings) as local,
    ):
        assert client.info() == local.info()
        served = client.score(**asked)
        for ours in (local.score(**asked), local.submit(**asked).result()):
            np.testing.assert_array_equal(ours.rewards, served.rewards)
            np.testing.assert_array_equal(ours.attributes, served.attributes)
            assert (ours.attribute_names, ours.weights_version) == (served.attribute_names, served.weights_version)
    with pytest.raises(ConfigError, match="unknown setting"):
        LocalJudge(path, rubric, pooling="last")


def test_an_exception_of_a_function_keeps_its_class_and_the_beginning_of_its_text() -> None:
    with LocalRewardModel("troubles:raising") as model:
        scores = model.score(texts=["fine", *RAISED, "number", "good"])
        assert "ValueError: setting an array element" in str(model.score(texts=["hostile"]).errors[0])
    assert scores.errors[0] is scores.errors[-1] is None
    assert scores.rewards[0] == scores.rewards[-1] == 4.0 and np.isnan(scores.rewards[1:-1]).all()
    for error, (_, what) in zip(scores.errors[1:], RAISED.values(), strict=False):
        assert what in str(error)
