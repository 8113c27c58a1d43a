"""The data of an actor: a prompt, a response to it, and the rollout that a step learns from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NotRequired, Self, TypedDict

import numpy as np

from guerdon.core import Message
from guerdon.endings import Ending
from guerdon.errors import ConfigError
from guerdon.settings.actors import RolloutConfig

MAX_BATCH_ROLLOUTS = 256
"""Beyond about this many rows a matrix product on a CPU gets no faster, and the key-value cache grows.

It does not bound memory: if long responses of so many rows do not fit, lower `rollouts.max_batch_rollouts`.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt: its `id` is its row in the data, `tokens` int64 `[P]`, `text` the same as text.

    `messages` is the conversation that was rendered, and `ending` how its chat template ends the answer; both are None
    if the data has plain text.
    """

    id: int
    tokens: np.ndarray
    text: str
    messages: tuple[Message, ...] | None = None
    ending: Ending | None = None


class Draw(TypedDict):
    """How a generator draws `num` responses to each prompt.

    `seed` are numbers of at least 0; with `greedy` it takes the most likely token instead of sampling.
    """

    num: int
    config: RolloutConfig
    seed: tuple[int, ...]
    greedy: NotRequired[bool]


@dataclass(slots=True, eq=False)
class Rollout:
    """One response: `tokens` int64 `[L]` are the prompt and the response, including its EOS or stop text.

    `group` numbers the prompts of one step and `index` the responses to one prompt, so that step, group and index
    identify the rollout. `is_end` is False if it was truncated at the longest response. `logprobs`, float32 `[L - P]`,
    are the generating engine's, at the sampling temperature before top_k, top_p and the repetition penalty. `text` is
    the response without special tokens, and `has_eos` says whether it ended by an EOS. `reward` is None until it
    arrives, and if it failed; then `error` says why. `values`, float32 `[L]`, are a critic's, one per token;
    `ref_logprobs`, float32 `[L - P]`, are those of a reference or teacher on a server. `observed`, bool `[L - P]`,
    marks the tokens that an environment wrote, whose `logprobs` are 0; None if there are none.
    """

    prompt: Prompt
    group: int
    index: int
    tokens: np.ndarray
    is_end: bool
    logprobs: np.ndarray
    text: str = ""
    reward: float | None = None
    error: str | None = None
    values: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    has_eos: bool = False
    observed: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        group: int,
        index: int,
        response: list[int],
        logprobs: list[float],
        is_end: bool,
        tokenizer: Any,
        eos_token_ids: Collection[int],
        observed: np.ndarray | None = None,
    ) -> Self:
        """Builds the rollout of a finished response of at least one token, with its text."""
        has_eos = is_end and response[-1] in eos_token_ids  # that of a message within an observation ends nothing
        return cls(
            prompt=prompt,
            group=group,
            index=index,
            tokens=np.concatenate([prompt.tokens, np.array(response, dtype=np.int64)]),
            is_end=is_end,
            logprobs=np.array(logprobs, dtype=np.float32),
            text=response_text(tokenizer, response, has_eos),
            has_eos=has_eos,
            observed=observed,
        )

    @property
    def mask(self) -> np.ndarray:
        """Float32 `[L - P]`: 1 at the tokens that the policy sampled, 0 at those that an environment wrote."""
        if self.observed is None:
            return np.ones(self.response_length, np.float32)
        return 1 - self.observed.astype(np.float32)

    @property
    def prompt_length(self) -> int:
        """P, the tokens of the prompt."""
        return len(self.prompt.tokens)

    @property
    def response_length(self) -> int:
        """L - P, the tokens of the response."""
        return len(self.tokens) - len(self.prompt.tokens)

    @property
    def completed(self) -> np.ndarray:
        """`tokens` as a reward model should read them, int64: ended as the prompt's chat template ends an answer.

        The ending replaces the EOS. A truncated response gets it as well, as it would if sent as messages.
        """
        ending = self.prompt.ending
        if ending is None:
            return self.tokens
        tokens = np.array(ending.tokens, np.int64)
        if self.has_eos:
            return np.concatenate([self.tokens[:-1], tokens])
        stopped = self.response_length if self.is_end else 0  # a stop text may be the start of the ending
        known = min(stopped, len(tokens))
        while known and not np.array_equal(self.tokens[-known:], tokens[:known]):
            known -= 1
        return np.concatenate([self.tokens, tokens[known:]])


def response_text(tokenizer: Any, tokens: list[int], has_eos: bool) -> str:
    """Returns a response as text, without its EOS and other special tokens; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    return decode(tokenizer, tokens[:-1] if has_eos else tokens, skip_special_tokens=True)


def decode(tokenizer: Any, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
    """Returns the tokens as text, with the blanks that they stand for."""
    text: str = tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return text


def max_response_length(prompt: Prompt, config: RolloutConfig, max_length: int | None) -> int:
    """Returns the tokens that a response may have, at least 1; raises ConfigError if the prompt leaves no room."""
    room = config.max_new_tokens
    if max_length is not None:
        room = min(room, max_length - len(prompt.tokens))
    if room < 1 or not len(prompt.tokens):
        raise ConfigError(
            f"prompt {prompt.id} has {len(prompt.tokens)} tokens, and the policy takes at most {max_length}",
            "lower data.max_prompt_length, and remove empty prompts",
        )
    return room
