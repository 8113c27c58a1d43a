"""The nouns of an actor: a prompt, a response to it, and the rollout that a step learns from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from guerdon.core import Message


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt: its `id` is its row in the data, `tokens` int64 `[P]`, `text` what they say.

    `messages` is the conversation that the text was made from, None where it was text from the start.
    """

    id: int
    tokens: np.ndarray
    text: str
    messages: tuple[Message, ...] | None = None


@dataclass(slots=True, eq=False)
class Rollout:
    """One response: `tokens` int64 `[L]` are the prompt and the response, its EOS or stop text included.

    `group` numbers the prompts of one step and `index` the responses to one prompt, so that the two and the step
    name the rollout for good. `is_end` is False where it was cut at the longest response. `logprobs`, float32
    `[L - P]`, are the generating engine's own, of each response token under the distribution that the policy has at
    the sampling temperature, before top_k, top_p and the penalty. `text` is the response without its special tokens,
    and `has_eos` says whether an EOS was its last. `reward` is None until it is there, and where it failed; then
    `error` says why. `values`, float32 `[L]`, are a critic's, one a token.
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
    has_eos: bool = False

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt, P."""
        return len(self.prompt.tokens)

    @property
    def response_length(self) -> int:
        """Tokens of the response, L - P."""
        return len(self.tokens) - len(self.prompt.tokens)
