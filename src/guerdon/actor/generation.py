"""Rollouts: responses to prompts, sampled from the current policy and yielded by group as each is finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Unpack

import numpy as np
import torch
from torch import Tensor, distributed

from guerdon.actor.environment import Environment
from guerdon.actor.rollouts import MAX_BATCH_ROLLOUTS, Draw, Prompt, Rollout, max_response_length
from guerdon.actor.sampling import Sampler, StopTexts, uniforms
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint.language_models import LoadedPolicy
from guerdon.engine.generating import Decoder, DecoderChoice
from guerdon.engine.logprobs import LanguageEngine
from guerdon.errors import ConfigError
from guerdon.settings.actors import RolloutConfig
from guerdon.training.policy_trainer import PolicyTrainer


class Generator(Protocol):
    """Generates rollouts."""

    def generate(self, prompts: Sequence[Prompt], **draw: Unpack[Draw]) -> Iterator[list[Rollout]]:
        """Yields each prompt's `num` rollouts as soon as the last of them is finished; `group` is the prompt's index.

        The samples are a function of the weights, the prompt, `config`, `seed` and the rollout's group and index,
        whatever shares the batch. The weights must not change before the end.
        """

    def sync(self) -> None:
        """Call it after the policy's weights have changed."""


def make_generator(policy: PolicyTrainer, config: RolloutConfig) -> Generator:
    """Returns the generator that `config.engine` names, for this policy; raises ConfigError, CheckpointError."""
    if config.engine == "vllm":
        from guerdon.actor.vllm_generator import VllmGenerator

        return VllmGenerator(policy.loaded, config)
    return TransformersGenerator(policy.loaded, policy.engine, config.max_batch_rollouts)


class TransformersGenerator:
    """Generates with the policy's own modules, so that no weights need copying.

    A finished rollout leaves the batch; if the model allows it, the next prompts join when half of it is empty.
    """

    def __init__(
        self, policy: LoadedPolicy, engine: LanguageEngine, max_batch_rollouts: int | None = None, ranks: Ranks = ALONE
    ) -> None:
        """Raises CheckpointError if the model cannot generate token by token.

        Tensor-parallel `ranks` must all get the same calls, and sample the same tokens.
        """
        self._policy, self._engine, self._ranks = policy, engine, ranks
        self._max_batch_rollouts = max_batch_rollouts or MAX_BATCH_ROLLOUTS
        self._choice = DecoderChoice(policy, engine)

    def generate(self, prompts: Sequence[Prompt], **draw: Unpack[Draw]) -> Iterator[list[Rollout]]:
        """As `Generator`; raises ConfigError if a prompt leaves no room, or for a stop text without a tokenizer.

        Also if the model's rotary frequencies would change within a response (longrope, dynamic): the samples would not
        match the trainer's log-probs of whole sequences.
        """
        work = self.begin(enumerate(prompts), **draw)
        while work.is_left:
            yield from work.run()

    def begin(self, prompts: Iterable[tuple[int, Prompt]], **draw: Unpack[Draw]) -> Generation:
        """Starts what `generate` does, to be run step by step; each prompt comes with its group number.

        A subset of the prompts gives the same rollouts for them. Raises as `generate`.
        """
        decoder = self._choice.make()
        work = Generation(self._policy, decoder, self._engine, self._max_batch_rollouts, self._ranks, **draw)
        work.add(prompts)
        return work

    def sync(self) -> None:
        """Does nothing: the weights are shared."""


@dataclass(slots=True, eq=False)
class _ActiveRollout:
    """A rollout in progress.

    `given` are environment tokens that the model has not read yet, `observed` the places of those that it has read; the
    policy's newest turn begins at `turn`.
    """

    prompt: Prompt
    group: int
    index: int
    numbers: np.ndarray
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_end: bool = False
    given: deque[int] = field(default_factory=deque)
    observed: list[int] = field(default_factory=list)
    turn: int = 0

    @property
    def is_done(self) -> bool:
        return self.is_end or len(self.tokens) == self.limit


