"""Rollouts: responses to prompts, drawn from the policy as it is, a group at a time as each is finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, distributed

from guerdon.actor.rollouts import Prompt, Rollout, response_text
from guerdon.actor.sampling import Sampler, StopTexts, uniforms
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint.language_models import LoadedPolicy
from guerdon.engine.generating import Decoder, DecoderChoice
from guerdon.engine.logprobs import LanguageEngine
from guerdon.errors import ConfigError
from guerdon.settings.actors import RolloutConfig
from guerdon.training.policy_trainer import PolicyTrainer

MAX_BATCH_ROLLOUTS = 256
"""Beyond about this many rows a matrix product gains nothing on a CPU, and what they keep in memory grows.

It is no bound of that: where long responses of so many do not fit, `rollouts.max_batch_rollouts` is to be lowered.
"""


class Generator(Protocol):
    """What generates rollouts."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num: int,
        config: RolloutConfig,
        seed: tuple[int, ...],
        greedy: bool = False,
    ) -> Iterator[list[Rollout]]:
        """Yields each prompt's `num` rollouts as soon as the last of them is finished; `group` is its place in prompts.

        What is drawn is a function of the weights, the prompt, `config`, `seed` (of numbers of at least 0) and the
        rollout's group and index, whatever is drawn beside it. With `greedy` the most likely token is taken
        instead of one that is drawn. The weights must not change before the end.
        """

    def sync(self) -> None:
        """To be called after the policy's weights have changed."""


def make_generator(policy: PolicyTrainer, config: RolloutConfig) -> Generator:
    """The generator that `config.engine` names, for the policy that is trained; raises ConfigError, CheckpointError."""
    if config.engine == "vllm":
        from guerdon.actor.vllm_generator import VllmGenerator

        return VllmGenerator(policy.policy, config)
    return TransformersGenerator(policy.policy, policy.engine, config.max_batch_rollouts)


