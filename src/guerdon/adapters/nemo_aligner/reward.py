"""NeMo-Aligner's client of a reward model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from guerdon.adapters.nemo_aligner.futures import RMFuture
from guerdon.adapters.nemo_aligner.remote import Remote
from guerdon.adapters.nemo_aligner.settings import address, policy, setting
from guerdon.client import RewardClient
from guerdon.errors import ConfigError


class RemoteGPTRMClient(Remote):
    """Asks a reward model's server for the rewards of whole rollouts."""

    def __init__(self, cfg: Any) -> None:
        """Raises ConfigError for a `cfg` that lacks a setting; connects at the first call."""
        self._reward = reward_client(cfg)
        super().__init__(cfg, self._reward)

    def infer_rm(self, rollout_batch: Mapping[str, Any]) -> RMFuture:
        """Sends `response_tokens` `[B, S]` and `response_lengths` `[B]`, those of prompt and response together."""
        return RMFuture(self._reward.submit(**self._samples(rollout_batch)))


def reward_client(cfg: Any) -> RewardClient:
    """The client of the reward model that `cfg` names; raises ConfigError where a setting is missing."""
    send = setting(cfg, "send", "tokens")
    if send != "tokens":
        raise ConfigError(f"send is {send}, and a rollout batch has tokens only", "send tokens, or use a RewardClient")
    model = setting(cfg, "reward_model")
    urls = list(setting(model, "urls", None) or ())
    return RewardClient(urls or address(model), setting(model, "name"), policy=policy(cfg))
