"""The critic that PPO trains, and the reward model beside it or on a server of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Self

import numpy as np

from guerdon.actor.remote_rewards import (
    START_S,
    Pending,
    RemoteRewards,
    addressed,
    explained,
    fail,
    fitting,
    groups_of,
    token_samples_of,
    tokenizer_of,
)
from guerdon.actor.rollouts import Ending, Rollout
from guerdon.client import CriticClient, CriticScores, RetryPolicy
from guerdon.client.ordering import TrainFuture
from guerdon.critic_core import CheckpointInfo, CriticState, TrainReport
from guerdon.errors import ConfigError, GuerdonError
from guerdon.settings.actors import CriticNames, RemoteCriticConfig
from guerdon.vocabulary import difference, identity


class RemoteCritic:
    """A critic on a server: rewards and values of each group, and training, in the order of the calls.

    Values that are asked for after a `train` are those of the trained weights. Failures and a server's absence are as
    for RemoteRewards: a sample without a value is one without a reward.
    """

    def __init__(self, config: RemoteCriticConfig) -> None:
        """Raises ConfigError where a reward model beside the critic is to get anything but its tokens."""
        if config.combine_rm_and_critic_server and config.send != "tokens":
            raise ConfigError(
                f"`send` is {config.send}, but the critic's server rewards the tokens that it values",
                "send tokens, or set combine_rm_and_critic_server to false and serve the reward model by itself",
            )
        server = config.critic
        self._config = config
        self._url = server.address
        with addressed("critic.url, ip or port"):
            self._client = CriticClient(self._url, _name(server.name), policy=RetryPolicy.patient(config.timeout_s))
        self._rewards = None if config.combine_rm_and_critic_server else RemoteRewards(config)
        self._pending: Pending[CriticScores] = Pending()

    def wait_ready(self, limit_s: float = math.inf) -> None:
        """Waits for the servers, at most so long; raises StartError where they do not come, or give no rewards."""
        what = f"critic '{self._config.critic.name.infer}' at {self._url}"
        with explained(what, "start it with `guerdon serve-critic`, or correct its ip, port and name in the settings"):
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
        """Raises ConfigError if the policy's token ids mean other tokens to the critic, or to the reward model."""
        other = tokenizer_of(self._client, "critic")
        if other and (why := difference(identity(tokenizer), other)) is not None:
            raise ConfigError(
                f"the critic's tokenizer differs from the policy's ({why}), and it gets the policy's token ids",
                "start the critic from a model with the policy's tokenizer",
            )
        if self._rewards is not None:
            self._rewards.check_tokenizer(tokenizer, ending)

    def remember_in(self, memory: dict[str, Any]) -> None:
        """As RemoteRewards does; of a reward model beside the critic the server does not name the weights."""
        if self._rewards is not None:
            self._rewards.remember_in(memory)

    def submit(self, group: list[Rollout]) -> None:
        """Sends the responses to one prompt, and returns at once."""
        config, ask = self._config, self._client.submit_with_rewards
        if self._rewards is not None:
            self._rewards.submit(group)
            ask = self._client.submit
        if not (group := fitting(group, config.pad_to_length)):
            return
        samples = token_samples_of(group, config.pad_to_length)
        self._pending.add(group, ask(**samples, timeout_s=config.timeout_s))

    def collect(self, heed: Callable[[], None] = lambda: None) -> None:
        """Waits for all that was submitted, and sets each rollout's `reward` and `values`, or its `error`.

        Meanwhile `heed` is called now and then; what it raises ends the waiting and is raised.
        """
        if self._rewards is not None:
            self._rewards.collect(heed)
        for group, scores in self._pending.answers(heed):
            if isinstance(scores, GuerdonError):
                fail(group, scores)
                continue
            for i, rollout in enumerate(group):
                rollout.values = _fitted(scores.values[i], len(rollout.tokens))
                if scores.rewards is not None:
                    rollout.reward = float(scores.rewards[i])
                if (error := scores.errors[i]) is not None:
                    rollout.reward, rollout.error = None, error

    def score(self, rollouts: list[Rollout], heed: Callable[[], None] = lambda: None) -> None:
        """Gets the rewards of rollouts of several groups."""
        if self._rewards is not None:
            self._rewards.score(rollouts, heed)
            return
        for group in groups_of(rollouts):
            self.submit(group)
        self.collect(heed)

    def train(self, train_id: str, rollouts: list[Rollout], returns: list[np.ndarray]) -> TrainFuture[TrainReport]:
        """A future of what the critic learnt from these rollouts, at once; `returns[i]` are float32 `[L - P]`.

        The same `train_id` again trains nothing twice. Values behind the last action, and of the prompt, are masked.
        """
        targets, masks = [], []
        for rollout, row in zip(rollouts, returns, strict=True):
            first = rollout.prompt_length - 1  # the state that the first action leaves
            target, mask = np.zeros((2, len(rollout.tokens) - 1), np.float32)
            target[first:], mask[first:] = row, 1.0
            targets.append(target)
            masks.append(mask)
        tokens = [rollout.tokens for rollout in rollouts]
        return self._client.train(tokens, targets, [_values(r)[:-1] for r in rollouts], masks, train_id=train_id)

    def submit_save(self, metrics: dict[str, float] | None = None) -> Future[CheckpointInfo | None]:
        """A future of which checkpoint was saved of everything asked before, at once."""
        return self._client.submit_save(metrics)

    def load(self, checkpoint: str | None = None) -> CheckpointInfo | None:
        """Goes back to the checkpoint of that name; what was learnt after it may be learnt again."""
        return self._client.load(checkpoint)

    def state(self) -> CriticState:
        """What the critic is, and which checkpoints it has."""
        return self._client.state()

    def reconnect(self, timeout_s: float) -> None:
        """Gives up what is under way; from now on a call has so long with all its tries."""
        self._pending = Pending()
        self._client.reconnect(timeout_s)

    def close(self) -> None:
        """Closes the connections; what is under way is given up."""
        self._client.close()
        if self._rewards is not None:
            self._rewards.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _name(names: CriticNames) -> str | Mapping[str, str]:
    """The name of which the critic's models have theirs, or where they have none in common these names themselves."""
    name = names.infer.removesuffix("_infer")
    if (names.infer, names.train, names.save) == (f"{name}_infer", f"{name}_train", f"{name}_save"):
        return name
    return {"infer": names.infer, "train": names.train, "save": names.save}


def _fitted(values: np.ndarray, length: int) -> np.ndarray:
    """Returns the values of a rollout's own tokens: what was sent may have another ending, behind the last action."""
    return np.pad(values[:length], (0, max(0, length - len(values))))


def _values(rollout: Rollout) -> np.ndarray:
    assert rollout.values is not None, "only rollouts that the critic has valued are learnt from"
    return rollout.values