class TransformersGenerator:
    """Generates with the policy's own modules, so that there are no weights to copy.

    A finished rollout leaves the batch, and where the model allows it the next prompts join it half empty.
    """

    def __init__(
        self,
        policy: LoadedPolicy,
        engine: LanguageEngine,
        max_batch_rollouts: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Raises CheckpointError where the model cannot generate token by token.

        The tensor-parallel `ranks` of one part must all be given the same to generate, and draw the same.
        """
        self._policy, self._engine, self._ranks = policy, engine, ranks
        self._most = max_batch_rollouts or MAX_BATCH_ROLLOUTS
        self._choice = DecoderChoice(policy, engine)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num: int,
        config: RolloutConfig,
        seed: tuple[int, ...],
        greedy: bool = False,
    ) -> Iterator[list[Rollout]]:
        """As `Generator`; raises ConfigError for a prompt that leaves no room, or a stop text without a tokenizer.

        Also where the model's rotary frequencies would change within a response (longrope, dynamic): what is drawn
        would not be what the trainer's log-probs, of whole sequences, are about.
        """
        work = self.begin(enumerate(prompts), num=num, config=config, seed=seed, greedy=greedy)
        while work.is_left:
            yield from work.run()

    def begin(
        self,
        prompts: Iterable[tuple[int, Prompt]],
        *,
        num: int,
        config: RolloutConfig,
        seed: tuple[int, ...],
        greedy: bool = False,
    ) -> Generation:
        """What `generate` does, to be done bit by bit; each prompt comes with the number of its group.

        Of what one process would generate a part may be given, and becomes the same. Raises as `generate`.
        """
        work = Generation(
            self._policy, self._choice.make(), self._engine, config, seed, num, greedy, self._most, self._ranks
        )
        work.add(prompts)
        return work

    def sync(self) -> None:
        """Nothing: the weights are in place."""


def room_of(prompt: Prompt, config: RolloutConfig, max_length: int | None) -> int:
    """Tokens that a response to the prompt may have, at least 1; ConfigError where the longest sequence leaves none."""
    room = config.max_new_tokens
    if max_length is not None:
        room = min(room, max_length - len(prompt.tokens))
    if room < 1 or not len(prompt.tokens):
        raise ConfigError(
            f"prompt {prompt.id} has {len(prompt.tokens)} tokens, and the policy takes at most {max_length}",
            "lower data.max_prompt_length, and leave out what is empty",
        )
    return room


@dataclass(slots=True, eq=False)
class _Row:
    """A rollout on the way."""

    prompt: Prompt
    group: int
    index: int
    numbers: np.ndarray
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_end: bool = False

    @property
    def is_done(self) -> bool:
        return self.is_end or len(self.tokens) == self.limit


class Generation:
    """What one call of `generate` has to do, and the batch that is under way."""

    def __init__(
        self,
        policy: LoadedPolicy,
        decoder: Decoder,
        engine: LanguageEngine,
        config: RolloutConfig,
        seed: tuple[int, ...],
        num: int,
        greedy: bool,
        most: int,
        ranks: Ranks = ALONE,
    ) -> None:
        self._policy, self._decoder, self._engine, self._config = policy, decoder, engine, config
        self._ranks = ranks
        self._seed, self._num, self._most = seed, num, most
        self._eos = frozenset(policy.eos_token_ids)
        self._sample = Sampler(config, policy.eos_token_ids, greedy=greedy)
        self._stops = StopTexts(config.stop, policy.tokenizer)
        self._waiting: deque[list[_Row]] = deque()
        self._rows: list[_Row] = []  # in the decoder's order, with those that are done and have not left
        self._newest: Tensor | None = None
        self._seen: Tensor | None = None
        self._idle = 0
        self._finished: dict[int, list[Rollout]] = {}

    def add(self, prompts: Iterable[tuple[int, Prompt]]) -> None:
        """Lets the prompts wait; raises ConfigError where there is no room for a response to one."""
        for group, prompt in prompts:
            room = room_of(prompt, self._config, self._policy.max_length)
            if not self._engine.in_one_class(len(prompt.tokens), len(prompt.tokens) + room):
                raise ConfigError(
                    f"prompt {prompt.id} has {len(prompt.tokens)} tokens, and within the {room} that its response may "
                    "have the policy's rotary embedding changes its frequencies, by which it becomes another model",
                    "lower rollouts.max_new_tokens or policy.max_length, so that no response gets so far",
                )
            rows = [_Row(prompt, group, i, uniforms(self._seed, group, i, room), room) for i in range(self._num)]
            for start in range(0, self._num, self._most):
                self._waiting.append(rows[start : start + self._most])

    @property
    def is_left(self) -> bool:
        """Whether a group is not finished yet."""
        return bool(self._waiting) or not all(row.is_done for row in self._rows)

    def run(self, steps: int | None = None) -> list[list[Rollout]]:
        """Goes on until groups are finished, or for so many tokens of each row; the groups that are finished then."""
        groups: list[list[Rollout]] = []
        done = 0
        # Nothing stays set between two calls, for the caller may use the model then.
        with self._engine.no_gradients(), self._decoder.running():
            while self.is_left and (not groups if steps is None else done < steps):
                groups += self._step()
                done += 1
        return groups

    def _step(self) -> list[list[Rollout]]:
        """The next token of every row, or the first of new ones; the groups that are finished with it."""
        self._leave()
        if items := self._next():
            counts = [len(item) for item in items]
            logits = self._decoder.begin([item[0].prompt.tokens for item in items], counts)
            fresh = [row for item in items for row in item]
            self._see(fresh, logits.shape[-1])
            self._rows += fresh
            return self._take(fresh, logits)
        assert self._newest is not None
        logits = self._decoder.step(self._newest)
        self._newest = None
        return self._take(self._rows, logits)

    def _leave(self) -> None:
        """Lets the rows that are done leave once they have cost as much as their leaving does.

        That moves what is kept of the others, which takes about as long as a step of these.
        """
        alive = np.array([i for i, row in enumerate(self._rows) if not row.is_done], dtype=np.int64)
        self._idle += len(self._rows) - len(alive)
        makes_room = self._waiting and self._decoder.joins and len(alive) <= self._most // 2
        if len(alive) == len(self._rows) or (self._idle < len(alive) and not makes_room):
            return
        self._decoder.keep(alive)
        self._rows = [self._rows[i] for i in alive]
        chosen = self._engine.index(alive)
        self._newest = None if self._newest is None else self._newest[chosen]
        self._seen = None if self._seen is None else self._seen[chosen]
        self._idle = 0

    def _next(self) -> list[list[_Row]]:
        """The rows, prompt by prompt, that begin now; none as long as those under way fill half of the batch."""
        if self._rows and (not self._decoder.joins or len(self._rows) > self._most // 2):
            return []
        room, count = self._most - len(self._rows), 0
        while count < len(self._waiting) and len(self._waiting[count]) <= room:
            room -= len(self._waiting[count])
            count += 1
        if not count:
            return []
        count = self._decoder.together([len(self._waiting[i][0].prompt.tokens) for i in range(count)])
        # Side by side, prompts of like length need little padding.
        return sorted((self._waiting.popleft() for _ in range(count)), key=lambda rows: len(rows[0].prompt.tokens))

    def _see(self, fresh: list[_Row], vocab_size: int) -> None:
        """Notes the tokens of the prompts of rows that begin, where the sampler asks for it."""
        if not self._sample.penalises:
            return
        seen = np.zeros((len(fresh), vocab_size), dtype=bool)
        for i, row in enumerate(fresh):
            seen[i, row.prompt.tokens] = True
        new = self._engine.index(seen)
        self._seen = new if self._seen is None else torch.cat([self._seen, new])

    def _take(self, rows: list[_Row], logits: Tensor) -> list[list[Rollout]]:
        """Draws a token for each of the last rows, which `rows` are; the groups that are finished with it."""
        counts = [len(row.tokens) for row in rows]
        numbers = [0.0 if row.is_done else row.numbers[n] for row, n in zip(rows, counts, strict=True)]
        seen = None if self._seen is None else self._seen[-len(rows) :]
        tokens, logprobs = self._sample(
            logits, self._engine.index(np.array(numbers)), self._engine.index(np.array(counts)), seen
        )
        if self._ranks.tensor_size > 1:
            # Were the last bits of their logits not the same, the ranks would go on with other rows, and wait for good.
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

    def _append(self, row: _Row, token: int, logprob: float) -> Rollout | None:
        """The rollout, where the token is its last."""
        row.tokens.append(token)
        row.logprobs.append(logprob)
        row.is_end = token in self._eos or self._stops.complete(row.tokens)
        return self._rollout(row) if row.is_done else None

    def _rollout(self, row: _Row) -> Rollout:
        has_eos = row.tokens[-1] in self._eos
        return Rollout(
            prompt=row.prompt,
            group=row.group,
            index=row.index,
            tokens=np.concatenate([row.prompt.tokens, np.array(row.tokens, dtype=np.int64)]),
            is_end=row.is_end,
            logprobs=np.array(row.logprobs, dtype=np.float32),
            text=response_text(self._policy.tokenizer, row.tokens, has_eos),
            has_eos=has_eos,
        )
