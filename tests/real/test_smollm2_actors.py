"""Two steps of REINFORCE and of PPO on SmolLM2 with LoRA, the second after a resume, against transformers and torch.

Rewards and values come from a server of this process, over HTTP. The reference computes one sequence at a time: in
float32, and in float64, which says what the true result is. guerdon may be as far from it as plain float32, times
`SLACK`, for it adds up the same numbers in another order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_lora import PlainLora, estimates, leave_one_out
from released import MARKS, QUESTIONS, SMOLLM2
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from guerdon import CriticClient
from guerdon.actor import ppo, reinforce
from guerdon.actor.experience import Experience
from guerdon.actor.policy_group import PolicyGroup
from guerdon.actor.rollouts import Rollout
from guerdon.actor.update import update
from guerdon.assembly import build_service
from guerdon.server.runtime import RunningServer
from guerdon.settings.actors import PPORunConfig, ReinforceRunConfig, get_algorithm
from guerdon.settings.config import CriticConfig, ModelConfig, ServerConfig
from guerdon.settings.fields import from_mapping

pytestmark = MARKS

BETA, LAM, LR = 0.1, 0.95, 1e-3
SLACK = 3.0
ATOL = 2e-4
"""Of a log-prob, a reward and a value: thirty layers of float32's rounding."""


@dataclass
class Step:
    """What one step learnt from, and what the run said of it."""

    experience: Experience
    metrics: dict[str, float]

    @property
    def rollouts(self) -> list[Rollout]:
        return self.experience.rollouts


