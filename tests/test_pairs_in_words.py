"""Judges in words that compare, asked of a strict stand-in over real HTTP: schedules, both orders, ties and presets."""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import served
from guerdon.client import RewardClient, Scores
from guerdon.kinds.compare import bradley_terry, log_odds
from guerdon.server.runtime import RunningServer
from guerdon.settings.chat_judges import ChatJudgeConfig, ParseConfig
from guerdon.settings.rubrics import ComparingConfig, CriterionConfig
from served import Serve
from stand_in_judge import KEY, MODEL, StandIn, stand_in

PROMPT, WORTHS = "How much? ", [3, 1, 4, 1, 5]
GROUP = [f"worth {worth} ({i})" for i, worth in enumerate(WORTHS)]
PRESETS: tuple[Any, ...] = ("genrm", "rm_r1", "brackets")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs-in-words")
    (folder / "key").write_text(KEY)
    return folder


@pytest.fixture(scope="module")
def remote() -> Iterator[StandIn]:
    with stand_in() as running:
        yield running


def judge(remote: StandIn, folder: Path, name: str, preset: Any = "brackets", **settings: Any) -> ChatJudgeConfig:
    made: dict[str, Any] = {
        "url": remote.url, "model": MODEL, "name": name, "api_key_file": str(folder / "key"), "call_retries": 1,
        "parse": ParseConfig(preset=preset), "compare": ComparingConfig(scores="wins"), "cache": str(folder / "kept"),
    }  # fmt: skip
    return ChatJudgeConfig(**{**made, **settings})


@pytest.fixture(scope="module")
def server(remote: StandIn, folder: Path, serve: Serve) -> RunningServer:
    def comparing(name: str, *compare: Any, **more: Any) -> ChatJudgeConfig:
        return judge(remote, folder, name, compare=ComparingConfig(*compare), **more)

    criteria = [CriterionConfig("right", "Is it right?", 2.0), CriterionConfig("brief", "Or brief?", -1.0)]
    return serve(
        *(judge(remote, folder, preset, preset) for preset in PRESETS),
        comparing("circular", "circular", "wins"),
        comparing("reference", "reference", "wins"),
        comparing("against", "reference", "bradley_terry"),
        comparing("roles", "reference", "wins", parse=ParseConfig(preset="genrm")),
        comparing("strengths", "round_robin", "bradley_terry"),
        judge(remote, folder, "principled", "genrm", template="{reference}"),
        judge(remote, folder, "two", template="{criterion} {response_a} {response_b} [[A]]", criteria=criteria),
        grpc_port=0,
    )


def ask(server: RunningServer, name: str, responses: list[str] = GROUP, **more: Any) -> Scores:
    with RewardClient(server.http_url, name) as client:
        return client.score(texts=[PROMPT + one for one in responses], prompts=[PROMPT] * len(responses), **more)


def wins(verdict_of_more: float, tie: float = 0.5) -> np.ndarray:
    """Each response's mean verdict against the four others."""
    table = np.sign(np.subtract.outer(WORTHS, WORTHS)) * (verdict_of_more - 0.5) + 0.5
    table[table == 0.5] = tie
    np.fill_diagonal(table, 0)
    return table.sum(1) / (len(WORTHS) - 1)


@pytest.mark.parametrize(("preset", "verdict"), [("genrm", 0.8), ("rm_r1", 1.0), ("brackets", 1.0)])
def test_each_preset_gives_the_rewards_of_its_verdicts(preset: str, verdict: float, server: RunningServer) -> None:
    """Of two equals RM-R1's form names the first in each order: a disagreement, which is a tie."""
    scores = ask(server, preset)
    np.testing.assert_allclose(scores.rewards, wins(verdict), atol=1e-6)
    assert scores.attribute_names == ("disagreed",) and scores.attributes is not None
    equals = [WORTHS.count(worth) - 1 for worth in WORTHS]
    np.testing.assert_allclose(scores.attributes[:, 0], np.array(equals) / 4 if preset == "rm_r1" else 0, atol=1e-6)