class Generation:
    """One call of `generate` in progress, and its batch."""

    def __init__(
        self,
        policy: LoadedPolicy,
        decoder: Decoder,
        engine: LanguageEngine,
        max_batch_rollouts: int,
        ranks: Ranks,
        *,
        num: int,
        config: RolloutConfig,
        seed: tuple[int, ...],
        greedy: bool = False,
    ) -> None:
        self._policy, self._decoder, self._engine, self._config = policy, decoder, engine, config
        self._ranks = ranks
        self._seed, self._num, self._max_batch_rollouts = seed, num, max_batch_rollouts
        self._eos = frozenset(policy.eos_token_ids)
        self._sampler = Sampler(config, policy.eos_token_ids, greedy=greedy)
        self._stops = StopTexts(config.stop, policy.tokenizer)
        self._environment = None if config.environment is None else Environment(config.environment, policy.tokenizer)
        self._waiting: deque[list[_ActiveRollout]] = deque()
        self._rows: list[_ActiveRollout] = []  # in the decoder's order, finished ones included until they are dropped
        self._newest: Tensor | None = None
        self._seen: Tensor | None = None
        self._idle_steps = 0
        self._finished: dict[int, list[Rollout]] = {}

    def add(self, prompts: Iterable[tuple[int, Prompt]]) -> None:
        """Queues the prompts; raises ConfigError if one leaves no room for a response."""
        for group, prompt in prompts:
            room = max_response_length(prompt, self._config, self._policy.max_length)
            if not self._engine.length_classes.is_same(len(prompt.tokens), len(prompt.tokens) + room):
                raise ConfigError(
                    f"prompt {prompt.id} has {len(prompt.tokens)} tokens, and within the {room} that its response may "
                    "have the policy's rotary embedding changes its frequencies, so that log-probs would not match",
                    "lower rollouts.max_new_tokens or policy.max_length, so that no response gets that long",
                )
            all_numbers = [uniforms(self._seed, group, i, room) for i in range(self._num)]
            rows = [_ActiveRollout(prompt, group, i, numbers, room) for i, numbers in enumerate(all_numbers)]
            for start in range(0, self._num, self._max_batch_rollouts):
                self._waiting.append(rows[start : start + self._max_batch_rollouts])

    @property
    def is_left(self) -> bool:
        """Whether a group is unfinished."""
        return bool(self._waiting) or not all(row.is_done for row in self._rows)

    def run(self, steps: int | None = None) -> list[list[Rollout]]:
        """Runs until groups are finished, or for so many tokens of each row; returns the finished groups."""
        groups: list[list[Rollout]] = []
        done = 0
        # Contexts end with every call, because the caller may use the model in between.
        with self._engine.no_gradients(), self._decoder.running():
            while self.is_left and (not groups if steps is None else done < steps):
                groups += self._step()
                done += 1
        return groups

    def _step(self) -> list[list[Rollout]]:
        """Samples the next token of every row, or the first of new ones; returns the groups that it finishes."""
        self._drop_finished()
        if items := self._next_prompts():
            counts = [len(item) for item in items]
            logits = self._decoder.begin([item[0].prompt.tokens for item in items], counts)
            fresh = [row for item in items for row in item]
            if self._sampler.penalises:
                seen = np.zeros((len(fresh), logits.shape[-1]), dtype=bool)
                for i, row in enumerate(fresh):
                    seen[i, row.prompt.tokens] = True
                new = self._engine.to_device(seen)
                self._seen = new if self._seen is None else torch.cat([self._seen, new])
            self._rows += fresh
            return self._sample_tokens(fresh, logits)
        assert self._newest is not None
        logits = self._decoder.step(self._newest)
        self._newest = None
        return self._sample_tokens(self._rows, logits)

    def _drop_finished(self) -> None:
        """Drops finished rows from the batch once they have cost as much as dropping them.

        Dropping moves the remaining rows' cache, which takes about as long as a step of them.
        """
        alive = np.array([i for i, row in enumerate(self._rows) if not row.is_done], dtype=np.int64)
        self._idle_steps += len(self._rows) - len(alive)
        makes_room = self._waiting and self._decoder.joins and len(alive) <= self._max_batch_rollouts // 2
        if len(alive) == len(self._rows) or (self._idle_steps < len(alive) and not makes_room):
            return
        self._decoder.keep(alive)
        self._rows = [self._rows[i] for i in alive]
        chosen = self._engine.to_device(alive)
        self._newest = None if self._newest is None else self._newest[chosen]
        self._seen = None if self._seen is None else self._seen[chosen]
        self._idle_steps = 0

    def _next_prompts(self) -> list[list[_ActiveRollout]]:
        """Returns the rows, prompt by prompt, that start now; none while half of the batch or more is in progress."""
        if self._rows and (not self._decoder.joins or len(self._rows) > self._max_batch_rollouts // 2):
            return []
        room, count = self._max_batch_rollouts - len(self._rows), 0
        while count < len(self._waiting) and len(self._waiting[count]) <= room:
            room -= len(self._waiting[count])
            count += 1
        if not count:
            return []
        count = self._decoder.together([len(self._waiting[i][0].prompt.tokens) for i in range(count)])
        # Sorted, because neighbours of similar length need little padding.
        return sorted((self._waiting.popleft() for _ in range(count)), key=lambda rows: len(rows[0].prompt.tokens))

    def _sample_tokens(self, rows: list[_ActiveRollout], logits: Tensor) -> list[list[Rollout]]:
        """Samples a token for each of the last rows, which `rows` are; returns the groups that it finishes."""
        counts = [len(row.tokens) for row in rows]
        numbers = [0.0 if row.is_done else row.numbers[n] for row, n in zip(rows, counts, strict=True)]
        seen = None if self._seen is None else self._seen[-len(rows) :]
        tokens, logprobs = self._sampler(
            logits, self._engine.to_device(np.array(numbers)), self._engine.to_device(np.array(counts)), seen
        )
        given = {i: row.given[0] for i, row in enumerate(rows) if row.given and not row.is_done}
        if given:
            at, written = np.array([*given]), np.array([*given.values()])
            tokens[self._engine.to_device(at)] = self._engine.to_device(written)
        if self._ranks.tensor_size > 1:
            # If the last bits of their logits differed, the ranks would sample different tokens and deadlock.
            distributed.broadcast(tokens, group=self._ranks.tensor_group, group_src=0)
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        self._newest = tokens if self._newest is None else torch.cat([self._newest, tokens])
        groups = []
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if not row.is_done and (rollout := self._append(row, token, logprob)):
                of_group = self._finished.setdefault(row.group, [])
                of_group.append(rollout)
                if len(of_group) == self._num:
                    groups.append(sorted(self._finished.pop(row.group), key=lambda rollout: rollout.index))
        return groups

    def _append(self, row: _ActiveRollout, token: int, logprob: float) -> Rollout | None:
        """Returns the rollout if the token is its last."""
        row.tokens.append(token)
        if row.given:
            row.given.popleft()
            row.observed.append(len(row.logprobs))
            row.logprobs.append(0.0)
        else:
            row.logprobs.append(logprob)
            row.is_end = token in self._eos
            if not row.is_end and self._stops.complete(row.tokens, row.turn):
                answer = None if self._environment is None else self._environment(row.prompt, row.tokens)
                row.is_end = answer is None
                if answer is not None:  # the row goes on after the environment's answer
                    row.given.extend(answer)
                    row.turn = len(row.tokens) + len(answer)
        if not row.is_done:
            return None
        observed = None
        if row.observed:
            observed = np.zeros(len(row.tokens), dtype=bool)
            observed[row.observed] = True
        made = (row.prompt, row.group, row.index, row.tokens, row.logprobs, row.is_end)
        return Rollout.of(*made, self._policy.tokenizer, self._eos, observed)