@pytest.fixture(scope="module")
def server(reward_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    critic = CriticConfig(model=str(reward_model), lora=8, checkpoint_dir=str(tmp_path_factory.mktemp("critic")))
    critic.global_batch_size = 6
    config = ServerConfig(port=0, grpc_port=None, models=[ModelConfig(model=str(reward_model))], critic=critic)
    with RunningServer(build_service(config), config) as running:
        yield running


@pytest.fixture
def settings(server: RunningServer, tmp_path: Path) -> dict[str, Any]:
    """The sections of both runs."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS), encoding="utf-8")
    return {
        "policy": {"model": str(SMOLLM2), "learning_rate": LR, "lora": 8, "max_batch_tokens": 200},
        "data": {"prompts": str(prompts), "template": True, "num_validation": 0},
        "rollouts": {"prompts_per_step": 2, "rollouts_per_prompt": 3, "max_new_tokens": 12},
        "run": {"output_dir": str(tmp_path / "run"), "progress": False},
    }


class Recorder:
    """Makes the updates of a run, notes what they learnt from, and saves the adapters before the first."""

    def __init__(self, patch: pytest.MonkeyPatch, begun: Path) -> None:
        self.steps: list[Step] = []
        self._begun = begun
        for loop in (reinforce, ppo):
            patch.setattr(loop, "update", self._update)

    def _update(self, policy: PolicyGroup, experience: Experience, *asked: Any, **more: Any) -> None:
        if not self._begun.exists():
            self._begun.mkdir()
            policy.trainer.save(self._begun)
        update(policy, experience, *asked, **more)
        metrics = next(argument for argument in asked if isinstance(argument, dict))
        self.steps.append(Step(experience, dict(metrics)))

    def train_twice(self, kind: type, settings: dict[str, Any]) -> list[Step]:
        """The first step; then a run that resumes behind it makes the second."""
        for steps in (1, 2):
            settings["run"]["steps"] = steps
            config = from_mapping(kind, settings)
            loop = reinforce if get_algorithm(config)[0] == "reinforce" else ppo
            assert loop.train(config).step == steps
        assert len(self.steps) == 2
        return self.steps


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorder:
    return Recorder(monkeypatch, tmp_path / "begun")


@torch.no_grad()
def assert_rewards_and_values(folder: Path, step: Step) -> None:
    """Those of a critic are of an untrained one: the same trunk and head, read at every token."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    for rollout in step.rollouts:
        reward = model(input_ids=torch.from_numpy(rollout.completed)[None]).logits.item()
        assert rollout.reward == pytest.approx(reward, abs=ATOL)
        if rollout.values is not None:
            hidden = model.model(input_ids=torch.from_numpy(rollout.tokens)[None]).last_hidden_state[0]
            np.testing.assert_allclose(rollout.values, model.score(hidden)[:, 0].numpy(), atol=ATOL)


def assert_same_logprobs(step: Step, own: list[Tensor], reference: list[Tensor]) -> None:
    """Of the policy before the step, and of SmolLM2 itself."""
    for table, rows in ((step.experience.logprobs, own), (step.experience.ref_logprobs, reference)):
        for got, want in zip(table, rows, strict=True):
            np.testing.assert_allclose(got[: len(want)], want, atol=ATOL)
            assert not got[len(want) :].any()


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return sum((a[name].double() - b[name].double()).square().sum().item() for name in b) ** 0.5


def assert_learnt_alike(steps: list[Step], advantages: list[list[np.ndarray]], tmp_path: Path, epochs: int) -> None:
    """Makes both steps by `epochs` optimiser steps each: the same log-probs, losses, norms and adapters."""
    learnt = [load_file(tmp_path / f"run/checkpoints/step-{i:06d}/policy/adapter_model.safetensors") for i in (1, 2)]
    trained: dict[torch.dtype, list[dict[str, Tensor]]] = {}
    for dtype in (torch.float32, torch.float64):
        plain = PlainLora(tmp_path / "begun", LR, dtype)
        assert plain.adapters.keys() == learnt[0].keys()
        trained[dtype] = [plain.copy_adapters()]
        for i, (step, rows) in enumerate(zip(steps, advantages, strict=True)):
            old = plain.all_logprobs(step.rollouts)
            if dtype == torch.float32:
                assert_same_logprobs(step, old, plain.reference_logprobs(step.rollouts))
            asked = step.rollouts, rows, old if epochs > 1 else None
            losses, norms = np.array([plain.step(*asked) for _ in range(epochs)]).T
            trained[dtype].append(plain.copy_adapters())
            if dtype == torch.float32:
                assert step.metrics["loss"] == pytest.approx(losses.mean(), abs=2e-5)
                assert step.metrics["grad_norm"] == pytest.approx(norms.mean(), rel=1e-4)
                fall = losses[0] - plain.loss(*asked)
                plain.load_adapters(learnt[i])
                assert losses[0] - plain.loss(*asked) == pytest.approx(fall, rel=1e-3) and fall > 0.01
                plain.load_adapters(trained[dtype][-1])
    for i, adapters in enumerate(learnt, 1):
        single, exact = (trained[dtype][i] for dtype in (torch.float32, torch.float64))
        noise = distance(single, exact)
        assert noise < 0.05 * distance(exact, trained[torch.float64][i - 1])
        assert distance(adapters, exact) <= SLACK * noise


def test_reinforce_learns_and_resumes_as_plain_torch(
    settings: dict[str, Any], recorder: Recorder, server: RunningServer, reward_model: Path, tmp_path: Path
) -> None:
    settings["reinforce"] = {"kl_coefficient": BETA, "global_batch_size": 6}
    settings["remote_rm"] = {"reward_model": {"urls": [server.http_url]}}
    steps = recorder.train_twice(ReinforceRunConfig, settings)
    assert_rewards_and_values(reward_model, steps[0])
    assert_learnt_alike(steps, [leave_one_out(step.experience, BETA) for step in steps], tmp_path, epochs=1)


def test_ppo_learns_and_resumes_as_plain_torch(
    settings: dict[str, Any], recorder: Recorder, server: RunningServer, reward_model: Path, tmp_path: Path
) -> None:
    settings["ppo"] = {"kl_coefficient": BETA, "lam": LAM, "global_batch_size": 6, "epochs": 2}
    settings["remote_critic_rm"] = {
        "combine_rm_and_critic_server": False,
        "reward_model": {"urls": [server.http_url]},
        "critic": {"url": server.http_url},
    }
    steps = recorder.train_twice(PPORunConfig, settings)
    assert_rewards_and_values(reward_model, steps[0])
    made = [estimates(step.experience, BETA, LAM) for step in steps]
    assert_learnt_alike(steps, [advantages for advantages, _ in made], tmp_path, epochs=2)

    logged = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for row, step, (_, returns) in zip(logged, steps, made, strict=True):
        # The values before the critic's step are also the previous ones, so that nothing is clipped.
        errors = [
            rollout.values[rollout.prompt_length - 1 : -1] - target
            for rollout, target in zip(step.rollouts, returns, strict=True)
        ]
        assert row["critic_loss"] == pytest.approx(0.5 * np.mean(np.concatenate(errors) ** 2), rel=1e-3)
    with CriticClient(server.http_url) as critic:
        assert critic.state().step == 2
