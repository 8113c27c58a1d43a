"""A policy as a run builds one, and the same in plain padded transformers and torch, which never touches guerdon."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import zoo
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.settings.actors import PolicyConfig
from guerdon.training.policy_trainer import PolicyTrainer

LR = 1e-3
"""Large enough that a step is seen in every weight."""
GROUPS = ((40, 4), (20, 3), (3, 2))
"""Two prompts with several responses, and two rows that share nothing worth sharing."""


def build(folder: Path, *, keeps_reference: bool = True, **settings: Any) -> PolicyTrainer:
    """A trainer whose micro-batches cut a batch of these rows, with a step that is seen."""
    config = PolicyConfig(**{"model": str(folder), "learning_rate": LR, "max_batch_tokens": 150, **settings})
    return PolicyTrainer(load_policy(config), config, keeps_reference=keeps_reference)


def rollouts(seed: int = 0) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Rows, their prompts' lengths, and their groups; the last row is the first one's twin."""
    rows = zoo.rows(seed, GROUPS, least=2)
    del rows[-2]
    groups = np.repeat(np.arange(len(GROUPS)), [count for _, count in GROUPS])
    groups = np.append(groups, 0)
    return rows, np.array([GROUPS[group][0] for group in groups]), groups


def weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """A copy of all parameters, the frozen ones too."""
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def caught_gradients(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """Will hold the gradients of the trainer's next step, by parameter."""
    caught: dict[str, torch.Tensor] = {}
    optimiser = trainer._optimiser
    norm = optimiser.gradient_norm

    def gradient_norm() -> float:
        caught.update(
            {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trainer._trained.items()}
        )
        return norm()

    optimiser.gradient_norm = gradient_norm  # type: ignore[method-assign]
    return caught


class PlainPolicy:
    """transformers' model on one right-padded batch, with its full table of logits."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        self.dtype = dtype

    def logprobs(
        self, rows: list[np.ndarray], prompt_lengths: np.ndarray, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probs, entropies and the mask of the responses, all `[B,S-1]`, entry t about the token t + 1."""
        width = max(map(len, rows))
        tokens = torch.full((len(rows), width), zoo.PAD)
        attention, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width - 1)
        for i, (row, start) in enumerate(zip(rows, prompt_lengths, strict=True)):
            tokens[i, : len(row)] = torch.from_numpy(row)
            attention[i, : len(row)] = 1
            mask[i, start - 1 : len(row) - 1] = 1
        logits = self.model(input_ids=tokens, attention_mask=attention, use_cache=False).logits[:, :-1]
        table = torch.log_softmax(logits.to(self.dtype) / temperature, -1)
        chosen = table.gather(2, tokens[:, 1:, None])[..., 0]
        return chosen, -(table.exp() * table).sum(-1), mask.to(self.dtype)

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the gradient of every parameter."""
        self.model.zero_grad()
        loss.backward()
        named = dict(self.model.named_parameters())
        return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named.items()}


def at_responses(table: torch.Tensor, rows: list[np.ndarray], prompt_lengths: np.ndarray) -> torch.Tensor:
    """The part of `[B,S-1]` that is about responses, `[B,R]` with 0 beyond each."""
    width = max(len(row) - start for row, start in zip(rows, prompt_lengths, strict=True))
    made = torch.zeros(len(rows), width, dtype=table.dtype)
    for i, (row, start) in enumerate(zip(rows, prompt_lengths, strict=True)):
        made[i, : len(row) - start] = table[i, start - 1 : len(row) - 1]
    return made
