"""NeMo-RL's ppo_train with a served critic: the values, returns and updates are plain torch's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import served
import zoo
from guerdon import CriticClient
from guerdon.critic_core import TrainRequest
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import CriticConfig
from trainers import environments
from trainers.driving import drive
from training.plain import PlainCritic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EPOCHS, SIZE, GAMMA, LAMBDA = 2, 2, 0.9, 0.8


def rollouts(seed: int) -> list[dict[str, Any]]:
    """Two of one turn, one with an observation between two turns, and one that does not count."""
    random = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, count).tolist()

    made = []
    for turns in ([9, 5], [4, 11], [7, 3, 4, 6], [5, 5]):
        roles = ["user", "assistant", "environment", "assistant"]
        messages = [[role, ids(count)] for role, count in zip(roles, turns, strict=False)]
        made.append({"messages": messages, "reward": float(random.normal()), "counts": turns != [5, 5]})
    return made


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    model = str(served.reward_model(tmp_path / "rm"))
    config = CriticConfig(model=model, checkpoint_dir=str(tmp_path / "critic"), global_batch_size=SIZE)
    with served.running(critic=config) as running:
        yield running


def by_hand(rollouts: list[dict[str, Any]], plain: PlainCritic) -> list[dict[str, np.ndarray]]:
    """Each rollout's tokens, and its values, returns and mask at the tokens themselves, as NeMo-RL has them."""
    rows = []
    for rollout in rollouts:
        tokens = np.array([token for _, ids in rollout["messages"] for token in ids])
        acts = [float(role == "assistant") for role, ids in rollout["messages"] for _ in ids]
        with torch.no_grad():
            values = np.concatenate([[0.0], plain.values(tokens)[:-1].numpy()])
        returns, next_value, advantage, reward = np.zeros(len(tokens)), 0.0, 0.0, rollout["reward"]
        for t in reversed(range(len(tokens))):
            if acts[t]:
                advantage = reward + GAMMA * next_value - values[t] + GAMMA * LAMBDA * advantage
                returns[t], next_value, reward = advantage + values[t], values[t], 0.0
        rows.append({"tokens": tokens, "values": values, "returns": returns, "mask": np.array(acts)})
    return rows


def learn(rows: list[dict[str, np.ndarray]], counts: list[bool], plain: PlainCritic) -> None:
    width = max(len(row["tokens"]) for row in rows)
    table = {name: np.stack([np.pad(row[name], (0, width - len(row[name]))) for row in rows]) for name in rows[0]}
    returns, values, mask = (table[name][:, 1:].astype(np.float32) for name in ("returns", "values", "mask"))
    request = TrainRequest("", table["tokens"], returns, values, mask * np.array(counts, np.float32)[:, None])
    for _ in range(EPOCHS):
        plain.train(request, SIZE)


def test_ppo_train_with_a_served_critic(server: RunningServer, tmp_path: Path) -> None:
    steps = [rollouts(seed) for seed in range(3)]
    checkout, checkpoints = str(environments.source_of("nemo_rl")), str(tmp_path / "nemo_rl")
    arguments = (checkout, server.http_url, "SAMPLES", checkpoints)
    found = drive("nemo_rl", "drive_nemo_rl_critic.py", *arguments, samples=steps, tmp=tmp_path)
    plain = PlainCritic(tmp_path / "rm", lr=9e-6)
    for step, data in zip(steps, found, strict=True):
        rows, counts = by_hand(step, plain), [rollout["counts"] for rollout in step]
        assert data["input_lengths"] == [len(row["tokens"]) for row in rows]
        for i, row in enumerate(rows):
            length = len(row["tokens"])
            np.testing.assert_allclose(data["values"][i][:length], row["values"], rtol=1e-5, atol=1e-5)
            assert not np.any(data["values"][i][length:])
            if counts[i]:
                acts = row["mask"] == 1
                np.testing.assert_allclose(
                    np.array(data["returns"][i])[:length][acts], row["returns"][acts], rtol=1e-5, atol=1e-5
                )
        learn(rows, counts, plain)
        metrics = data["metrics"]
        assert metrics["critic/global_valid_toks"] == sum(row["mask"].sum() for row in rows[:3])
        assert metrics["critic/loss"] > 0 and metrics["critic/explained_var"] < 1
    probes = zoo.rows()
    with CriticClient(server.http_url) as client:
        ends = client.infer(tokens=probes).values
        for probe, values in zip(probes, ends, strict=True):
            np.testing.assert_allclose(values, plain.values(probe).detach(), rtol=1e-5, atol=1e-5)

        # The trainer's last step was lost: it resumes from the second's checkpoint, and the critic with it.
        again = drive("nemo_rl", "drive_nemo_rl_critic.py", *arguments, "2", samples=steps, tmp=tmp_path)
        assert again == found[2:]
        assert all(np.array_equal(a, b) for a, b in zip(ends, client.infer(tokens=probes).values, strict=True))
        assert client.state().step == 3 * EPOCHS * len(steps[0]) / SIZE
