"""The critic that PPO trains on its server, with the reward model beside it or on another server."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from guerdon.actor.remote_rewards import RemoteModel, RemoteRewards, drop_too_long, raise_config_error, token_samples_of
from guerdon.actor.rollouts import Rollout
from guerdon.client import CriticClient, CriticScores, RetryPolicy
from guerdon.client.ordering import TrainFuture
from guerdon.critic_core import CheckpointInfo, CriticState, TrainReport
from guerdon.endings import Ending
from guerdon.errors import ConfigError
from guerdon.settings.actors import RemoteCriticConfig


class RemoteCritic(RemoteModel[CriticClient, CriticScores]):
    """A critic on a server: rewards and values of each group, and training, in the order of the calls.

    Values requested after a `train` come from the trained weights. A sample without values counts as one without a
    reward.
    """

    def __init__(self, config: RemoteCriticConfig) -> None:
        """Raises ConfigError if a reward model beside the critic would get anything but its tokens."""
        if config.combine_rm_and_critic_server and config.send != "tokens":
            raise ConfigError(
                f"`send` is {config.send}, but the critic's server rewards and values the same tokens",
                "send tokens, or set combine_rm_and_critic_server to false and serve the reward model by itself",
            )
        self._config = config
        names = config.critic.name
        stem, given = names.infer.removesuffix("_infer"), {n: getattr(names, n) for n in ("infer", "train", "save")}
        has_stem = all(name == f"{stem}_{operation}" for operation, name in given.items())
        policy = RetryPolicy.patient(config.timeout_s)
        with raise_config_error("critic.url, ip or port"):
            client = CriticClient(config.critic.address, stem if has_stem else given, policy=policy)
        self._rewards = None if config.combine_rm_and_critic_server else RemoteRewards(config)
        super().__init__(client, "critic", config.timeout_s)

    def wait_ready(self, limit_s: float = math.inf) -> None:
        """Waits for the servers; raises StartError if they do not come in time, or give no rewards."""
        what = f"critic '{self._config.critic.name.infer}' at {self._config.critic.address}"
        remedy = "start it with `guerdon serve-critic`, or correct its ip, port and name in the settings"
        outputs = self._await_server(what, remedy, limit_s).outputs
        if self._rewards is not None:
            self._rewards.wait_ready(limit_s)
        elif "rewards" not in outputs:
            raise ConfigError(
                f"{what} gives no rewards",
                "start it with --reward-model, or set combine_rm_and_critic_server to false and name a reward_model",
            )

    def check_tokenizer(self, tokenizer: Any, ending: Ending | None) -> None:
        """Raises ConfigError if the critic or the reward model has another tokenizer than the policy."""
        remedy = "start the critic from a model with the policy's tokenizer"
        self._refuse_other_tokenizer(tokenizer, "whose token ids are sent to it", remedy)
        if self._rewards is not None:
            self._rewards.check_tokenizer(tokenizer, ending)

    def remember_in(self, memory: dict[str, Any]) -> None:
        """As RemoteRewards does; the server does not report the weights of a reward model beside the critic."""
        if self._rewards is not None:
            self._rewards.remember_in(memory)

    def submit(self, group: list[Rollout]) -> None:
        """Sends the responses to one prompt; returns at once."""
        config, ask = self._config, self._client.submit_with_rewards
        if self._rewards is not None:
            self._rewards.submit(group)
            ask = self._client.submit
        if not (group := drop_too_long(group, config.pad_to_length)):
            return
        samples = token_samples_of(group, config.pad_to_length)
        self._pending.append((group, ask(**samples, timeout_s=config.timeout_s)))

    def collect(self, check: Callable[[], None] = lambda: None) -> None:
        """Waits for everything submitted, and sets each rollout's `reward` and `values`, or its `error`."""
        if self._rewards is not None:
            self._rewards.collect(check)
        for group, scores in self._results(check):
            for i, rollout in enumerate(group):
                # The request may have had another ending behind the last action.
                values, length = scores.values[i], len(rollout.tokens)
                rollout.values = np.pad(values[:length], (0, max(0, length - len(values))))
                if scores.rewards is not None:
                    rollout.reward = float(scores.rewards[i])
                if (error := scores.errors[i]) is not None:
                    rollout.reward, rollout.error = None, error

    def score(self, rollouts: list[Rollout], check: Callable[[], None] = lambda: None) -> None:
        """Sets the rewards of rollouts of several groups."""
        if self._rewards is not None:
            self._rewards.score(rollouts, check)
        else:
            super().score(rollouts, check)

    def train(
        self, train_id: str, rollouts: list[Rollout], returns: list[np.ndarray], *, updates: int = 1
    ) -> TrainFuture[TrainReport]:
        """Sends a train request; returns a future of its report. `returns[i]` are float32 `[L - P]`.

        All rollouts are trained on `updates` times. Idempotent: the same `train_id` is trained once. Masks the values
        of the prompt, of environment tokens, and after the last action.
        """
        targets, masks, values = [], [], []
        for rollout, row in zip(rollouts, returns, strict=True):
            assert rollout.values is not None, "PPO learns only from rollouts with values"
            first = rollout.prompt_length - 1  # the state before the first action
            target, mask = np.zeros((2, len(rollout.tokens) - 1), np.float32)
            target[first:], mask[first:] = row, rollout.mask
            targets.append(target)
            masks.append(mask)
            values.append(rollout.values[:-1])
        tokens = [rollout.tokens for rollout in rollouts]
        return self._client.train(tokens, targets, values, masks, train_id=train_id, updates=updates)

    def submit_save(self, metrics: dict[str, float] | None = None) -> Future[CheckpointInfo | None]:
        """Returns a future of the checkpoint, saved after everything sent before."""
        return self._client.submit_save(metrics)

    def load(self, checkpoint: str | None = None) -> CheckpointInfo | None:
        """Returns to the checkpoint of that name; later updates may be repeated."""
        return self._client.load(checkpoint)

    def state(self) -> CriticState:
        """Returns the critic's state and its checkpoints."""
        return self._client.state()

    def reconnect(self, timeout_s: float) -> None:
        """Abandons requests in progress, and limits every later call, retries included, to `timeout_s`."""
        self._pending = []
        self._client.reconnect(timeout_s)

    def close(self) -> None:
        """Closes the connections, and abandons requests in progress."""
        super().close()
        if self._rewards is not None:
            self._rewards.close()
