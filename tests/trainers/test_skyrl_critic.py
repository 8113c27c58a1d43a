"""SkyRL's RayPPOTrainer with a served critic: the values, returns and updates are plain torch's."""

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

PASSES, SIZE, GAMMA, LAMBDA = 2, 3, 0.9, 0.8


def rollouts(seed: int) -> dict[str, Any]:
    """Three prompts with responses, of which one has a tool's tokens inside."""
    random = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, count).tolist()

    lengths = [5, 11, 8]
    return {
        "prompts": [ids(count) for count in (9, 4, 7)],
        "responses": [ids(count) for count in lengths],
        "rewards": [random.normal(size=count).tolist() for count in lengths],
        "masks": [[1] * 5, [1] * 11, [1, 1, 0, 0, 0, 1, 1, 1]],
    }


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    model = str(served.reward_model(tmp_path / "rm"))
    config = CriticConfig(model=model, checkpoint_dir=str(tmp_path / "critic"), global_batch_size=SIZE)
    with served.running(critic=config) as running:
        yield running


def test_the_trainer_with_a_served_critic(server: RunningServer, tmp_path: Path) -> None:
    steps = [rollouts(seed) for seed in range(3)]
    checkout = str(environments.source_of("skyrl"))
    arguments = (checkout, server.http_url, "SAMPLES", str(tmp_path / "skyrl"))
    found = drive("skyrl", "drive_skyrl_critic.py", *arguments, samples=steps, tmp=tmp_path)
    plain = PlainCritic(tmp_path / "rm", lr=9e-6)
    for step, data in zip(steps, found, strict=True):
        rows = [prompt + response for prompt, response in zip(step["prompts"], step["responses"], strict=True)]
        width = max(map(len, rows))
        tokens = np.stack([np.pad(np.array(row), (0, width - len(row))) for row in rows])
        tables = {name: np.zeros((len(rows), width - 1), np.float32) for name in ("returns", "prev_values", "mask")}
        losses = []
        for i, (row, counts) in enumerate(zip(rows, step["masks"], strict=True)):
            before = range(len(row) - len(counts) - 1, len(row) - 1)
            with torch.no_grad():
                values = plain.values(np.array(row)).numpy()
            returns, next_value, advantage = np.zeros(len(row)), 0.0, 0.0
            for t, reward in zip(reversed(before), reversed(step["rewards"][i]), strict=True):
                advantage = reward + GAMMA * next_value - values[t] + GAMMA * LAMBDA * advantage
                returns[t], next_value = advantage + values[t], values[t]
            for name, numbers in (("values", values), ("returns", returns)):
                np.testing.assert_allclose(
                    data[name][i][-len(counts) :], numbers[list(before)], rtol=1e-5, atol=1e-5, err_msg=name
                )
            for t, counted in zip(before, counts, strict=True):
                tables["returns"][i, t], tables["prev_values"][i, t] = returns[t], values[t]
                tables["mask"][i, t] = counted / sum(counts)
            errors = [(values[t] - returns[t]) ** 2 for t, counted in zip(before, counts, strict=True) if counted]
            losses.append(0.5 * np.mean(errors))
        assert data["metrics"]["critic/critic_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        for _ in range(PASSES):
            plain.train(TrainRequest("", tokens, **tables), SIZE)
    probes = zoo.rows()
    with CriticClient(server.http_url) as client:
        ends = client.infer(tokens=probes).values
        for probe, values in zip(probes, ends, strict=True):
            np.testing.assert_allclose(values, plain.values(probe).detach(), rtol=1e-5, atol=1e-5)

        # The third step is lost with the trainer, which resumes from the second's checkpoint.
        folder = tmp_path / "skyrl"
        (folder / "latest_ckpt_global_step.txt").write_text("2")
        (folder / "global_step_3").rename(tmp_path / "lost")
        again = drive("skyrl", "drive_skyrl_critic.py", *arguments, "2", samples=steps, tmp=tmp_path)
        assert again == found[2:]
        assert all(np.array_equal(a, b) for a, b in zip(ends, client.infer(tokens=probes).values, strict=True))
        assert client.state().step == 3 * PASSES
