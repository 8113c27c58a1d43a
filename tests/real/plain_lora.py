"""SmolLM2 with adapters in plain transformers, peft and torch, one sequence at a time, and PPO's sums in loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from released import SMOLLM2
from torch import Tensor
from transformers import AutoModelForCausalLM

from guerdon.actor.experience import Experience
from guerdon.actor.rollouts import Rollout

BETAS, EPS, WEIGHT_DECAY, LARGEST_NORM = (0.9, 0.98), 1e-8, 0.01, 1.0
"""guerdon's defaults."""
CLIP = 0.2


class PlainLora:
    """The policy with the adapters in `folder`, and an optimiser that has made no step; `dtype` is that of all."""

    def __init__(self, folder: Path, learning_rate: float, dtype: torch.dtype = torch.float32) -> None:
        model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=dtype)
        self.model = PeftModel.from_pretrained(model, folder, is_trainable=True).to(dtype).eval()
        named = dict(self.model.named_parameters())
        self.adapters = {n.replace(".default.", "."): p for n, p in named.items() if p.requires_grad}
        self.optimiser = torch.optim.AdamW(
            self.adapters.values(), lr=learning_rate, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
        )

    def copy_adapters(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.adapters.items()}

    def load_adapters(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.adapters.items():
                parameter.copy_(tensors[name])

    def logprobs(self, rollout: Rollout) -> Tensor:
        """The log-probs of the response's tokens, with their graph."""
        row = torch.from_numpy(rollout.tokens)
        logits = self.model(input_ids=row[None], use_cache=False).logits[0, rollout.prompt_length - 1 : -1]
        return torch.log_softmax(logits, -1).gather(1, row[rollout.prompt_length :, None])[:, 0]

    def all_logprobs(self, rollouts: list[Rollout]) -> list[Tensor]:
        with torch.no_grad():
            return [self.logprobs(rollout) for rollout in rollouts]

    def reference_logprobs(self, rollouts: list[Rollout]) -> list[Tensor]:
        """Those of SmolLM2 itself."""
        with self.model.disable_adapter():
            return self.all_logprobs(rollouts)

    def loss(
        self, rollouts: list[Rollout], advantages: list[np.ndarray], old: list[Tensor] | None, learn: bool = False
    ) -> float:
        """The mean of all tokens' losses: REINFORCE's, with `old` log-probs PPO's; with `learn` its gradient, too."""
        count, total = sum(rollout.response_length for rollout in rollouts), 0.0
        for i, (rollout, row) in enumerate(zip(rollouts, advantages, strict=True)):
            with torch.set_grad_enabled(learn):
                own = self.logprobs(rollout)
                advantage = torch.from_numpy(row).to(own.dtype)
                terms = -own * advantage
                if old is not None:
                    ratio = torch.exp(own - old[i])
                    terms = torch.maximum(-ratio * advantage, -ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
                loss = terms.sum() / count
            if learn:
                loss.backward()
            total += loss.item()
        return total

    def step(
        self, rollouts: list[Rollout], advantages: list[np.ndarray], old: list[Tensor] | None
    ) -> tuple[float, float]:
        """One optimiser step on all rollouts; returns the loss and the gradient's norm before it."""
        self.optimiser.zero_grad()
        loss = self.loss(rollouts, advantages, old, learn=True)
        norm = torch.nn.utils.clip_grad_norm_(self.adapters.values(), LARGEST_NORM).item()
        self.optimiser.step()
        return loss, norm


def leave_one_out(experience: Experience, beta: float) -> list[np.ndarray]:
    """RLOO's advantage of every token: the reward less the KL, less the mean of the others' to the same prompt."""
    rewards = [r.reward - beta * kl.sum().item() for r, kl in zip(experience.rollouts, experience.kl, strict=True)]
    made = []
    for i, rollout in enumerate(experience.rollouts):
        others = [rewards[j] for j, other in enumerate(experience.rollouts) if other.group == rollout.group and j != i]
        made.append(np.full(rollout.response_length, rewards[i] - np.mean(others)))
    return made


def estimates(experience: Experience, beta: float, lam: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """PPO's whitened advantages of every token, without a discount, and the returns that the critic learns."""
    advantages, returns = [], []
    for rollout, kl in zip(experience.rollouts, experience.kl, strict=True):
        count, first = rollout.response_length, rollout.prompt_length - 1
        rewards = -beta * kl[:count].double().numpy()
        rewards[-1] += rollout.reward
        values = np.append(rollout.values[first : first + count].astype(float), 0.0)
        row = np.zeros(count + 1)
        for t in reversed(range(count)):
            row[t] = rewards[t] + values[t + 1] - values[t] + lam * row[t + 1]
        advantages.append(row[:-1])
        returns.append(row[:-1] + values[:-1])
    every = np.concatenate(advantages)
    return [(row - every.mean()) / np.sqrt(every.var() + 1e-8) for row in advantages], returns
