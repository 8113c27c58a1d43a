"""SmolLM2-135M-Instruct as a reward model, a critic and a policy, against transformers, one sequence at a time.

`make real` gets the model; without it these tests are left out. The reward model is its trunk with a random head. The
reference is transformers by its own defaults, in float32: nothing is set so that it agrees.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from released import MARKS, SMOLLM2, chats
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from guerdon import RewardClient
from guerdon.actor.prompts import Prompts
from guerdon.actor.remote_rewards import RemoteRewards
from guerdon.actor.rollouts import Rollout
from guerdon.assembly import build_scorer, build_service
from guerdon.core import Sequence
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.engine import Engine
from guerdon.engine.logprobs import LanguageEngine
from guerdon.server.runtime import RunningServer
from guerdon.settings.actors import DataConfig, RemoteRewardConfig, RewardServer
from guerdon.settings.config import LanguageModelConfig, ModelConfig, ServerConfig
from server.form_examples import EXAMPLES, Example

pytestmark = MARKS

TOLERANCE = 2e-5
"""Largest accepted difference of a reward: thirty layers of float32's rounding; the rewards' deviation is about one."""
LENGTHS = (3, 12, 40, 41, 90, 160, 320, 1)
"""Words of the answers to a question."""


@pytest.fixture(scope="module")
def rows() -> list[np.ndarray]:
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    return [np.array(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)) for chat in chats(LENGTHS)]


def rewards_of(reward_model: Path, rows: list[np.ndarray]) -> np.ndarray:
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    with torch.no_grad():
        return np.array([model(input_ids=torch.from_numpy(row)[None]).logits.item() for row in rows])


@pytest.fixture(scope="module")
def want(reward_model: Path, rows: list[np.ndarray]) -> np.ndarray:
    return rewards_of(reward_model, rows)


@pytest.fixture(scope="module")
def want_after_a(reward_model: Path, rows: list[np.ndarray]) -> np.ndarray:
    """Forms of two texts, which are tokenised apart, get the first character as the first: here a token of its own."""
    first = AutoTokenizer.from_pretrained(SMOLLM2)("A", add_special_tokens=False).input_ids
    return rewards_of(reward_model, [np.array([*first, *row]) for row in rows[::5]])


@pytest.fixture(scope="module")
def server(reward_model: Path) -> Iterator[RunningServer]:
    config = ServerConfig(port=0, grpc_port=0, models=[ModelConfig(model=str(reward_model), name="reward_model")])
    with RunningServer(build_service(config), config) as running:
        yield running


def assert_close(got: object, want: np.ndarray) -> None:
    assert want.std() > 0.1
    assert np.abs(np.asarray(got, dtype=float) - want).max() <= TOLERANCE * max(1, np.abs(want).max())


@pytest.mark.parametrize("path", ["packed+shared", "packed", "padded", "single"])
@pytest.mark.parametrize("budget", [4096, 500])
def test_every_path_scores_as_transformers(
    path: str, budget: int, reward_model: Path, rows: list[np.ndarray], want: np.ndarray
) -> None:
    engine = build_scorer(ModelConfig(model=str(reward_model), max_batch_tokens=budget))
    assert isinstance(engine, Engine) and engine.path == "packed+shared", engine.info.why
    engine.path = path
    engine.use(path)
    assert_close([score.reward for score in engine.score([Sequence(row) for row in rows])], want)  # type: ignore[union-attr]


def test_tokens_messages_and_texts_score_as_transformers(
    server: RunningServer, rows: list[np.ndarray], want: np.ndarray
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats(LENGTHS)]
    assert server.grpc_url is not None
    for url in (server.http_url, server.grpc_url):
        with RewardClient(url) as client:
            assert_close(client.score(tokens=rows).rewards, want)
            assert_close(client.score(messages=chats(LENGTHS)).rewards, want)
            assert_close(client.score(texts=texts).rewards, want)
            singles = [client.submit(tokens=[row]) for row in rows]
            assert_close([single.result(600).rewards[0] for single in singles], want)
    body = {"input": [row.tolist() for row in rows], "use_activation": False}
    classes = httpx.post(f"{server.http_url}/classify", json=body, timeout=600).json()
    assert_close([one["probs"][0] for one in classes["data"]], want)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_every_form_scores_as_transformers(example: Example, server: RunningServer, want_after_a: np.ndarray) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    texts = ["A" + tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats(LENGTHS)[::5]]
    with httpx.Client(base_url=server.http_url, timeout=600) as client:
        assert_close([example.scored(example.ask(client, text)) for text in texts], want_after_a)


@pytest.mark.parametrize("send", ["tokens", "text", "messages"])
def test_an_actors_answers_have_the_rewards_of_whole_conversations(
    send: str, server: RunningServer, want: np.ndarray, tmp_path: Path
) -> None:
    """Answers that EOS ended and truncated ones; the policy's own tokens have no line break behind the EOS."""
    path, tokenizer = tmp_path / "prompts.jsonl", AutoTokenizer.from_pretrained(SMOLLM2)
    path.write_text("".join(json.dumps({"prompt": chat[:1]}) + "\n" for chat in chats(LENGTHS)), encoding="utf-8")
    data = DataConfig(prompts=str(path), num_validation=0)
    read = Prompts(data, tokenizer, prompts_per_step=1, max_prompt_length=None, seed=0, output_dir=tmp_path)
    rollouts, eos = [], tokenizer.eos_token_id
    for i, (prompt, chat) in enumerate(zip(read.training, chats(LENGTHS), strict=True)):
        has_eos = i % 2 == 0
        answer = tokenizer(chat[1]["content"], add_special_tokens=False).input_ids + [eos] * has_eos
        rollouts.append(Rollout.of(prompt, i, 0, answer, [0.0] * len(answer), has_eos, tokenizer, [eos]))
    with RemoteRewards(RemoteRewardConfig(RewardServer(urls=[server.http_url]), send=send)) as rewards:
        rewards.score(rollouts)
    assert [rollout.error for rollout in rollouts] == [None] * len(rollouts)
    assert_close([rollout.reward for rollout in rollouts], want)


@torch.no_grad()
def test_log_probs_are_those_of_transformers(rows: list[np.ndarray]) -> None:
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    engine = LanguageEngine(load_policy(LanguageModelConfig(model=str(SMOLLM2))))
    starts = np.array([len(row) // 3 for row in rows])
    found: dict[int, np.ndarray] = {}
    for members, logprobs, _ in engine.logprobs(rows, starts):
        found |= {int(i): some.numpy() for i, some in zip(members, logprobs, strict=True)}
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        logits = model(input_ids=torch.from_numpy(row)[None]).logits[0]
        every = torch.log_softmax(logits, -1)[:-1].gather(1, torch.from_numpy(row)[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(found[i][: len(row) - start], every[start - 1 :], atol=2e-4)


@torch.no_grad()
def test_values_are_those_of_transformers(tmp_path: Path, rows: list[np.ndarray]) -> None:
    torch.manual_seed(1)
    model = AutoModelForTokenClassification.from_pretrained(SMOLLM2, num_labels=1, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    engine = build_scorer(ModelConfig(model=str(tmp_path), max_batch_tokens=1000))
    scores = engine.score([Sequence(row) for row in rows])
    for row, score in zip(rows, scores, strict=True):
        values = model(input_ids=torch.from_numpy(row)[None]).logits[0, :, 0].numpy()
        assert_close(score.values[: len(row)], values)  # type: ignore[union-attr, index]
