"""The critic that PPO trains on its server, with the reward model beside it or on another server."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Self

import numpy as np

from guerdon.actor.remote_rewards import (
    START_S,
    PendingGroups,
    RemoteRewards,
    drop_too_long,
    groups_of,
    raise_config_error,
    raise_start_error,
    token_samples_of,
    tokenizer_of,
)
from guerdon.actor.rollouts import Rollout
from guerdon.client import CriticClient, CriticScores, RetryPolicy
from guerdon.client.ordering import TrainFuture
from guerdon.critic_core import CheckpointInfo, CriticState, TrainReport
from guerdon.endings import Ending
from guerdon.errors import ConfigError
from guerdon.settings.actors import CriticNames, RemoteCriticConfig
from guerdon.vocabulary import difference, identity


class RemoteCritic:
    """A critic on a server: rewards and values of each group, and training, in the order of the calls.

    Values requested after a `train` are those of the trained weights. Errors and a server that is away are handled as
    by RemoteRewards: a sample without values counts as one without a reward.
    """

    def __init__(self, config: RemoteCriticConfig) -> None:
        """Raises ConfigError if a reward model beside the critic would get anything but its tokens."""
        if config.combine_rm_and_critic_server and config.send != "tokens":
            raise ConfigError(
                f"`send` is {config.send}, but the critic's server rewards and values the same tokens",
                "send tokens, or set combine_rm_and_critic_server to false and serve the reward model by itself",
            )
        server = config.critic
        self._config = config
        self._url = server.address
        with raise_config_error("critic.url, ip or port"):
            self._client = CriticClient(
                self._url, _model_names(server.name), policy=RetryPolicy.patient(config.timeout_s)
            )
        self._rewards = None if config.combine_rm_and_critic_server else RemoteRewards(config)
        self._pending: PendingGroups[CriticScores] = PendingGroups()

    def wait_ready(self, limit_s: float = math.inf) -> None:
        """Waits for the servers; raises StartError if they do not come in time, or give no rewards."""
        what = f"critic '{self._config.critic.name.infer}' at {self._url}"
        with raise_start_error(
            what, "start it with `guerdon serve-critic`, or correct its ip, port and name in the settings"
        ):
            self._client.wait_ready(min(START_S, self._config.timeout_s, limit_s))
            outputs = self._client.info().outputs
        if self._rewards is not None:
            self._rewards.wait_ready(limit_s)
        elif "rewards" not in outputs:
            raise ConfigError(
                f"{what} gives no rewards",
                "start it with --reward-model, or set combine_rm_and_critic_server to false and name a reward_model",
            )

    def check_tokenizer(self, tokenizer: Any, ending: Ending | None) -> None:
        """Raises ConfigError if the critic or the reward model has another tokenizer than the policy."""
        other = tokenizer_of(self._client, "critic")
        if other and (why := difference(identity(tokenizer), other)) is not None:
            raise ConfigError(
                f"the critic's tokenizer differs from the policy's ({why}), which are sent to it",
                "start the critic from a model with the policy's tokenizer",
            )
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
        self._pending.add(group, ask(**samples, timeout_s=config.timeout_s))

    def collect(self, check: Callable[[], None] = lambda: None) -> None:
        """Waits for everything submitted, and sets each rollout's `reward` and `values`, or its `error`.

        Calls `check` regularly while waiting; its exceptions end the wait.
        """
        if self._rewards is not None:
            self._rewards.collect(check)
        for group, scores in self._pending.results(check):
            for i, rollout in enumerate(group):
                rollout.values = _cut_or_pad(scores.values[i], len(rollout.tokens))
                if scores.rewards is not None:
                    rollout.reward = float(scores.rewards[i])
                if (error := scores.errors[i]) is not None:
                    rollout.reward, rollout.error = None, error

    def score(self, rollouts: list[Rollout], check: Callable[[], None] = lambda: None) -> None:
        """Sets the rewards of rollouts of several groups."""
        if self._rewards is not None:
            self._rewards.score(rollouts, check)
            return
        for group in groups_of(rollouts):
            self.submit(group)
        self.collect(check)

    def train(
        self, train_id: str, rollouts: list[Rollout], returns: list[np.ndarray], *, updates: int = 1
    ) -> TrainFuture[TrainReport]:
        """Sends a train request; returns a future of its report. `returns[i]` are float32 `[L - P]`.

        All rollouts are trained on `updates` times. Idempotent: the same `train_id` is trained once. The
        values of the prompt, of what an environment wrote, and behind the last action are masked.
        """
        targets, masks = [], []
        for rollout, row in zip(rollouts, returns, strict=True):
            first = rollout.prompt_length - 1  # the state before the first action
            target, mask = np.zeros((2, len(rollout.tokens) - 1), np.float32)
            target[first:], mask[first:] = row, rollout.mask
            targets.append(target)
            masks.append(mask)
        tokens = [rollout.tokens for rollout in rollouts]
        values = [_values_of(rollout)[:-1] for rollout in rollouts]
        return self._client.train(tokens, targets, values, masks, train_id=train_id, updates=updates)

    def submit_save(self, metrics: dict[str, float] | None = None) -> Future[CheckpointInfo | None]:
        """Returns a future of the checkpoint, saved after everything sent before."""
        return self._client.submit_save(metrics)

    def load(self, checkpoint: str | None = None) -> CheckpointInfo | None:
        """Goes back to the checkpoint of that name; what was learnt after it may be learnt again."""
        return self._client.load(checkpoint)

    def state(self) -> CriticState:
        """Returns the critic's state and its checkpoints."""
        return self._client.state()

    def reconnect(self, timeout_s: float) -> None:
        """Abandons requests in progress, and limits every later call, retries included, to `timeout_s`."""
        self._pending = PendingGroups()
        self._client.reconnect(timeout_s)

    def close(self) -> None:
        """Closes the connections, and abandons requests in progress."""
        self._client.close()
        if self._rewards is not None:
            self._rewards.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _model_names(names: CriticNames) -> str | Mapping[str, str]:
    """Returns the common stem of the models' names, or the names themselves if there is none."""
    name = names.infer.removesuffix("_infer")
    if (names.infer, names.train, names.save) == (f"{name}_infer", f"{name}_train", f"{name}_save"):
        return name
    return {"infer": names.infer, "train": names.train, "save": names.save}


def _cut_or_pad(values: np.ndarray, length: int) -> np.ndarray:
    """Returns the values of a rollout's own tokens: the request may have had another ending behind the last action."""
    return np.pad(values[:length], (0, max(0, length - len(values))))


def _values_of(rollout: Rollout) -> np.ndarray:
    assert rollout.values is not None, "PPO learns only from rollouts with values"
    return rollout.values
