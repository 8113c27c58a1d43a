"""A reward model beside the critic: one request is answered by both."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from guerdon.core import ModelInfo, Score, Sequence, TrainReport, TrainRequest
from guerdon.distributed import frames
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.engine import Engine
from guerdon.errors import ConfigError, GuerdonError, RanksLost, SampleFailed, ServerFault, TrainFailed
from guerdon.training import collectives
from guerdon.training.critic_trainer import CriticTrainer

log = logging.getLogger(__name__)
T = TypeVar("T")

PROBE = "Is 1 + 1 = 2? Yes, naïvely.\n"


class CriticWithReward:
    """A critic that learns and a reward model that does not: values from the one, rewards from the other.

    With `resident` memory both trunks are on the device. With `swap` one of them is, and the other waits in the
    host's memory; a request goes first to the one that is there, so that it costs one exchange. The optimiser's state
    stays where it is: what it takes, the reward model leaves free anyway while the critic trains.

    Both models score the same part of the sequences on a rank. The reward model is never sharded by FSDP, so that a
    rank without a sequence to reward need not run it. Ranks that hold parts of one model swap together or not at all:
    in what one runs or saves, all of them have to be where its weights are.
    """

    takes_all = False

    def __init__(
        self,
        critic: CriticTrainer,
        load_reward: Callable[[], Any],
        memory: Literal["resident", "swap"] = "resident",
        ranks: Ranks = ALONE,
    ) -> None:
        """Loads the reward model, with `swap` in the critic's place; raises ConfigError where it does not fit it."""
        self._critic = critic
        self._ranks = ranks
        self._swaps = memory == "swap"
        if self._swaps:
            critic.engine.offload()
        self._reward: Engine = load_reward()
        self._there: Engine | None = self._reward
        _check_fits(critic, self._reward)
        self.encoder = critic.encoder
        self.max_batch_tokens = min(critic.max_batch_tokens, self._reward.max_batch_tokens)

    @property
    def info(self) -> ModelInfo:
        """The critic's, with rewards beside the values, and no wider than either model."""
        critic, reward = self._critic.info, self._reward.info
        return dataclasses.replace(
            critic,
            outputs=("values", "rewards"),
            pooling=reward.pooling,
            vocab_size=_least(critic.vocab_size, reward.vocab_size),
            max_length=_least(critic.max_length, reward.max_length),
        )

    @property
    def run_token(self) -> str:
        """The critic's."""
        return self._critic.run_token

    @run_token.setter
    def run_token(self, token: str) -> None:
        self._critic.run_token = token

    def watch(self, tick: Callable[..., None]) -> bool:
        """Calls `tick` whenever a layer of either has run; False where they show no layers."""
        critic, reward = self._critic.watch(tick), self._reward.watch(tick)
        return critic and reward

    def score(self, sequences: list[Sequence]) -> list[Score | GuerdonError]:
        """Each sequence's values, and its reward where that is wanted; where one of the models fails on it, that.

        Where a model cannot be brought to the device, this is every sequence's failure. Raises Offloaded.
        """
        return self._score(sequences, is_plain=False)

    def score_plainly(self, sequences: list[Sequence]) -> list[Score | GuerdonError]:
        """As `score`, by the plain forward of both. Raises Offloaded."""
        return self._score(sequences, is_plain=True)

    def _score(self, sequences: list[Sequence], is_plain: bool) -> list[Score | GuerdonError]:
        self._critic.check_ready()
        rewarded = [s for s in sequences if s.wants_reward]
        any_wanted = any(self._told(bool(rewarded))) if self._swaps else bool(rewarded)
        try:
            if self._swaps and self._there is self._reward:
                rewards = self._score_rewards(rewarded, any_wanted, is_plain)
                values = self._score_values(sequences, is_plain)
            else:
                values = self._score_values(sequences, is_plain)
                rewards = self._score_rewards(rewarded, any_wanted, is_plain)
        except _NotBrought as e:
            return [ServerFault(str(e)) for _ in sequences]
        reward = iter(rewards)
        return [_both(v, next(reward)) if s.wants_reward else v for s, v in zip(sequences, values, strict=True)]

    def train(self, request: TrainRequest, first_steps: int | None = None) -> TrainReport:
        """As the critic's own; raises TrainFailed, too, where the critic cannot be brought to the device."""
        self._bring_critic()
        return self._critic.train(request, first_steps)

    def validate(self, request: TrainRequest) -> TrainReport:
        """As the critic's own; raises TrainFailed where the critic cannot be brought to the device."""
        self._bring_critic()
        return self._critic.validate(request)

    def save(self, folder: Path) -> None:
        """As the critic's own, wherever its weights are at the moment."""
        self._critic.save(folder)

    def load(self, folder: Path, lineage: int | None = None) -> None:
        """As the critic's own, wherever its weights are at the moment."""
        self._critic.load(folder, lineage)

    def state(self) -> dict[str, Any]:
        """As the critic's own."""
        return self._critic.state()

    def offload(self) -> None:
        """Moves both models and the optimiser's state to the host's memory."""
        self._critic.offload()
        self._reward.offload()
        self._there = None

    def onload(self) -> None:
        """Moves them back to the device, all or none; with `swap` the reward model follows when it is needed."""
        self._critic.onload()
        if not self._swaps:
            try:
                collectives.together(self._ranks, self._reward.onload)
            except Exception:
                self.offload()
                raise
        self._there = self._critic.engine

    def _score_values(self, sequences: list[Sequence], is_plain: bool) -> list[Score | SampleFailed]:
        self._bring_alike(self._critic.engine)
        return self._critic.score_plainly(sequences) if is_plain else self._critic.score(sequences)

    def _score_rewards(self, sequences: list[Sequence], any_wanted: bool, is_plain: bool) -> list[Score | SampleFailed]:
        """The rewards, once the model has come for whoever of those that swap together has any to make."""
        if not any_wanted:
            return []
        self._bring_alike(self._reward)
        if not sequences:
            return []
        return self._reward.score_plainly(sequences) if is_plain else self._reward.score(sequences)

    def _bring_alike(self, engine: Engine) -> None:
        """As `_bring`, on all ranks that hold parts of one model or on none of them."""
        failure = ""
        try:
            self._bring(engine)
        except _NotBrought as e:
            failure = str(e)
        told = self._told(failure) if self._swaps else [failure]
        if first := next((other for other in told if other), ""):
            if not failure:
                self._send_away()
            raise _NotBrought(first)

    def _told(self, what: T) -> list[T]:
        """What each of the ranks tells that swap together; they call it in the same place."""
        if self._ranks.in_step:
            return self._ranks.tell_all(what)
        if self._ranks.tensor_size == 1:
            return [what]
        # A part of the batch is theirs alone; other parts may be without a sequence, and not be asked at all.
        try:
            with self._ranks.waiting():
                return frames.exchange(what, self._ranks.tensor_group)
        except RuntimeError as e:
            raise RanksLost(f"another rank was lost: {(str(e).splitlines() or [''])[0]}") from e

    def _bring_critic(self) -> None:
        self._critic.check_ready()

        def bring() -> None:
            try:
                self._bring(self._critic.engine)
            except _NotBrought as e:
                raise TrainFailed(f"{e}: nothing was changed", 0) from None

        try:
            collectives.together(self._ranks, bring)
        except TrainFailed:
            self._send_away()
            raise

    def _bring(self, engine: Engine) -> None:
        """With `swap`, makes the engine the one that is on the device, or nobody where it raises _NotBrought."""
        if not self._swaps or self._there is engine:
            return
        try:
            with self._ranks.waiting():  # for memory, and no layer runs meanwhile
                # Nobody is there until the other has arrived whole: memory may not suffice for it.
                self._send_away()
                engine.onload()
        except Exception as e:
            log.exception("a swap failed")
            with self._ranks.waiting():
                engine.offload()  # what of it has arrived
            which = "critic" if engine is self._critic.engine else "reward model"
            raise _NotBrought(f"the {which} cannot be brought to the device ({type(e).__name__}: {e})") from e
        self._there = engine

    def _send_away(self) -> None:
        """With `swap`, nobody is on the device then."""
        there, self._there = self._there, None
        if self._swaps and there is not None:
            there.offload()


class _NotBrought(Exception):
    """One of the two models does not arrive on the device, for lack of memory there; later it may."""


def _check_fits(critic: CriticTrainer, reward: Any) -> None:
    if not isinstance(reward, Engine):
        raise ConfigError("the reward model is a function", "give a folder or hub id as reward_model")
    if critic.encoder is None or reward.encoder is None:
        return
    own, other = (np.asarray(encoder.encode([PROBE])[0]) for encoder in (critic.encoder, reward.encoder))
    if not np.array_equal(own, other):
        raise ConfigError(
            "the reward model's tokenizer is another than the critic's, and both read the same tokens",
            "use two models of one family, or serve the reward model by itself and send it text",
        )


def _both(value: Score | SampleFailed, reward: Score | SampleFailed) -> Score | SampleFailed:
    if isinstance(value, SampleFailed):
        return value
    if isinstance(reward, SampleFailed):
        return reward
    return Score(reward.reward, values=value.values)


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)
