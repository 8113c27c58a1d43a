"""OpenRLHF's reward function, loaded from a user's file and called as OpenRLHF does."""

import asyncio
import importlib.util
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import served
from guerdon import RewardClient
from guerdon.adapters.openrlhf import reward_function
from guerdon.errors import InvalidRequest, SampleFailed
from guerdon.server.runtime import RunningServer

QUERIES = ["Q: one? 1</s>", "Q: two? 2</s>", "Q: two? 4</s>"]
PROMPTS = ["Q: one?", "Q: two?", "Q: two?"]

FILE = """
from guerdon.adapters.openrlhf import reward_function

reward_func = reward_function("URL", "total")
"""


@pytest.fixture(scope="module")
def url(sums: RunningServer) -> str:
    return sums.http_url


def loaded(path: Path, url: str) -> Any:
    """The `reward_func` of a user's file."""
    path.write_text(FILE.replace("URL", url))
    spec = importlib.util.spec_from_file_location("reward_func", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward_func


async def test_each_rollout_gets_its_reward_and_its_components(tmp_path: Path, url: str) -> None:
    function = loaded(tmp_path / "my_reward.py", url)
    labels: list[Any] = ["1", 2, {"answer": 4}]
    told = await asyncio.gather(
        *(
            asyncio.to_thread(function, QUERIES[i : i + 1], PROMPTS[i : i + 1], labels[i : i + 1])
            for i in range(len(QUERIES))
        )
    )
    with RewardClient(url, "total") as client:
        scores = client.score(texts=QUERIES, prompts=PROMPTS, labels=labels)
    assert [answer["rewards"] for answer in told] == [[reward] for reward in scores]
    assert [answer["scores"] for answer in told] == [[reward] for reward in scores]
    assert [answer["extra_logs"]["agreement"] for answer in told] == [[1.0], [1.0], [0.0]]
    helpful = [answer["extra_logs"]["helpful"][0] for answer in told]
    np.testing.assert_allclose(np.array(helpful) + np.array([0.5, 0.5, 0.0]), scores.rewards, rtol=1e-6)
    assert function(QUERIES, PROMPTS, labels)["rewards"] == list(scores)  # older ones send batches


def test_only_a_sum_has_components(url: str) -> None:
    assert reward_function(url, "flaky")(["12"], ["1"], [None]) == {"rewards": [2.0], "scores": [2.0], "extra_logs": {}}


def test_errors_are_logged_because_openrlhf_swallows_them(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SampleFailed):
        reward_function(url, "flaky")(["12", served.FAILS], ["1", "2"], [None, None])
    own = [record.levelno for record in caplog.records if record.name == "guerdon.adapters.openrlhf"]
    assert own == [logging.ERROR]
    assert "no reward: 1 of 2 samples failed; row 1: the function returned nan" in caplog.text


def test_lists_that_are_empty(url: str) -> None:
    function = reward_function(url, "flaky")
    assert function([], [], []) == {"rewards": [], "scores": [], "extra_logs": {}}
    assert function(["12"], [], [])["rewards"] == [2.0]


def test_a_request_that_cannot_be_encoded_raises_and_is_logged(url: str, caplog: pytest.LogCaptureFixture) -> None:
    for queries, prompts in ((["a"], ["\ud800"]), (["\ud800"], ["a"])):
        caplog.clear()
        with pytest.raises(InvalidRequest, match=r"(texts|prompts)\[0\] cannot be written as UTF-8"):
            reward_function(url, "total")(queries, prompts, [None])
        assert "no reward: " in caplog.text
