"""SmolLM2-135M-Instruct as a reward model, a critic and a policy, against transformers, one sequence at a time.

`make real` gets the model; without it these tests are left out. The reward model is its trunk with a random head. The
reference is transformers by its own defaults, in float32: nothing is set so that it agrees.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from guerdon import RewardClient
from guerdon.assembly import build_scorer, build_service
from guerdon.core import Sequence
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.engine import Engine
from guerdon.engine.logprobs import LanguageEngine
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import LanguageModelConfig, ModelConfig, ServerConfig
from processes import environment

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / "out/real/smollm2"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not SMOLLM2.exists(), reason="make real gets SmolLM2-135M-Instruct"),
]

TOLERANCE = 2e-5
"""Largest accepted difference of a reward: thirty layers of float32's rounding; the rewards' deviation is about one."""
QUESTIONS = ["What does a reward model do?", "How do I bake bread at home?", "Say hello in three languages, please."]
WORDS = (ROOT / "docs/engine.md").read_text(encoding="utf-8").split()
LENGTHS = (3, 12, 40, 41, 90, 160, 320, 1)
"""Words of the answers to a question."""


def chats() -> list[list[dict[str, str]]]:
    """Eight answers to each question; each begins elsewhere in a page of real text."""
    return [
        [
            {"role": "user", "content": question},
            {"role": "assistant", "content": " ".join(WORDS[50 * (8 * i + j) :][:length])},
        ]
        for i, question in enumerate(QUESTIONS)
        for j, length in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "reward_model"
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(SMOLLM2, num_labels=1, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(SMOLLM2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows() -> list[np.ndarray]:
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    return [np.array(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)) for chat in chats()]


@pytest.fixture(scope="module")
@torch.no_grad()
def want(reward_model: Path, rows: list[np.ndarray]) -> np.ndarray:
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    return np.array([model(input_ids=torch.from_numpy(row)[None]).logits.item() for row in rows])


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


def test_every_form_scores_as_transformers(server: RunningServer, rows: list[np.ndarray], want: np.ndarray) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats()]
    assert server.grpc_url is not None
    for url in (server.http_url, server.grpc_url):
        with RewardClient(url) as client:
            assert_close(client.score(tokens=rows).rewards, want)
            assert_close(client.score(messages=chats()).rewards, want)
            assert_close(client.score(texts=texts).rewards, want)
            singles = [client.submit(tokens=[row]) for row in rows]
            assert_close([single.result(600).rewards[0] for single in singles], want)
    post = httpx.Client(base_url=server.http_url, timeout=600).post
    classes = post("/classify", json={"input": [row.tolist() for row in rows], "use_activation": False}).json()
    assert_close([one["probs"][0] for one in classes["data"]], want)
    assert_close(post("/get_reward", json={"query": texts, "prompts": texts}).json()["rewards"], want)


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


def test_one_step_of_reinforce_with_lora(tmp_path: Path, server: RunningServer) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS), encoding="utf-8")
    settings = {
        "policy": {"model": str(SMOLLM2), "learning_rate": 1e-4, "lora": 8},
        "data": {"prompts": str(prompts), "template": True, "num_validation": 0},
        "rollouts": {"prompts_per_step": 2, "rollouts_per_prompt": 4, "max_new_tokens": 16},
        "reinforce": {"advantage_estimator": "rloo", "kl_coefficient": 0.1, "global_batch_size": 8},
        "remote_rm": {"reward_model": {"urls": [server.http_url]}, "send": "messages"},
        "run": {"steps": 2, "output_dir": str(tmp_path / "run")},
    }
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(settings), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "guerdon", "reinforce", config], check=True, env=environment())
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 2
    assert all(np.isfinite(row["reward"]) for row in metrics[1:])
