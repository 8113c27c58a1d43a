"""A critic as an ordinary torch model: padded forwards, a clipped value loss and AdamW, in the policy's process."""

from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification

from guerdon.actor.experience import Experience, to_table
from guerdon.actor.rollouts import Rollout
from guerdon.training.algorithms.losses import clipped_value_loss


class PlainCritic:
    """Gives values and learns returns, as `guerdon serve-critic` with its default settings does."""

    def __init__(self, folder: Path, learning_rate: float) -> None:
        self.model = AutoModelForSequenceClassification.from_pretrained(folder)
        parameters = self.model.parameters()
        self.optimiser = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)

    def values(self, rollouts: list[Rollout]) -> list[torch.Tensor]:
        """Returns float32 `[L]` of each rollout."""
        tokens = to_table([rollout.tokens for rollout in rollouts]).long()
        values = self.model.score(self.model.model(input_ids=tokens).last_hidden_state)[..., 0]
        return [row[: len(rollout.tokens)] for row, rollout in zip(values, rollouts, strict=True)]

    def train(self, experience: Experience, returns: torch.Tensor, updates: int) -> None:
        """Makes so many steps on all rollouts; tokens that the policy did not sample have no part in them."""
        mask, lengths = experience.mask, experience.prompt_lengths
        for _ in range(updates):
            rows = [row[length - 1 : -1] for row, length in zip(self.values(experience.rollouts), lengths, strict=True)]
            values = pad_sequence(rows, batch_first=True)
            loss, _ = clipped_value_loss(values, experience.values, returns, mask, 0.2, mask.sum().item())
            self.optimiser.zero_grad()
            loss.backward()
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimiser.step()
