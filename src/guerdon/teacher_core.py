"""The nouns of a teacher, a frozen language model that gives log-probs of given tokens; numpy only, as `core`."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from guerdon.core import Message, ModelInfo, ScoreRequest, Sequence
from guerdon.errors import InvalidRequest

ANSWER_BYTES_A_TOKEN = 1 << 16
"""In a batch, so many bytes of answers count as much as a computed token, so that a batch's memory is bounded."""
MAX_ANSWER_BYTES = 1 << 30
"""Largest answer of a request, its samples padded to the longest."""


_LARGEST_WEIGHT = 1e30
"""Sums of weights stay finite."""

OwnPrompt = str | np.ndarray | list[Message]
"""A teacher's own prompt: a text, token ids (int64 `[P]`) or a conversation, which its chat template renders."""


def own_prompt(value: Any, name: str) -> OwnPrompt | None:
    """Returns a JSON value as a teacher's own prompt, None for null; raises InvalidRequest with the `name`."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(type(token) is int and 0 <= token < 1 << 63 for token in value):
            return np.array(value, np.int64)
        if all(isinstance(message, dict) and "role" in message for message in value):
            return value
    raise InvalidRequest(f"{name} must be a text, a list of token ids, a list of messages with a role, or null")


Teachers = dict[str, float]
"""Teachers of one server by name: one, or the weights of a mixture of their distributions."""


def named_teachers(value: Any, name: str) -> Teachers | None:
    """Returns the teachers that a row names, None for null; raises InvalidRequest with the `name`.

    The value is a teacher's name, or an object of names and weights; weights count relative to their sum.
    """
    if isinstance(value, str):
        return {value: 1.0}
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) for key in value):
        raise InvalidRequest(f"{name} must be a teacher's name, an object of teachers' names and weights, or null")
    for teacher, weight in value.items():
        is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < _LARGEST_WEIGHT:
            raise InvalidRequest(
                f"{name}: the weight of {teacher} is {weight}; weights must be finite numbers above 0, so leave out a "
                "teacher that does not count"
            )
    return {teacher: float(weight) for teacher, weight in value.items()}


@dataclass(frozen=True, slots=True)
class MixturePart:
    """One teacher of a mixture, and the logarithm of its share."""

    info: ModelInfo
    log_weight: float


@dataclass(frozen=True, slots=True, eq=False)
class LogprobQuery:
    """A query about one sequence of T tokens.

    It scores the n = T - `start` tokens from position `start` on; `start` is at least 1, because the first token has no
    log-prob. If it is None, the response's tokens are asked, or without a prompt's length all but the first.

    `top_k` is how many of the likeliest ids are wanted at each of these positions. `given` are ids whose log-probs are
    wanted: int64 `[n,G]`, more rows only if they hold nothing but pads, or `[G]`, the same ids at every position. -1 is
    a pad. `with_next` requests the likeliest ids after the last token. `with_hidden` asks for the hidden states that
    the head turns into logits, in the model's dtype, or with `rounds_hidden` in bfloat16. `top_bytes` and `given_bytes`
    are the reply's bytes per `top_k` and per `given` id.

    `with_rest` asks for the probability mass outside the likeliest ids.

    `teachers` answer in place of the model that the request names; the service sends the query to them. Of several it
    makes a `mixture`: the logarithm of the weighted mean of their probabilities, in place of one's log-probs. `prompt`
    is a prompt of the teacher's own, which replaces the sample's: the response is scored after it.

    If it `ends_in_placeholder`, the sample ends before its last token, which stands for any that may follow.

    Logits are divided by `temperature`, before the softmax and for everything but hidden states. Without
    `with_logprobs` nothing is computed by the head unless another field needs it.
    """

    start: int | None = None
    prompt: OwnPrompt | None = None
    teachers: Teachers | None = None
    mixture: tuple[MixturePart, ...] = ()
    top_k: int = 0
    given: np.ndarray | None = None
    temperature: float = 1.0
    with_logprobs: bool = True
    with_entropy: bool = False
    with_ranks: bool = False
    with_rest: bool = False
    with_next: bool = False
    with_hidden: bool = False
    rounds_hidden: bool = False
    ends_in_placeholder: bool = False
    top_bytes: int = 8
    given_bytes: int = 4
    answer_bytes: int = 0
    array_bytes: int = 0

    def with_given(self, ids: np.ndarray) -> LogprobQuery:
        """Returns the query with these ids given."""
        return dataclasses.replace(self, given=ids)

    def sized(self, num_asked: int, hidden_bytes: int) -> LogprobQuery:
        """Returns the query with the sizes of its answer about so many tokens; a hidden state has `hidden_bytes`.

        `answer_bytes` is the size as it is sent, `array_bytes` that of the arrays that it is made of.
        """
        hidden = hidden_bytes if self.with_hidden else 0
        a_token = 4 + self.top_bytes * (self.top_k + 1) + self.given_bytes * self.num_given + hidden
        arrays = 12 + 8 * self.top_k + 4 * self.num_given + hidden
        arrays += sum(4 * part.info.hidden_size for part in self.mixture)
        return dataclasses.replace(self, answer_bytes=num_asked * a_token, array_bytes=num_asked * arrays)

    def first(self, prompt_length: int | None) -> int:
        """Returns the position of the first asked token."""
        return max(1, prompt_length or 1) if self.start is None else self.start

    @property
    def needs_head(self) -> bool:
        """Whether anything is asked that is made of logits."""
        wants = self.with_logprobs or self.with_entropy or self.with_ranks or self.with_rest or self.with_next
        return wants or self.top_k > 0 or self.given is not None

    @property
    def num_given(self) -> int:
        """How many ids are given for each position."""
        return 0 if self.given is None else self.given.shape[-1]

    def find_fault_of_all(self, vocab_size: int, max_top_k: int) -> str | None:
        """Returns the query's error independent of the sequence, if any."""
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            return f"the temperature is {self.temperature:g}; it must be finite and above 0"
        widest = min(max_top_k, vocab_size)
        if not 0 <= self.top_k <= widest:
            return f"top_k is {self.top_k}; it must be from 0 to {widest}"
        if self.num_given > max_top_k:
            return f"{self.num_given} ids are given for each position; at most {max_top_k} can be"
        return None

    def find_fault(self, tokens: int, prompt_length: int | None, vocab_size: int) -> str | None:
        """Returns the query's error for a sequence of so many tokens, if any."""
        first = self.first(prompt_length)
        if first < 1:
            return f"start is {first}, but the first token has no log-prob; send at least 1"
        # The first token of a sequence of one has nothing before it, and is simply not asked.
        if first > max(tokens, 1):
            return f"start is {first}, after the end of the sample's {tokens} tokens"
        if (given := self.given) is None:
            return None
        num_asked = tokens - first
        if given.ndim == 2 and len(given) < num_asked:
            return f"ids are given for {len(given)} positions, and {num_asked} tokens are asked"
        if given.ndim == 2 and (given[num_asked:] != -1).any():
            return f"ids are given for more than the {num_asked} tokens that are asked; pad the rows after them with -1"
        strange = given[(given < -1) | (given >= vocab_size)]
        if len(strange):
            return f"the given id {strange[0]} is outside the vocabulary (0 to {vocab_size - 1}; -1 is a pad)"
        return None


