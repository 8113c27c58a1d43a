"""A server as NeMo Gym's resources server: rollouts get the scores of their conversations."""

from typing import Any

import httpx
import numpy as np
import pytest

import judged
import served
import zoo
from guerdon.client import RewardClient
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ComponentConfig, JudgeConfig, ModelConfig, RewardConfig
from served import Serve

ANSWERS = ["the answer is 4", "four, or 4, or 4", ""]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> RunningServer:
    folder = tmp_path_factory.mktemp("gym")
    judge = zoo.tokenizer(zoo.language_model("llama", folder / "judge"))
    models: list[Any] = [
        ModelConfig(model=str(served.reward_model(folder / "rm")), name="helpful", deterministic=True),
        ModelConfig(model="rewarding:words", name="words"),
        JudgeConfig(model=str(judge), name="judge", rubric=judged.write(folder), max_other_mass=1.0),
        JudgeConfig(model=str(judge), name="strict", rubric=judged.write(folder), max_other_mass=1e-6),
    ]
    total = RewardConfig(name="total", components=[ComponentConfig("helpful"), ComponentConfig("words", weight=0.5)])
    return serve(*models, rewards=[total])


def row(answer: str, **more: Any) -> dict[str, Any]:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": answer}]}
    return {"responses_create_params": {"input": "What is 2+2?"}, "response": {"output": [message]}, **more}


def verify(server: RunningServer, value: dict[str, Any], query: str = "") -> dict[str, Any]:
    answer = httpx.post(f"{server.http_url}/verify{query}", json=value)
    assert answer.status_code == 200, answer.text
    assert "guerdon-weights-version" in answer.headers
    told: dict[str, Any] = answer.json()
    return told


def test_rollouts_are_scored_as_conversations(server: RunningServer) -> None:
    conversations = [
        [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": answer}] for answer in ANSWERS
    ]
    for model, query in (("total", ""), ("judge", "?model=judge")):
        with RewardClient(server.http_url, model) as client:
            want = client.score(messages=conversations, labels=["4"] * len(ANSWERS)).raise_for_failed()
        for i, answer in enumerate(ANSWERS):
            value = row(answer, expected_answer="4", _ng_task_index=i)
            told = verify(server, value, query)
            assert told.items() >= value.items() and told["mask_sample"] is False
            assert told["reward"] == pytest.approx(want.rewards[i], rel=1e-6)
            assert want.attributes is not None
            assert [*told["components"]] == [*want.attribute_names]
            np.testing.assert_allclose([*told["components"].values()], want.attributes[i], rtol=1e-6)
            assert sum(told["reward_components"].values()) == pytest.approx(told["reward"], rel=1e-5)
    assert [*told["reward_components"]] == [*judged.CRITERIA]
    assert verify(server, row("4 4", expected_answer="4", model="words"))["reward"] == 2


def test_a_failed_sample_is_masked(server: RunningServer) -> None:
    told = verify(server, row("4"))
    assert (told["reward"], told["mask_sample"], told["failure_kind"]) == (0, True, "InvalidRequest")
    assert told["failure_reason"].startswith("words: ") and "label" in told["failure_reason"]
    told = verify(server, row("4"), "?model=strict")
    assert told["mask_sample"] and told["failure_kind"] == "NoVerdict" and "no labels" in told["failure_reason"]
    told = verify(server, {**row("4"), "response": {"output": []}})
    assert told["mask_sample"] and "nothing to score" in told["failure_reason"]


def test_a_request_that_nobody_can_answer_is_refused(server: RunningServer) -> None:
    answer = httpx.post(f"{server.http_url}/verify?model=nobody", json=row("4"))
    assert answer.status_code == 400 and answer.headers["guerdon-error"] == "UnknownModel"
    answer = httpx.post(f"{server.http_url}/verify", json={"response": {"output": []}})
    assert answer.status_code == 400 and "the body has no 'responses_create_params'" in answer.json()["error"]


def test_the_paths_beside_it_ask_no_model(server: RunningServer) -> None:
    with httpx.Client(base_url=server.http_url) as client:
        seeded = client.post("/seed_session", json=row("4"))
        assert (seeded.status_code, seeded.json()) == (200, {})
        assert client.get("/reverify_mode").json() == "stateless"
        rollouts = [verify(server, row(answer, expected_answer="4")) for answer in ANSWERS] + [verify(server, row("4"))]
        told = client.post("/aggregate_metrics", json={"verify_responses": rollouts}).json()
        assert told["agent_metrics"]["num_failed_rollouts"] == 1
        assert told["key_metrics"]["mean/reward"] == pytest.approx(np.mean([one["reward"] for one in rollouts[:3]]))
        assert client.post("/aggregate_metrics", json={}).status_code == 400
        assert client.get("/verify").status_code == 405
