"""A reward model beside the critic: one request is answered by both."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from guerdon.core import ModelInfo, Score, Sequence
from guerdon.critic_core import TrainReport, TrainRequest
from guerdon.distributed import frames
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.engine import Engine
from guerdon.errors import (
    ConfigError,
    GuerdonError,
    RanksLost,
    SampleFailed,
    ServerFault,
    TrainFailed,
    describe,
    first_line,
)
from guerdon.training import collectives
from guerdon.training.critic_trainer import CriticTrainer

log = logging.getLogger(__name__)
T = TypeVar("T")

PROBE = "Is 1 + 1 = 2? Yes, naïvely.\n"


class CriticWithReward:
    """A critic that learns and a reward model that does not: values come from the one, rewards from the other.

    With `resident` memory both trunks are on the device. With `swap` one of them is, and the other waits in host
    memory; a request first runs the one on the device, so that it costs one swap. The optimiser's state stays on the
    device: the reward model must leave room for it anyway while the critic trains.

    On each rank both models score the same part of the sequences. The reward model is never sharded by FSDP, so that a
    rank without a sequence to reward need not run it. Ranks that share one sharded model swap together or not at all,
    because a forward or a save needs all shards in the same place.
    """

    takes_all = False

    def __init__(
        self,
        critic: CriticTrainer,
        load_reward: Callable[[], Any],
        memory: Literal["resident", "swap"] = "resident",
        ranks: Ranks = ALONE,
    ) -> None:
        """Loads the reward model, with `swap` in the critic's place; raises ConfigError if the two do not fit."""
        self._critic = critic
        self._ranks = ranks
        self._swaps = memory == "swap"
        if self._swaps:
            critic.engine.offload()
        self._reward: Engine = load_reward()
        self._on_device: Engine | None = self._reward
        if not isinstance(self._reward, Engine):
            raise ConfigError("the reward model is a function", "give a folder or hub id as reward_model")
        encoders = [x for x in (critic.encoder, self._reward.encoder) if x is not None]
        if len({str(encoder.encode([PROBE])[0]) for encoder in encoders}) > 1:
            raise ConfigError(
                "the reward model's tokenizer differs from the critic's, and both read the same tokens",
                "use two models of one family, or serve the reward model separately and send it text",
            )
        self.encoder = critic.encoder
        self.max_batch_tokens = min(critic.max_batch_tokens, self._reward.max_batch_tokens)

    @property
    def info(self) -> ModelInfo:
        """The critic's, with rewards beside the values and the narrower limits of the two models."""
        critic, reward = self._critic.info, self._reward.info
        return dataclasses.replace(
            critic,
            outputs=("values", "rewards"),
            pooling=reward.pooling,
            vocab_size=_smaller(critic.vocab_size, reward.vocab_size),
            max_length=_smaller(critic.max_length, reward.max_length),
        )

    @property
    def run_token(self) -> str:
        """The critic's."""
        return self._critic.run_token

    @run_token.setter
    def run_token(self, token: str) -> None:
        """The critic's."""
        self._critic.run_token = token

    def watch(self, tick: Callable[..., None]) -> bool:
        """Calls `tick` after every layer of both models; returns False if a model has no visible layers."""
        critic, reward = self._critic.watch(tick), self._reward.watch(tick)
        return critic and reward

    def score(self, sequences: list[Sequence]) -> list[Score | GuerdonError]:
        """Returns each sequence's values, and its reward if wanted, or the error of the model that failed on it.

        If a model cannot be moved to the device, every sequence gets that error. Raises Offloaded.
        """
        return self._score(sequences, is_plain=False)

    def score_plainly(self, sequences: list[Sequence]) -> list[Score | GuerdonError]:
        """As `score`, by the plain forward of both. Raises Offloaded."""
        return self._score(sequences, is_plain=True)

    def leave_path(self, why: str) -> None:
        """Makes every later forward of both the plain one, as `Forward.leave_path`."""
        self._critic.leave_path(why)
        self._reward.leave_path(why)

    def _score(self, sequences: list[Sequence], is_plain: bool) -> list[Score | GuerdonError]:
        self._critic.check_ready()
        rewarded = [s for s in sequences if s.wants_reward]
        any_wanted = any(self._tell_swapping_ranks(bool(rewarded))) if self._swaps else bool(rewarded)
        try:
            if self._swaps and self._on_device is self._reward:
                rewards = self._score_rewards(rewarded, any_wanted, is_plain)
                values = self._score_values(sequences, is_plain)
            else:
                values = self._score_values(sequences, is_plain)
                rewards = self._score_rewards(rewarded, any_wanted, is_plain)
        except _SwapFailed as e:
            return [ServerFault(str(e)) for _ in sequences]
        merged: list[Score | GuerdonError] = []
        reward = iter(rewards)
        for sequence, value in zip(sequences, values, strict=True):
            own = next(reward) if sequence.wants_reward else None
            if own is None or isinstance(value, SampleFailed):
                merged.append(value)
            else:
                merged.append(own if isinstance(own, SampleFailed) else Score(own.reward, values=value.values))
        return merged

    def train(self, request: TrainRequest, first_batches: int | None = None) -> TrainReport:
        """As CriticTrainer.train; also raises TrainFailed if the critic cannot be moved to the device."""
        return self._critic_on_device().train(request, first_batches)

    def validate(self, request: TrainRequest) -> TrainReport:
        """As CriticTrainer.validate, and errors as `train`."""
        return self._critic_on_device().validate(request)

    def estimate(self, request: TrainRequest) -> TrainRequest:
        """As CriticTrainer.estimate, and errors as `train`."""
        return self._critic_on_device().estimate(request)

    def save(self, folder: Path) -> None:
        """As CriticTrainer.save, wherever its weights are at the moment."""
        self._critic.save(folder)

    def load(self, folder: Path, lineage: int | None = None) -> None:
        """As CriticTrainer.load, wherever its weights are at the moment."""
        self._critic.load(folder, lineage)

    def state(self) -> dict[str, Any]:
        """As CriticTrainer.state."""
        return self._critic.state()

    def offload(self) -> None:
        """Moves both models and the optimiser's state to host memory."""
        self._critic.offload()
        self._reward.offload()
        self._on_device = None

    def onload(self) -> None:
        """Moves them back to the device, all or none; with `swap` the reward model follows when it is needed."""
        self._critic.onload()
        if not self._swaps:
            try:
                with collectives.share_errors(self._ranks):
                    self._reward.onload()
            except Exception:
                self.offload()
                raise
        self._on_device = self._critic.engine

    def _score_values(self, sequences: list[Sequence], is_plain: bool) -> list[Score | SampleFailed]:
        self._swap_in_on_all_ranks(self._critic.engine)
        return self._critic.score_plainly(sequences) if is_plain else self._critic.score(sequences)

    def _score_rewards(self, sequences: list[Sequence], any_wanted: bool, is_plain: bool) -> list[Score | SampleFailed]:
        """Returns the rewards.

        Swaps the model in if any of the ranks that swap together has a sequence to reward.
        """
        if not any_wanted:
            return []
        self._swap_in_on_all_ranks(self._reward)
        if not sequences:
            return []
        return self._reward.score_plainly(sequences) if is_plain else self._reward.score(sequences)

    def _swap_in_on_all_ranks(self, engine: Engine) -> None:
        """As `_swap_in`, on all ranks that share one sharded model or on none of them."""
        failure = ""
        try:
            self._swap_in(engine)
        except _SwapFailed as e:
            failure = str(e)
        failures = self._tell_swapping_ranks(failure) if self._swaps else [failure]
        if first := next((other for other in failures if other), ""):
            if not failure:
                self._swap_out()
            raise _SwapFailed(first)

    def _tell_swapping_ranks(self, what: T) -> list[T]:
        """Collective over the ranks that swap together; returns every rank's argument."""
        if self._ranks.in_step:
            return self._ranks.tell_all(what)
        if self._ranks.tensor_size == 1:
            return [what]
        # Only the ranks of this part of the batch: other parts may have no sequence and not be called.
        try:
            with self._ranks.waiting():
                return frames.exchange(what, self._ranks.tensor_group)
        except RuntimeError as e:
            raise RanksLost(f"another rank was lost: {first_line(e)}") from e

    def _critic_on_device(self) -> CriticTrainer:
        self._critic.check_ready()
        try:
            with collectives.share_errors(self._ranks):
                try:
                    self._swap_in(self._critic.engine)
                except _SwapFailed as e:
                    raise TrainFailed(f"{e}: nothing was changed", 0) from None
        except TrainFailed:
            self._swap_out()
            raise
        return self._critic

    def _swap_in(self, engine: Engine) -> None:
        """With `swap`, moves the engine to the device; if it raises _SwapFailed, no engine is there."""
        if not self._swaps or self._on_device is engine:
            return
        try:
            with self._ranks.waiting():  # no layer ticks meanwhile
                # First out, then in: memory may not suffice for both, nor for the one that comes.
                self._swap_out()
                engine.onload()
        except Exception as e:
            log.exception("a swap failed")
            with self._ranks.waiting():
                engine.offload()  # the part that was moved
            which = "critic" if engine is self._critic.engine else "reward model"
            raise _SwapFailed(f"the {which} cannot be moved to the device ({describe(e)})") from e
        self._on_device = engine

    def _swap_out(self) -> None:
        """With `swap`, moves the engine on the device, if any, to host memory."""
        there, self._on_device = self._on_device, None
        if self._swaps and there is not None:
            there.offload()


class _SwapFailed(Exception):
    """A model does not fit the device at the moment; later it may."""


def _smaller(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)