def test_every_schedule_follows_from_the_verdicts(server: RunningServer) -> None:
    pairs = np.array([*combinations(range(5), 2)])
    verdicts = np.array([0.5 + 0.5 * np.sign(WORTHS[i] - WORTHS[j]) for i, j in pairs])
    np.testing.assert_allclose(ask(server, "strengths").rewards, bradley_terry(pairs, verdicts, 5), atol=1e-6)
    circle = ask(server, "circular")
    assert circle.raise_for_failed().rewards[4] == 1.0 and set(circle.rewards.tolist()) <= {0.0, 0.25, 0.5, 0.75, 1.0}
    labels = ["worth 2", "worth 2", "worth 4", "worth 0", "worth 9"]
    np.testing.assert_allclose(ask(server, "reference", labels=labels).rewards, [1, 0, 0.5, 1, 0])
    np.testing.assert_allclose(ask(server, "roles", labels=labels).rewards, [0.8, 0.2, 0.5, 0.8, 0.2], atol=1e-6)
    want = log_odds(np.array([1, 0, 0.5, 1, 0]))
    np.testing.assert_allclose(ask(server, "against", labels=labels).rewards, want, atol=1e-6)
    order = [2, 0, 3, 1, 4]
    mixed = ask(server, "circular", [GROUP[i] for i in order])
    np.testing.assert_allclose(mixed.rewards, circle.rewards[order], atol=1e-6)


def test_criteria_are_components(server: RunningServer) -> None:
    scores = ask(server, "two")
    assert scores.attribute_names == ("right", "brief", "disagreed") and scores.attributes is not None
    np.testing.assert_allclose(scores.attributes[:, 0], wins(1.0), atol=1e-6)
    np.testing.assert_allclose(scores.rewards, wins(1.0), atol=1e-6)  # 2 - 1


def test_a_genrm_reads_roles(server: RunningServer, remote: StandIn) -> None:
    before = [("user", "One?"), ("assistant", "1"), ("user", "Two?")]
    conversations = [[*before, ("assistant", text)] for text in GROUP[:2]]
    said = [[{"role": role, "content": text} for role, text in one] for one in conversations]
    with RewardClient(server.http_url, "principled") as client:
        scores = client.score(messages=said, labels=["Be brief."] * 2).raise_for_failed()
        np.testing.assert_allclose(scores.rewards, [0.8, 0.2], atol=1e-6)
        without = client.score(texts=GROUP[:2], labels=["Be brief."] * 2)
    assert "reads a conversation" in (without.errors[0] or "")
    history = 'as roles: [["user", "One?"], ["assistant", "1"], ["user", "Two?"], '
    asked = [question for question in remote.counts()["asked"] if "Be brief." in question]
    assert len(asked) == 2 and all(question.startswith(history) for question in asked)
    assert all('["principle", "Be brief."], ["response_1", "worth' in question for question in asked)


def test_gyms_compare_asks_it_too(server: RunningServer) -> None:
    said = [{"output": [{"type": "message", "content": [{"type": "output_text", "text": text}]}]} for text in GROUP]
    body = {"model": "genrm", "conversation_history": [{"role": "user", "content": PROMPT}], "response_objs": said}
    told = httpx.post(f"{server.http_url}/compare", json=body).raise_for_status().json()
    np.testing.assert_allclose(told["rewards"], wins(0.8), atol=1e-6)
    assert {one["ranking"] for one in told["comparison_results"]} == {2.0, 3.5, 5.0}


def test_an_unreadable_verdict_fails_its_sample_alone(server: RunningServer, remote: StandIn) -> None:
    broken = ask(server, "brackets", [*GROUP[:3], "<refuse> worth 2"])
    np.testing.assert_allclose(broken.rewards[:3], [0.5, 0.0, 1.0], atol=1e-6)
    assert np.isnan(broken.rewards[3]) and "the judge refused" in (broken.errors[3] or "")
    before = remote.counts()["asked"]
    np.testing.assert_allclose(ask(server, "brackets", GROUP[:3]).rewards, [0.5, 0.0, 1.0], atol=1e-6)
    assert remote.counts()["asked"] == before


def test_a_restart_asks_nothing_again(remote: StandIn, folder: Path) -> None:
    for _ in range(2):
        with served.running(
            judge(
                remote,
                folder,
                "again",
                "rm_r1",
                cache=str(folder / "again"),
                template="again {response_a}|{response_b} <answer>[[A]]",
            )
        ) as one:
            ask(one, "again").raise_for_failed()
    asked = {q: n for q, n in remote.counts()["asked"].items() if q.startswith("again ")}
    assert len(asked) == 20 and {*asked.values()} == {1}