@dataclass(slots=True, eq=False)
class TokenLogprobs:
    """A teacher's answer for the n scored tokens of one sequence; outputs that were not requested are None.

    `logprobs` and `entropy` (natural logarithms) are float32 `[n]`; `ranks` are int32 `[n]`, how many ids are at least
    as likely as the actual token, itself included. `top_ids` int32 and `top_logprobs` float32, both `[n,top_k]`, are
    the likeliest ids, best first; `rest` is float32 `[n]`, the logarithm of the probability of all other ids together,
    minus infinity if there are none. `given_logprobs` are float32 `[n,G]`, 0 at pads. `next_ids` int32 and
    `next_logprobs` float32, both `[max(1,top_k)]`, are the likeliest ids after the last token.

    `tokens`, int32 `[n]`, are the scored tokens themselves.

    Row r of `hidden`, `[n,H]`, is the head's input for the r-th scored token: float32 or float16, or uint16 with the
    bits of bfloat16.

    `chunks` are int32 `[n]` if the asker has another tokenizer: which tokens' log-probs are shares of one sum, -1 for a
    token that has none, whose log-prob is NaN. `versions` are the names and weights' versions of a mixture's teachers.
    """

    logprobs: np.ndarray | None = None
    entropy: np.ndarray | None = None
    ranks: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    rest: np.ndarray | None = None
    given_logprobs: np.ndarray | None = None
    next_ids: np.ndarray | None = None
    next_logprobs: np.ndarray | None = None
    hidden: np.ndarray | None = None
    chunks: np.ndarray | None = None
    tokens: np.ndarray | None = None
    versions: tuple[tuple[str, str], ...] = ()

    def numbers(self) -> list[np.ndarray | None]:
        """Returns what two computations of it must agree on: ids may be tied."""
        return [self.logprobs, self.entropy, self.top_logprobs, self.rest, self.given_logprobs, self.next_logprobs]

    @property
    def num_asked(self) -> int:
        """How many tokens were asked about."""
        tables = (self.logprobs, self.entropy, self.ranks, self.top_ids, self.given_logprobs, self.hidden)
        return max((len(table) for table in tables if table is not None), default=0)

    @property
    def num_bytes(self) -> int:
        """Size of all arrays."""
        return sum(array.nbytes for name in self.__slots__ if isinstance(array := getattr(self, name), np.ndarray))


@dataclass(frozen=True, slots=True)
class HeadFile:
    """A teacher's output head as a safetensors file of `num_bytes`, whose `pieces` are read when they are sent.

    `digest` covers the tensors and all that is needed to make logits with them; it is in the file's metadata, too.
    """

    digest: str
    weights_version: str
    num_bytes: int
    pieces: Callable[[], Iterator[bytes | memoryview]]


NEXT_TOKENS = "next_tokens"
"""The interface of a model for `NextTokenRequest`; every teacher and every judge has it."""


@dataclass(slots=True, eq=False)
class NextTokenRequest(ScoreRequest):
    """Asks a teacher, or the model of a judge without its rubric, for the log-probs of `ids` after each sample.

    The text or token ids `shared` precede each sample, or follow it if `is_item_first`. Both parts are tokenised by
    themselves, a text of `shared` with special tokens if `shared_special_tokens`. `ids` are int64 `[G]`. Nobody reads
    rewards.
    """

    ids: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    shared: str | np.ndarray = ""
    is_item_first: bool = False
    is_checked: ClassVar[bool] = True
    shared_special_tokens: bool = False

    def __post_init__(self) -> None:
        self.wants_rewards = False

    def sequence(self, item: np.ndarray, shared: np.ndarray) -> Sequence:
        """Returns the sequence of a sample's token ids; its last token is a placeholder for the one asked about."""
        parts = (item, shared) if self.is_item_first else (shared, item)
        row = np.concatenate([*parts, self.ids[:1]])
        query = LogprobQuery(start=max(1, len(row) - 1), given=self.ids, with_logprobs=False, ends_in_placeholder=True)
        return Sequence(row, wants_reward=False, ask=query)
