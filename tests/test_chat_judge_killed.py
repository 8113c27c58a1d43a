"""A server of a judge in words, killed with SIGKILL amid 200 samples: nothing that was recorded is asked again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import orjson
import pytest

import killed_judge
from guerdon import RetryPolicy, RewardClient
from guerdon.settings.chat_judges import ChatJudgeConfig, ParseConfig
from guerdon.settings.config import ServerConfig
from guerdon.settings.rubrics import ComparingConfig
from guerdon.wire.chat_completions import write_messages, write_request
from killing import Kill, Restarted, forkserver
from ports import free_port
from stand_in_judge import KEY, MODEL, stand_in

NUM_SAMPLES = 200
CONCURRENCY = 8
TIMEOUT_S = 250.0


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> Iterator[None]:
    with forkserver(), stand_in():  # the first start is slow
        yield


def response(i: int) -> str:
    """Every tenth is never readable, every tenth only at the second try."""
    return {3: "<garbage> ", 7: "<garbage 1> "}.get(i % 10, "") + f"sample {i} worth {i % 13}"


def question(text: str) -> str:
    """The messages about a response."""
    return write_messages([{"role": "user", "content": text}])


def num_tries(i: int) -> int:
    return {3: 3, 7: 2}.get(i % 10, 1)


def score(port: int) -> np.ndarray:
    """The rewards of all samples, sent by four threads of a trainer; unreadable ones have to fail."""

    def ask(first: int) -> np.ndarray:
        texts = [response(i) for i in range(first, first + 10)]
        policy = RetryPolicy(timeout_s=TIMEOUT_S, tries=1_000_000, max_backoff_s=0.2, wait_for_start=True)
        with RewardClient(f"http://127.0.0.1:{port}", "careful", policy=policy) as client:
            scores = client.score(texts=texts, prompts=[""] * 10)
        for i, error in enumerate(scores.errors, first):
            assert (error is not None) == (i % 10 == 3), error
            assert error is None or "none of 3 answers can be read" in str(error)
        return scores.rewards

    with ThreadPoolExecutor(4) as threads:
        return np.concatenate([*threads.map(ask, range(0, NUM_SAMPLES, 10))])


def killed(kills: list[Kill], folder: Path) -> int:
    """Scores all samples while the server is killed; returns the number of kills.

    At most the calls in progress at a kill may have been answered for nothing.
    """
    port = free_port()
    with stand_in(delay_s=0.02) as remote:
        judge = ChatJudgeConfig(
            name="careful", url=remote.url, model=MODEL, template="{response}", cache=str(folder / "answers"),
            parse=ParseConfig(regex=r"Score: (\S+)"), concurrency=CONCURRENCY, api_key_file=str(folder / "key"),
        )  # fmt: skip
        (folder / "key").write_text(KEY)
        config = ServerConfig(port=port, grpc_port=None, models=[judge])
        with Restarted(killed_judge.serve, (config,), kills, port) as server:
            rewards = score(port)
            counts = remote.counts()
            again = score(port)
            assert remote.counts() == counts
    wanted = [np.nan if i % 10 == 3 else i % 13 for i in range(NUM_SAMPLES)]
    np.testing.assert_array_equal(rewards, wanted)
    np.testing.assert_array_equal(again, wanted)
    check_starts(folder, judge, counts["asked"])
    recorded = killed_judge.recorded(folder / "answers")
    assert len(recorded) == len(set(recorded))
    num_lost = sum(counts["answered"].values()) - len(recorded)
    assert num_lost <= server.num_kills * CONCURRENCY
    print(f"{server.num_kills} kills, {num_lost} answers of calls in progress lost")
    return server.num_kills


def check_starts(folder: Path, judge: ChatJudgeConfig, asked: dict[str, int]) -> None:
    """Asserts that after each start only questions were asked of which not all answers had been recorded."""
    starts = [orjson.loads(line) for line in (folder / killed_judge.STARTS).read_bytes().splitlines()]
    for start in starts:
        recorded = set(start["recorded"])
        for i in range(NUM_SAMPLES):
            body = write_request(judge.model, question(response(i)), {"max_tokens": judge.max_tokens})
            keys = [hashlib.sha256(body + b"\n" + f"0.{k}".encode()).hexdigest() for k in range(num_tries(i))]
            if recorded.issuperset(keys):
                assert asked[response(i)] == start["asked"][response(i)], f"sample {i} was asked again"


def compared(port: int) -> np.ndarray:
    """The rewards of 20 groups of five, each of ten pairs in both orders."""

    def ask(group: int) -> np.ndarray:
        prompt, texts = f"prompt {group}: ", [f"worth {(group + i) % 7} ({i})" for i in range(5)]
        policy = RetryPolicy(timeout_s=TIMEOUT_S, tries=1_000_000, max_backoff_s=0.2, wait_for_start=True)
        with RewardClient(f"http://127.0.0.1:{port}", "careful", policy=policy) as client:
            return (
                client.score(texts=[prompt + text for text in texts], prompts=[prompt] * 5).raise_for_failed().rewards
            )

    with ThreadPoolExecutor(4) as threads:
        return np.stack([*threads.map(ask, range(20))])


@pytest.mark.slow
def test_no_verdict_on_200_pairs_is_paid_for_twice(tmp_path: Path) -> None:
    """Killed at each point; 400 questions, since each pair is asked in both orders."""
    port = free_port()
    (tmp_path / "key").write_text(KEY)
    with stand_in(delay_s=0.02) as remote:
        judge = ChatJudgeConfig(
            name="careful", url=remote.url, model=MODEL, cache=str(tmp_path / "answers"), concurrency=CONCURRENCY,
            parse=ParseConfig(preset="brackets"), compare=ComparingConfig("round_robin", "wins"),
            api_key_file=str(tmp_path / "key"), template="{prompt} {response_a}; {response_b} [[A]]?",
        )  # fmt: skip
        config = ServerConfig(port=port, grpc_port=None, models=[judge])
        with Restarted(killed_judge.serve, (config,), [(point, 8) for point in POINTS], port) as server:
            rewards, counts = compared(port), remote.counts()
            np.testing.assert_array_equal(compared(port), rewards)
            assert remote.counts() == counts
    recorded = killed_judge.recorded(tmp_path / "answers")
    assert len(recorded) == len(set(recorded)) == 400 and server.num_kills == len(POINTS)
    assert sum(counts["answered"].values()) - 400 <= server.num_kills * CONCURRENCY
    for start in map(orjson.loads, (tmp_path / killed_judge.STARTS).read_bytes().splitlines()):
        known = set(start["recorded"])
        for text, number in counts["asked"].items():
            body = write_request(judge.model, question(text), {"max_tokens": judge.max_tokens})
            if hashlib.sha256(body + b"\n0.0").hexdigest() in known:
                assert number == start["asked"][text], f"{text} was asked again"
    for group, row in enumerate(rewards):
        worths = np.array([(group + i) % 7 for i in range(5)])
        table = 0.5 + 0.5 * np.sign(np.subtract.outer(worths, worths))
        np.testing.assert_allclose(row, (table.sum(1) - 0.5) / 4, atol=1e-6)


POINTS = (killed_judge.AMID, *killed_judge.POINTS)


@pytest.mark.slow
def test_what_was_answered_is_not_asked_again(tmp_path: Path) -> None:
    """Killed once at each point."""
    assert killed([(point, 8) for point in POINTS], tmp_path) == len(POINTS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_kills_at_random(seed: int, tmp_path: Path) -> None:
    random_numbers = np.random.default_rng(seed)
    times: list[Kill] = [float(seconds) for seconds in random_numbers.uniform(0, 0.4, 4)]
    points: list[Kill] = [(point, int(random_numbers.integers(1, 12))) for point in POINTS]
    kills = [*times, *points]
    random_numbers.shuffle(kills)  # type: ignore[arg-type]
    assert killed(kills, tmp_path)
