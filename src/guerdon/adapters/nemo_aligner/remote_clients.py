"""NeMo-Aligner's clients of a reward model and of a critic, from the same sections of its YAML."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from guerdon.client import CriticClient, CriticScores, RetryPolicy, RewardClient, Scores
from guerdon.client.ordering import TrainFuture
from guerdon.critic_core import CheckpointInfo
from guerdon.errors import ConfigError
from guerdon.padded_rows import read_rows

if TYPE_CHECKING:
    from torch import Tensor

START_S = 6000.0
"""The first call waits this long for a server that has not started, as NeMo-Aligner's does."""
ANSWER_S = 21_600.0
"""The time limit of a call with all its tries, unless `cfg` has a `timeout_s`."""

_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class RMFuture:
    """The rewards of a request under way."""

    scores: Future[Scores]

    def result(self) -> Tensor:
        """Returns rewards float32 `[B, 1]`; raises SampleFailed if a sample got none, and what the server raised."""
        return _tensor(self.scores.result().raise_for_failed().rewards[:, None])


@dataclass(frozen=True, slots=True)
class RMCriticFuture:
    """The rewards and values of requests under way; `rewards` is None if they come with the values."""

    values: Future[CriticScores]
    rewards: Future[Scores] | None
    seq_length: int

    def result(self) -> tuple[Tensor, Tensor]:
        """Returns rewards float32 `[B]` and values float32 `[B, S-1]`, 0 after a sequence; raises as `RMFuture`."""
        scores = self.values.result().raise_for_failed()
        rewards = scores.rewards if self.rewards is None else self.rewards.result().raise_for_failed().rewards
        assert rewards is not None
        values = np.zeros((len(scores), self.seq_length), np.float32)
        for out, row in zip(values, scores.values, strict=True):
            out[: len(row)] = row
        return _tensor(rewards), _tensor(values[:, :-1].copy())


@dataclass(frozen=True, slots=True)
class RMTrainFuture:
    """A train request under way."""

    loss: TrainFuture[float]

    def result(self, timeout: float | None = None) -> dict[str, np.ndarray]:
        """Returns `critic_train`'s answer, `loss_mean` float32 `[1]`; raises the request's error."""
        return {"loss_mean": np.array([self.loss.result(timeout)], np.float32)}

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the request's error, None if it succeeded."""
        return self.loss.exception(timeout)

    def done(self) -> bool:
        """Returns whether the request has finished."""
        return self.loss.done()


@dataclass(frozen=True, slots=True)
class SaveFuture:
    """A save under way."""

    saved: Future[CheckpointInfo | None]

    def result(self, timeout: float | None = None) -> None:
        """Returns when the critic is saved; raises the save's error."""
        self.saved.result(timeout)


