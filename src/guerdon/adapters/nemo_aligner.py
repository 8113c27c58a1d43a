"""NeMo-Aligner's remote clients by their names: for guerdon's servers, and for PyTriton's of the same tensors.

`cfg` is the section `remote_rm` or `remote_critic_rm` of NeMo-Aligner's YAML: a mapping, an omegaconf config, or any
object with these attributes. Each client is for one process: where data-parallel ranks have parts of a rollout, each
asks for its own rewards and values, and one of them trains and saves with what it gathered of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from guerdon.client import CriticClient, RetryPolicy, RewardClient, Scores
from guerdon.client.futures import TrainFuture
from guerdon.client.results import CriticScores
from guerdon.core import CheckpointInfo
from guerdon.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

START_S = 6000.0
"""How long the first call waits for a server that is not up yet, as NeMo-Aligner's does."""
ANSWER_S = 21_600.0
"""How long a call may take, with all its tries; `cfg` may have another `timeout_s`."""


@dataclass(frozen=True, slots=True)
class RMFuture:
    """Rewards under way."""

    scores: Future[Scores]

    def result(self) -> Tensor:
        """Rewards float32 `[B, 1]`; raises SampleFailed where a sample got none, and what the server raised."""
        return _tensor(self.scores.result().raise_for_failed().rewards[:, None])


@dataclass(frozen=True, slots=True)
class RMCriticFuture:
    """Rewards and values under way; `rewards` is None where they come with the values."""

    values: Future[CriticScores]
    rewards: Future[Scores] | None
    seq_length: int

    def result(self) -> tuple[Tensor, Tensor]:
        """Rewards float32 `[B]` and values float32 `[B, S-1]`, 0 beyond a sequence; raises as `RMFuture.result`."""
        scores = self.values.result().raise_for_failed()
        rewards = scores.rewards if self.rewards is None else self.rewards.result().raise_for_failed().rewards
        assert rewards is not None
        values = np.zeros((len(scores), self.seq_length), np.float32)
        for out, row in zip(values, scores.values, strict=True):
            out[: len(row)] = row
        return _tensor(rewards), _tensor(values[:, :-1].copy())


class _Remote:
    """What both clients share: they wait for their servers once, and close them."""

    def __init__(self, cfg: Any, *clients: RewardClient | CriticClient) -> None:
        self.cfg = cfg
        self._clients = clients
        self._is_ready = False

    @property
    def communicator(self) -> _Remote:
        """What NeMo-Aligner's scripts close at their end."""
        return self

    def close(self) -> None:
        """Closes the connections; also done by itself."""
        for client in self._clients:
            client.close()

    def _wait_once(self) -> None:
        """Returns once the servers are up; every call begins with it, and only the first one waits."""
        if not self._is_ready:
            for client in self._clients:
                client.wait_ready(START_S)
            self._is_ready = True

    def _samples(self, rollout_batch: Mapping[str, Any]) -> dict[str, Any]:
        """The rows of `response_tokens` `[B, S]` without their padding, to be sent as `cfg` says."""
        self._wait_once()
        tokens = rollout_batch["response_tokens"].cpu().numpy()
        lengths = rollout_batch["response_lengths"].reshape(-1).cpu().numpy()
        if len(lengths) != len(tokens) or (lengths > tokens.shape[1]).any():
            raise InvalidRequest(
                f"response_lengths are {lengths.tolist()} for response_tokens of shape {list(tokens.shape)}: give the "
                "length of each row, prompt and response"
            )
        rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
        return {"tokens": rows, "pad_to_length": _setting(self.cfg, "pad_to_length", None)}


class RemoteGPTRMClient(_Remote):
    """Asks a reward model's server for the rewards of whole rollouts."""

    def __init__(self, cfg: Any) -> None:
        """Raises ConfigError for a `cfg` that lacks a setting; connects at the first call."""
        self._reward = _reward_client(cfg)
        super().__init__(cfg, self._reward)

    def infer_rm(self, rollout_batch: Mapping[str, Any]) -> RMFuture:
        """Sends `response_tokens` `[B, S]` and `response_lengths` `[B]`, those of prompt and response together."""
        return RMFuture(self._reward.submit(**self._samples(rollout_batch)))


class RemoteGPTRMCriticClient(_Remote):
    """Asks a critic's server for values, has it train and save; and asks it or another one for rewards."""

    def __init__(self, cfg: Any) -> None:
        """Raises ConfigError for a `cfg` that lacks a setting; connects at the first call."""
        critic = _setting(cfg, "critic")
        names = {name: _setting(critic, f"name.{name}", f"critic_{name}") for name in ("train", "infer", "save")}
        self._critic = CriticClient(_setting(critic, "url", None) or _address(critic), names, policy=_policy(cfg))
        self._reward = None if _setting(cfg, "combine_rm_and_critic_server", True) else _reward_client(cfg)
        super().__init__(cfg, self._critic, *([self._reward] if self._reward else []))

    def infer_rm_critic(self, rollout_batch: Mapping[str, Any]) -> RMCriticFuture:
        """Sends what `RemoteGPTRMClient.infer_rm` does."""
        samples, width = self._samples(rollout_batch), rollout_batch["response_tokens"].shape[1]
        if self._reward is None:
            return RMCriticFuture(self._critic.submit_with_rewards(**samples), None, width)
        rewards = self._reward.submit(**samples)
        return RMCriticFuture(self._critic.submit(**samples), rewards, width)

    def train(self, ppo_rollout_data: Mapping[str, Any]) -> TrainFuture[float]:
        """Has the critic train on `response_tokens` `[N, S]` and `returns`, `values`, `mask` `[N, S-1]`; at once.

        The future's result is the mean loss. A failure that nobody looks at is logged, and raised by the next call.
        """
        self._wait_once()
        floats = (ppo_rollout_data[name].detach().cpu().float().numpy() for name in ("returns", "values", "mask"))
        return self._critic.train_loss(ppo_rollout_data["response_tokens"].cpu().numpy(), *floats)

    def save(self) -> Future[CheckpointInfo | None]:
        """Has the critic save itself after what it was given to train on; guerdon's says which checkpoint it is."""
        self._wait_once()
        return self._critic.submit_save()


def _reward_client(cfg: Any) -> RewardClient:
    send = _setting(cfg, "send", "tokens")
    if send != "tokens":
        raise ConfigError(f"send is {send}, and a rollout batch has tokens only", "send tokens, or use a RewardClient")
    model = _setting(cfg, "reward_model")
    return RewardClient(
        list(_setting(model, "urls", None) or ()) or _address(model), _setting(model, "name"), policy=_policy(cfg)
    )


def _address(server: Any) -> str:
    return f"http://{_setting(server, 'ip')}:{_setting(server, 'port')}"


def _policy(cfg: Any) -> RetryPolicy:
    return RetryPolicy(timeout_s=_setting(cfg, "timeout_s", ANSWER_S), tries=1_000_000)


_NEEDED = object()


def _setting(cfg: Any, path: str, default: Any = _NEEDED) -> Any:
    """What stands at the dotted path, in mappings or attributes; `default` where it is missing."""
    for name in path.split("."):
        is_there = name in cfg if isinstance(cfg, Mapping) else hasattr(cfg, name)
        if not is_there:
            if default is _NEEDED:
                raise ConfigError(f"the server's settings have no {path}", "give what NeMo-Aligner's YAML has there")
            return default
        cfg = cfg[name] if isinstance(cfg, Mapping) else getattr(cfg, name)
    return cfg


def _tensor(array: np.ndarray) -> Tensor:
    import torch  # the caller has loaded it: its tensors came in

    return torch.from_numpy(array)
