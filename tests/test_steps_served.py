"""A sample without a step is the caller's mistake under every protocol, and its neighbours keep their rewards."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

import zoo
from guerdon import RewardClient
from guerdon.errors import InvalidRequest
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig
from served import Serve
from server.form_examples import EXAMPLES

WITH, WITHOUT = "ab\nxyz\n", "ab xyz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(zoo.checkpoint("qwen2", tmp_path_factory.mktemp("steps"), "tokcls", num_labels=2))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> RunningServer:
    bare = zoo.checkpoint("qwen2", tmp_path_factory.mktemp("bare"), "tokcls", num_labels=2)
    models = [
        ModelConfig(model=str(folder), step_separator="\n", name="prm"),
        ModelConfig(model=str(bare), name="bare"),
    ]
    return serve(*models, grpc_port=0)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_every_form_says_so(example: Any, server: RunningServer) -> None:
    with httpx.Client(base_url=server.http_url, timeout=120) as client:
        example.scored(example.ask(client, WITH))
        assert "no step to reward: prm gives" in example.refused(example.ask(client, WITHOUT), InvalidRequest)


def test_the_steps_of_a_text_without_any_are_refused(server: RunningServer) -> None:
    body = {"input": [WITHOUT], "task": "token_classify"}
    told = httpx.post(server.http_url + "/pooling", json=body)
    assert told.status_code == 400 and "send step_positions" in told.text


@pytest.mark.parametrize("transport", ["http_url", "grpc_url"])
def test_the_others_of_a_request_keep_their_rewards(transport: str, server: RunningServer, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (WITH, WITHOUT)]
    whole = len(rows[0])
    samples: list[dict[str, Any]] = [
        {"texts": [WITH, WITHOUT]},
        {"tokens": rows},
        {"tokens": [rows[0], rows[0]], "prompt_lengths": [0, whole]},  # its separators are the prompt's
        {"tokens": [rows[0], rows[0]], "steps": [[2, whole - 1], []]},
    ]
    with RewardClient(getattr(server, transport), model="prm") as client:
        for sample in samples:
            scores = client.score(**sample)
            assert np.isfinite(scores.rewards[0]) and scores.errors[0] is None
            assert np.isnan(scores.rewards[1]) and "no step to reward" in str(scores.errors[1]), sample


@pytest.mark.parametrize("way", ["texts", "/score", "/predict", "/reward", "/get_reward", "/rerank"])
def test_a_separator_in_the_prompt_ends_no_step_of_the_response(way: str, server: RunningServer, folder: Path) -> None:
    """The reference is the response's steps by their positions."""
    tokenizer, prompt, response = AutoTokenizer.from_pretrained(folder), "ab\nxyz\n", "q\nr\n"
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, response))
    (end,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert before.count(end) == 2 and after.count(end) == 2
    ends = [len(before) + i for i, token in enumerate(after) if token == end]
    with RewardClient(server.http_url, model="prm") as client:
        want = client.score(tokens=[before + after], steps=[ends]).rewards[0]
        assert want != client.score(tokens=[before + after]).rewards[0]
        scores = client.score(texts=[prompt + response, prompt + "ab"], prompts=[prompt] * 2)
    if way == "texts":
        assert scores.rewards[0] == pytest.approx(want, rel=1e-5)
        assert np.isnan(scores.rewards[1]) and "no step to reward" in str(scores.errors[1])
        return

    def ask(said: str) -> httpx.Response:
        body = {
            "/score": {"model": "prm", "text_1": prompt, "text_2": [said]},
            "/predict": {"inputs": [[prompt, said]], "raw_scores": True},
            "/reward": {"prompt": prompt, "response": said},
            "/get_reward": {"query": [prompt + said], "prompts": [prompt]},
            "/rerank": {"model": "prm", "query": prompt, "documents": [said]},
        }[way]
        return httpx.post(f"{server.http_url}{way}?model=prm", json=body, timeout=120)

    told = ask(response).json()
    got = {
        "/score": lambda: told["data"][0]["score"],
        "/predict": lambda: told[0][0]["score"],
        "/reward": lambda: told,
        "/get_reward": lambda: told["rewards"][0],
        "/rerank": lambda: told["results"][0]["relevance_score"],
    }[way]()
    assert got == pytest.approx(want, rel=1e-5)
    assert 400 <= ask("ab").status_code < 500


def test_a_model_without_a_tokenizer_asks_for_positions(server: RunningServer) -> None:
    with RewardClient(server.http_url, model="bare") as client:
        assert "has no tokenizer, so send step_positions" in str(client.score(tokens=[[5, 6, 7]]).errors[0])
        assert client.score(tokens=[[5, 6, 7]], steps=[[2]]).errors == [None]


def test_a_client_without_positions_gets_a_row_for_each_token(server: RunningServer) -> None:
    """Where no token is known to end a step; vLLM's form has no way to name positions."""
    rows = [[5, 6, 7, 8, 9], [11], [12, 13, 14]]
    body = {"model": "bare", "input": rows, "task": "token_classify"}
    told = httpx.post(f"{server.http_url}/pooling", json=body).json()
    bare = next(Path(m["root"]) for m in httpx.get(f"{server.http_url}/v1/models").json()["data"] if m["id"] == "bare")
    for one, want in zip(told["data"], zoo.reference_tokens(bare, [np.array(row) for row in rows]), strict=True):
        wrong_and_right = np.exp(want) / np.exp(want).sum(-1, keepdims=True)
        np.testing.assert_allclose(np.array(one["data"]), wrong_and_right, atol=1e-5)