class Remote:
    """The base of both clients: waits for its servers once, sends rollouts, and closes."""

    def __init__(self, cfg: Any, *clients: RewardClient | CriticClient) -> None:
        self.cfg = cfg
        self._clients = clients
        self._is_ready = False

    @property
    def communicator(self) -> Remote:
        """Returns itself, which NeMo-Aligner's scripts close at their end."""
        return self

    def close(self) -> None:
        """Closes the connections; happens by itself otherwise."""
        for client in self._clients:
            client.close()

    def _wait_once(self) -> None:
        """Waits for the servers at the first call."""
        if not self._is_ready:
            for client in self._clients:
                client.wait_ready(START_S)
            self._is_ready = True

    def _samples(self, rollout_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the client's arguments: the rows of `response_tokens` `[B, S]` without padding."""
        self._wait_once()
        tokens, lengths = read_rows(rollout_batch["response_tokens"], rollout_batch["response_lengths"])
        rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
        return {"tokens": rows, "pad_to_length": read_setting(self.cfg, "pad_to_length", None)}


class RemoteGPTRMClient(Remote):
    """Asks a reward model's server for the rewards of whole rollouts."""

    def __init__(self, cfg: Any) -> None:
        """Raises ConfigError for a `cfg` that lacks a setting; connects at the first call."""
        self._reward = make_reward_client(cfg)
        super().__init__(cfg, self._reward)

    def infer_rm(self, rollout_batch: Mapping[str, Any]) -> RMFuture:
        """Sends `response_tokens` `[B, S]` and `response_lengths` `[B]`, those of prompt and response together."""
        return RMFuture(self._reward.submit(**self._samples(rollout_batch)))


class RemoteGPTRMCriticClient(Remote):
    """Client of a critic's server (values, training, saving), and of the same or another server for rewards."""

    def __init__(self, cfg: Any) -> None:
        """Raises ConfigError for a `cfg` that lacks a setting; connects at the first call."""
        critic = read_setting(cfg, "critic")
        names = {name: read_setting(critic, f"name.{name}", f"critic_{name}") for name in ("train", "infer", "save")}
        self._critic = CriticClient(
            read_setting(critic, "url", None) or read_url(critic), names, policy=read_policy(cfg)
        )
        self._reward = None if read_setting(cfg, "combine_rm_and_critic_server", True) else make_reward_client(cfg)
        super().__init__(cfg, self._critic, *([self._reward] if self._reward else []))

    def infer_rm_critic(self, rollout_batch: Mapping[str, Any]) -> RMCriticFuture:
        """Sends what `RemoteGPTRMClient.infer_rm` sends."""
        samples, width = self._samples(rollout_batch), rollout_batch["response_tokens"].shape[1]
        if self._reward is None:
            return RMCriticFuture(self._critic.submit_with_rewards(**samples), None, width)
        rewards = self._reward.submit(**samples)
        return RMCriticFuture(self._critic.submit(**samples), rewards, width)

    def train(self, ppo_rollout_data: Mapping[str, Any]) -> RMTrainFuture:
        """Trains on `response_tokens` `[N, S]` and `returns`, `values`, `mask` `[N, S-1]`; returns a future at once.

        Its result has the mean loss, `loss_mean`. An unread failure is logged, and raised by the next call.
        """
        self._wait_once()
        floats = (ppo_rollout_data[name].detach().cpu().float().numpy() for name in ("returns", "values", "mask"))
        tokens = ppo_rollout_data["response_tokens"].cpu().numpy()
        return RMTrainFuture(self._critic.train_loss(tokens, *floats))

    def save(self) -> SaveFuture:
        """Returns a future of saving the critic after the train requests before."""
        self._wait_once()
        return SaveFuture(self._critic.submit_save())


def make_reward_client(cfg: Any) -> RewardClient:
    """Returns a client of the reward model that `cfg` names; raises ConfigError if a setting is missing."""
    send = read_setting(cfg, "send", "tokens")
    if send != "tokens":
        raise ConfigError(f"send is {send}, and a rollout batch has tokens only", "send tokens, or use a RewardClient")
    model = read_setting(cfg, "reward_model")
    urls = list(read_setting(model, "urls", None) or ())
    return RewardClient(urls or read_url(model), read_setting(model, "name"), policy=read_policy(cfg))


def read_setting(cfg: Any, path: str, default: Any = _REQUIRED) -> Any:
    """Returns the setting at a dotted path of keys or attributes, or `default`; raises ConfigError without either."""
    for name in path.split("."):
        is_there = name in cfg if isinstance(cfg, Mapping) else hasattr(cfg, name)
        if not is_there:
            if default is _REQUIRED:
                raise ConfigError(f"cfg has no {path}", "give what NeMo-Aligner's YAML has there")
            return default
        cfg = cfg[name] if isinstance(cfg, Mapping) else getattr(cfg, name)
    return cfg


def read_url(server: Any) -> str:
    """Returns the URL of a server with an `ip` and a `port`."""
    return f"http://{read_setting(server, 'ip')}:{read_setting(server, 'port')}"


def read_policy(cfg: Any) -> RetryPolicy:
    """Returns a policy that retries until `timeout_s` is over."""
    return RetryPolicy.patient(read_setting(cfg, "timeout_s", ANSWER_S))


def _tensor(array: np.ndarray) -> Tensor:
    import torch  # loaded by the caller, which sent tensors

    return torch.from_numpy(array)
