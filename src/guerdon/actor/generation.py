"""Rollouts: responses to prompts, sampled from the current policy and yielded by group as each is finished."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from guerdon.actor.rollouts import MAX_BATCH_ROLLOUTS, Draw, Prompt, Rollout, decode, max_response_length
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint.language_models import LoadedPolicy
from guerdon.engine.functions import import_function
from guerdon.engine.generating import Decoder, DecoderChoice
from guerdon.engine.logprobs import LanguageEngine
from guerdon.errors import ConfigError, RunFailed, describe
from guerdon.settings.actors import RolloutConfig
from guerdon.training.policy_trainer import PolicyTrainer

BLOCK = 64
"""Probabilities are summed in blocks before they are searched; the vocabulary's square root is fastest."""


def uniforms(seed: Sequence[int], group: int, index: int, count: int) -> np.ndarray:
    """Returns the random numbers of a rollout in [0, 1), float64 `[count]`; a function of its seed, group and index."""
    bits = np.random.Philox(np.random.SeedSequence([*seed, group, index]))
    return np.random.Generator(bits).random(count)


class Sampler:
    """Samples the next token of each rollout, or with `greedy` takes the most likely one.

    Distributions are truncated as by transformers' logits processors, in their order: repetition penalty, no EOS before
    `min_new_tokens`, temperature, top_k, top_p. A token is sampled by inverting the cumulative distribution at one
    uniform number: Gumbel noise would take V numbers per token, and this ties a rollout's samples to its own numbers
    and logits.
    """

    def __init__(self, config: RolloutConfig, eos_token_ids: Sequence[int], *, greedy: bool = False) -> None:
        self._config, self._greedy = config, greedy
        self._eos_token_ids = list(eos_token_ids)

    @property
    def penalises(self) -> bool:
        """Whether it needs to know the tokens so far."""
        return self._config.repetition_penalty != 1.0

    def __call__(
        self, logits: Tensor, numbers: Tensor, num_new: Tensor, seen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns tokens int64 `[B]` for logits `[B,V]`, and their untruncated log-probs float32 `[B]` at the
        temperature.

        `numbers` float64 `[B]` are uniform, `num_new` int64 `[B]` counts the response's tokens so far, `seen` bool
        `[B,V]` marks the tokens of prompt and response so far, if the sampler `penalises`. Raises RunFailed if logits
        are not finite.
        """
        logits = logits.float()
        config = self._config
        scaled = logits if config.temperature == 1.0 else logits / config.temperature
        top = scaled.amax(-1, keepdim=True)
        weights = torch.exp(scaled - top)
        totals = weights.sum(-1)
        if not bool(torch.isfinite(totals).all()):
            raise RunFailed("the policy's logits are not finite: it has diverged; lower policy.learning_rate")
        changed = self._penalise(logits, num_new, seen)
        if self._greedy:
            tokens = changed.argmax(-1)
        elif changed is logits:
            tokens = sample_indices(weights, numbers)
        else:
            changed = self._truncate(changed / config.temperature)
            tokens = sample_indices(torch.exp(changed - changed.amax(-1, keepdim=True)), numbers)
        return tokens, (scaled.gather(1, tokens[:, None]) - top)[:, 0] - totals.log()

    def _penalise(self, logits: Tensor, num_new: Tensor, seen: Tensor | None) -> Tensor:
        """Applies the processors before the temperature; returns `logits` itself if no processor is active."""
        config = self._config
        changed = logits
        if self.penalises:
            assert seen is not None
            penalty = config.repetition_penalty
            changed = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        early = num_new < config.min_new_tokens
        if self._eos_token_ids and bool(early.any()):
            changed = changed.clone()
            changed[:, self._eos_token_ids] = changed[:, self._eos_token_ids].masked_fill(early[:, None], -math.inf)
        truncates = config.top_k > 0 or config.top_p < 1.0
        return logits.clone() if truncates and changed is logits else changed

    def _truncate(self, scaled: Tensor) -> Tensor:
        """Sets logits outside top_k and top_p to -inf; the most likely token always stays."""
        config = self._config
        if config.top_k > 0:
            least = scaled.topk(min(config.top_k, scaled.shape[-1]), -1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, -math.inf)
        if config.top_p < 1.0:
            ascending, order = scaled.sort(-1)
            out = ascending.softmax(-1).cumsum(-1) <= 1 - config.top_p
            out[:, -1] = False
            scaled = scaled.masked_fill(out.scatter(1, order, out), -math.inf)
        return scaled


def sample_indices(weights: Tensor, numbers: Tensor) -> Tensor:
    """Returns for each row the index int64 `[B]` at which the running sum of float32 weights `[B,V]` passes its number.

    `numbers` float64 `[B]` in [0, 1) are fractions of the row's sum, which must be above 0. An index of weight 0 is
    never taken. The running sum is taken over blocks, and then within one block, in float64.
    """
    blocks = F.pad(weights, (0, -weights.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    sums = blocks.sum(-1).double()
    block, rest = _search(sums, numbers * sums.sum(-1))
    chosen = blocks[torch.arange(len(blocks), device=blocks.device), block].double()
    return block * BLOCK + _search(chosen, rest)[0]


def _search(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's first index whose running sum exceeds the target, and the target minus the sum before it."""
    running = weights.cumsum(-1)
    # Rounding may have moved the target to the end or beyond.
    target = torch.minimum(target, running[:, -1].nextafter(running.new_zeros(())))[:, None].clamp_min(0)
    index = torch.searchsorted(running, target, right=True)
    return index[:, 0], (target - (running.gather(1, index) - weights.gather(1, index)))[:, 0]


class StopTexts:
    """Finds the token that completes a stop text, by decoding the response's own tokens."""

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        """Raises ConfigError if there is no tokenizer to decode with, or a text is empty."""
        if texts and tokenizer is None:
            raise ConfigError("rollouts.stop has texts, and the policy has no tokenizer", "remove rollouts.stop")
        if "" in texts:
            raise ConfigError("rollouts.stop has an empty text", "remove it")
        self._texts, self._tokenizer = list(texts), tokenizer
        # Almost every token has at least one byte, and a character has at most four tokens.
        self._tail_length = max((len(text.encode()) for text in texts), default=0) + 8
        self._last = {text[-1] for text in texts}
        self._may_end: dict[int, bool] = {}

    def complete(self, tokens: list[int], start: int = 0) -> bool:
        """Whether the last token completes a stop text of tokens from `start`, given that none was completed before."""
        if not self._texts or not self._may_end_in(tokens[-1]):
            return False
        tail = decode(self._tokenizer, tokens[max(start, len(tokens) - self._tail_length) :])
        return any(text in tail for text in self._texts)

    def _may_end_in(self, token: int) -> bool:
        """Whether the token may contain a stop text's last character; decoding every tail would take longer than a
        step.

        Decoded alone, a token may lose blanks at its ends or be a part of a character.
        """
        known = self._may_end.get(token)
        if known is None:
            alone = decode(self._tokenizer, [token])
            known = self._may_end[token] = (
                not alone.strip() or "\ufffd" in alone or any(last.isspace() or last in alone for last in self._last)
            )
        return known


class Environment:
    """Answers a complete stop text in the middle of a response, as a tool does.

    It calls a user's `function(prompt, response)` with both as text, special tokens included, which returns the text to
    append before generation continues, or None to end the response. It must answer the same to the same text, so that a
    resumed run repeats its steps.
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        """Imports the function from `module:function`; raises CheckpointError."""
        self._name, self._tokenizer = name, tokenizer
        self._function = import_function(name)

    def __call__(self, prompt: Prompt, response: list[int]) -> list[int] | None:
        """Returns the tokens to append, or None; raises RunFailed if the function fails or returns anything else."""
        texts = [decode(self._tokenizer, tokens) for tokens in (prompt.tokens.tolist(), response)]
        try:
            answer = self._function(*texts)
        except Exception as e:
            raise RunFailed(f"{self._name} failed on the response {texts[1]!r}: {describe(e)}") from e
        if answer is None:
            return None
        if not isinstance(answer, str):
            raise RunFailed(f"{self._name} returned {type(answer).__name__}; it must return text, or None at the end")
        tokens: list[int] = self._tokenizer.encode(answer, add_special_tokens=False)
        return tokens


def check_environment(rollouts: RolloutConfig, ranks: Ranks = ALONE) -> None:
    """Raises CheckpointError if the function cannot be imported, ConfigError if ranks would each ask their own."""
    if rollouts.environment is None:
        return
    import_function(rollouts.environment)
    if ranks.tensor_size > 1:
        raise ConfigError(
            f"rollouts.environment is {rollouts.environment}, and {ranks.tensor_size} tensor-parallel ranks generate "
            "each response together",
            "lower parallel.tensor_parallel to 1: every other rank generates responses of its own",
        )


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
