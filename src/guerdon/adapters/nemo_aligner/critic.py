"""NeMo-Aligner's client of a critic, and of the reward model in its server or in another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from guerdon.adapters.nemo_aligner.futures import RMCriticFuture, RMTrainFuture, SaveFuture
from guerdon.adapters.nemo_aligner.remote import Remote
from guerdon.adapters.nemo_aligner.reward import reward_client
from guerdon.adapters.nemo_aligner.settings import address, policy, setting
from guerdon.client import CriticClient


class RemoteGPTRMCriticClient(Remote):
    """Asks a critic's server for values, has it train and save; and asks it or another one for rewards."""

    def __init__(self, cfg: Any) -> None:
        """Raises ConfigError for a `cfg` that lacks a setting; connects at the first call."""
        critic = setting(cfg, "critic")
        names = {name: setting(critic, f"name.{name}", f"critic_{name}") for name in ("train", "infer", "save")}
        self._critic = CriticClient(setting(critic, "url", None) or address(critic), names, policy=policy(cfg))
        self._reward = None if setting(cfg, "combine_rm_and_critic_server", True) else reward_client(cfg)
        super().__init__(cfg, self._critic, *([self._reward] if self._reward else []))

    def infer_rm_critic(self, rollout_batch: Mapping[str, Any]) -> RMCriticFuture:
        """Sends what `RemoteGPTRMClient.infer_rm` does."""
        samples, width = self._samples(rollout_batch), rollout_batch["response_tokens"].shape[1]
        if self._reward is None:
            return RMCriticFuture(self._critic.submit_with_rewards(**samples), None, width)
        rewards = self._reward.submit(**samples)
        return RMCriticFuture(self._critic.submit(**samples), rewards, width)

    def train(self, ppo_rollout_data: Mapping[str, Any]) -> RMTrainFuture:
        """Has the critic train on `response_tokens` `[N, S]` and `returns`, `values`, `mask` `[N, S-1]`; at once.

        The future's result has the mean loss, `loss_mean`. A failure that nobody looks at is logged, and raised by the
        next call.
        """
        self._wait_once()
        floats = (ppo_rollout_data[name].detach().cpu().float().numpy() for name in ("returns", "values", "mask"))
        tokens = ppo_rollout_data["response_tokens"].cpu().numpy()
        return RMTrainFuture(self._critic.train_loss(tokens, *floats))

    def save(self) -> SaveFuture:
        """Has the critic save itself after what it was given to train on."""
        self._wait_once()
        return SaveFuture(self._critic.submit_save())
