"""A served critic for TRL's GRPOTrainer: it learns from each batch, and gives the advantage of each token.

use_critic(trainer, "http://127.0.0.1:5556", gae=Gae(lam_alpha=0.05), updates=2)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerCallback

from guerdon.adapters import critics
from guerdon.client import CriticClient
from guerdon.critic_core import Gae
from guerdon.errors import GuerdonError, InvalidRequest

MaskedTokens = tuple[np.ndarray, np.ndarray]
"""The tokens of a prompt with its completion, and which of the completion's count."""


def use_critic(
    trainer: Any,
    url: str,
    name: str = "critic",
    *,
    gae: Gae | None = None,
    updates: int = 1,
    whiten: bool = True,
    timeout_s: float = critics.TIMEOUT_S,
) -> None:
    """Gives a GRPOTrainer the critic at `url`; call it before `train`.

    The critic trains `updates` times on each generated batch, and its advantages by `gae` (default: no discount, λ 1)
    replace the group's. With `whiten` they have mean 0 and variance 1 over the batch. A call fails after `timeout_s`.
    Raises InvalidRequest for trainers without advantages of tokens, ConfigError if the trainer saves checkpoints and
    the critic keeps none, or has another tokenizer.
    """
    from trl import GRPOTrainer

    if not isinstance(trainer, GRPOTrainer):
        raise InvalidRequest(f"{type(trainer).__name__} has no advantages of tokens: use a GRPOTrainer")
    saves = trainer.args.save_strategy != "no"
    tokenizer = trainer.processing_class
    critic = critics.connect(url, name, timeout_s, saves=saves, instead="set save_strategy='no'", tokenizer=tokenizer)
    trainer.add_callback(CriticCallback(trainer, critic, gae or Gae(), updates, whiten))


class CriticCallback(TrainerCallback):
    """Replaces a trainer's advantages, and saves and loads the critic with the trainer; made by `use_critic`."""

    def __init__(self, trainer: Any, critic: CriticClient, gae: Gae, updates: int, whiten: bool) -> None:
        self._trainer, self._critic, self._gae, self._updates, self._whiten = trainer, critic, gae, updates, whiten
        self._make_batch, self._calculate_rewards = trainer._generate_and_score_completions, trainer._calculate_rewards
        trainer._generate_and_score_completions = self._make_batch_with_critic
        trainer._calculate_rewards = self._keep_rewards
        self._rewards = torch.empty(0)
        self._last = (-1, 0)
        """The step of the last train request, and how many came before it in that step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Takes the critic back to the checkpoint from which the trainer resumes."""
        if state.global_step > 0 and state.is_world_process_zero:
            critics.load_beside(self._critic, _folder(args, state))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Saves a checkpoint at the server, and its name in the trainer's."""
        if state.is_world_process_zero:
            critics.save_beside(self._critic, _folder(args, state), state.global_step)

    def _keep_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards: torch.Tensor = self._calculate_rewards(*args, **kwargs)  # of all processes
        weighted = (rewards * self._trainer.reward_weights.to(rewards.device)).nansum(dim=1)
        self._rewards = weighted.masked_fill(rewards.isnan().all(dim=1), torch.nan)
        return rewards

    def _make_batch_with_critic(self, inputs: Any) -> dict[str, Any]:
        batch: dict[str, Any] = self._make_batch(inputs)
        kept = counted = batch["completion_mask"]
        if "tool_mask" in batch:
            counted = counted * batch["tool_mask"]
        prompts = critics.rows_where(batch["prompt_mask"], batch["prompt_ids"])
        completions = critics.rows_where(kept, batch["completion_ids"])
        tokens = [np.concatenate(both) for both in zip(prompts, completions, strict=True)]
        found = self._ask([*zip(tokens, critics.rows_where(kept, counted), strict=True)])
        advantages = torch.zeros(kept.shape, device=kept.device)
        advantages[kept.bool()] = torch.from_numpy(np.concatenate(found)).to(kept.device)
        batch["advantages"] = advantages
        return batch

    def _ask(self, samples: list[MaskedTokens]) -> list[np.ndarray]:
        """Returns each completion's advantages; the main process sends one request for all processes."""
        accelerator, size = self._trainer.accelerator, len(samples)
        everyone: list[MaskedTokens] = gather_object(samples)
        answer: list[Any] = [None]
        if accelerator.is_main_process:
            try:
                answer = [self._advantages(everyone, self._rewards.cpu().numpy())]
            except GuerdonError as e:
                answer = [e]
        (found,) = broadcast_object_list(answer)
        if isinstance(found, GuerdonError):
            raise found
        start = accelerator.process_index * size
        return found[start : start + size]

    def _advantages(self, samples: list[MaskedTokens], rewards: np.ndarray) -> list[np.ndarray]:
        is_scored = np.isfinite(rewards)  # what no function scored moves neither the policy nor the critic
        masks = [mask * scored for (_, mask), scored in zip(samples, is_scored, strict=True)]
        if not any(mask.any() for mask in masks):
            return [np.zeros(len(mask), np.float32) for mask in masks]
        tokens = [row for row, _ in samples]
        arguments: dict[str, Any] = {
            "rewards": np.where(is_scored, rewards, 0).tolist(),
            "mask": critics.at_tokens_before(masks, tokens),
            "gae": self._gae,
        }
        is_training = self._trainer.model.training
        if is_training:
            # The id is the same if the trainer makes this step again after a resume.
            args, step = self._trainer.args, self._trainer.state.global_step
            self._last = (step, self._last[1] + 1 if self._last[0] == step else 0)
            train_id = f"{args.run_name or args.output_dir}:{step}.{self._last[1]}"
            report = self._critic.train(tokens, updates=self._updates, train_id=train_id, **arguments).result()
        else:
            report = self._critic.validate(tokens, **arguments)
        metrics = self._trainer._metrics["train" if is_training else "eval"]
        for name in ("loss", "clip_fraction", "explained_variance"):
            metrics[f"critic/{name}"].append(getattr(report, name))
        assert report.advantages is not None
        rows = zip(report.advantages, samples, strict=True)
        found = [row[critics.before_response(len(ids), len(mask))] for row, (ids, mask) in rows]
        return _whitened(found, masks) if self._whiten else found


def _whitened(rows: list[np.ndarray], masks: list[np.ndarray]) -> list[np.ndarray]:
    counted = np.concatenate(rows)[np.concatenate(masks) > 0].astype(np.float64)
    scale = 1 / np.sqrt(counted.var() + 1e-8)
    return [
        np.where(mask > 0, (row - counted.mean()) * scale, 0).astype(np.float32)
        for row, mask in zip(rows, masks, strict=True)
    ]


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
