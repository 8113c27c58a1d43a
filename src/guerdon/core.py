"""The nouns of scoring, shared by all rooms; numpy only, so that a client needs nothing more."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from guerdon.errors import GuerdonError
    from guerdon.vocabulary import Decodes

Message = dict[str, Any]
"""One chat message: a dict with `role` and `content`."""


class Signal(IntEnum):
    """The operation of a command."""

    FORWARD = 1
    EXIT = 2
    TRAIN = 3
    VALIDATE = 4
    SAVE = 5
    LOAD = 6
    OFFLOAD = 7
    ONLOAD = 8
    SWITCH = 9
    UNLOAD = 10
    RELEASE = 11
    ESTIMATE = 12
    LEAVE_PATH = 13


MIN_SHARED = 16
"""A shared prefix of fewer tokens is not worth sharing."""

SAME_BITS = "same bits in any batch"
"""What a start on a CPU proves of a row's numbers."""

SHARING = ("packed+shared", "shared")
"""The paths of a forward that compute a shared prefix once."""

WHOLE_GROUP = 2
"""A group may exceed a batch's tokens so many times: in two batches its prefix would be computed twice."""


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the number of leading tokens that two rows of ids share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence to score: token ids, or the text itself for a scorer that reads text.

    `tokens` is int64 `[T]`, empty only if the scorer reads `text`. `group` is equal for sequences that the sender says
    share a prompt; `prompt_length` counts the prompt's tokens. `steps` are the positions (int64 `[K]`, each below T)
    whose values are wanted as step rewards. A scorer of values may leave out the reward unless `wants_reward`.
    `prompt` and `label` come from the sender, for a user's function. If `is_response`, the text is a response without
    its prompt. `width` is the length of the padded row that the tokens were sent in. `ask` is what the model's kind
    asks besides; the queue reads its `answer_bytes` and `array_bytes`, which count in a batch and in an answer. In
    a pair the tokens from `second_start` on have token type 1; None if all have type 0. `adapter` numbers the model
    among those that share a base and its batches.
    """

    tokens: np.ndarray
    text: str | None = None
    group: int | None = None
    prompt_length: int | None = None
    steps: np.ndarray | None = None
    wants_reward: bool = True
    prompt: str | None = None
    reference: Any = None
    is_response: bool = False
    width: int | None = None
    ask: Any = None
    second_start: int | None = None
    adapter: int = 0

    def step_ends(self, separator_ids: tuple[int, ...]) -> np.ndarray:
        """Returns `steps`, else the last token of each separator after the prompt: int64 `[K]`."""
        if self.steps is not None or not 0 < len(separator_ids) <= len(self.tokens):
            return np.empty(0, np.int64) if self.steps is None else self.steps
        windows = np.lib.stride_tricks.sliding_window_view(self.tokens, len(separator_ids))
        ends = np.flatnonzero((windows == separator_ids).all(axis=1)) + len(separator_ids) - 1
        return ends[ends >= (self.prompt_length or 0)]

    @property
    def num_tokens(self) -> int:
        """Length in tokens; for text an estimate of four characters per token."""
        return len(self.tokens) if self.text is None else 1 + len(self.text) // 4


@dataclass(slots=True, eq=False)
class Score:
    """The result for one sequence: `reward` is the scalar, NaN if the model gives none.

    `attributes` are float32 `[A]`, `values` float32 `[T]`, `steps` float32 `[K]`. `answer` is to the `ask`, of the
    kind's own type; its `numbers()` are what two computations of it must agree on. `names` are the attributes' if the
    sample has more than its model names.
    """

    reward: float
    attributes: np.ndarray | None = None
    values: np.ndarray | None = None
    steps: np.ndarray | None = None
    answer: Any = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Truncation:
    """Drops tokens beyond `max_tokens` at `side`, of a pair the longer text's first; None means the model's maximum."""

    max_tokens: int | None
    side: Literal["left", "right"]


@dataclass(slots=True, eq=False)
class ScoreRequest:
    """One client's request to one model: exactly one of `texts`, `messages` and `tokens`, with one entry per sample.

    `groups` and `prompt_lengths` are hints for sharing, `steps` the positions of step rewards, `asks` what the
    model's kind asks besides; each has one entry per sample. `timeout_s` counts from arrival. Requests of higher
    `priority` go first. `wants_rewards` is False if nobody reads the rewards. Clients pad `tokens` to
    `pad_to_length` instead of to the longest of them.

    `prompts` and `references` (any JSON value; `labels` on the wire) are for functions and judges that read them.
    `splits` are the characters at which texts divide into pairs, None for a text that is none; to a model that
    `reads_pairs` a text with a prompt is a pair anyway. With `add_special_tokens` the tokenizer's special tokens are
    added to texts; None adds them to those of such a model. With `completes` texts that the chat template has
    made end as it ends an answer. Without `truncation` the server's setting decides about long samples. `width` is the
    length of the padded rows that the tokens were sent in. With `is_whole` the first invalid sample fails the request,
    and later ones need not be read. A judge that compares waits for the rest of the `cohort`.
    """

    texts: list[str] | None = None
    messages: list[list[Message]] | None = None
    tokens: list[np.ndarray] | None = None
    groups: np.ndarray | None = None
    prompt_lengths: np.ndarray | None = None
    steps: list[np.ndarray] | None = None
    timeout_s: float | None = None
    priority: int = 0
    wants_rewards: bool = True
    pad_to_length: int | None = None
    prompts: list[str] | None = None
    references: list[Any] | None = None
    splits: list[int | None] | None = None
    add_special_tokens: bool | None = None
    completes: bool = False
    truncation: Truncation | None = None
    width: int | None = None
    asks: list[Any] | None = None
    is_whole: bool = False
    cohort: Any = None
    is_checked: ClassVar[bool] = False
    """Whether the form that made the request has checked that the model reads such samples."""

    def __len__(self) -> int:
        return len(self.texts or self.messages or self.tokens or ())


@dataclass(slots=True, eq=False)
class ScoreReply:
    """The answer to a `ScoreRequest`: one `Score` or error per sample, in order.

    `lengths` are the samples' token counts. `queue_s` lasts from the request's arrival until the last sample joined a
    batch, tokenising included; `compute_s` is the sum over the batches with its samples. If the model reads tokens,
    `tokens` are the ids that were computed, and `text` decodes them.
    """

    results: list[Score | GuerdonError]
    lengths: list[int]
    weights_version: str
    queue_s: float = 0.0
    compute_s: float = 0.0
    tokens: list[np.ndarray] = field(default_factory=list)
    text: Decodes | None = None


@dataclass(slots=True, eq=False)
class Scored:
    """A worker's result of FORWARD: one result per sequence, and the version of the weights that gave them."""

    results: list[Score | GuerdonError]
    weights_version: str


@dataclass(slots=True, eq=False)
class Command:
    """A command to the worker of every rank: operation, model and arguments.

    `ask` is what a TRAIN, VALIDATE or ESTIMATE works on. `first_batches` limits a TRAIN to so many global batches;
    `folder` is where SAVE writes and LOAD reads. LOAD of a scorer loads it beside the one that serves, and SWITCH
    swaps the two; UNLOAD removes the one that serves, RELEASE drops the one beside it and frees memory. `lineage`
    is a new number if a client returns to a checkpoint, so that what is learnt from there gets versions of its own;
    None continues the saved lineage, as a restart does. A `plain` FORWARD uses the plain forward, and LEAVE_PATH
    makes it the only one; `why` is the error of the other path.
    """

    signal: Signal
    model: str = ""
    sequences: list[Sequence] = field(default_factory=list)
    ask: Any = None
    first_batches: int | None = None
    folder: str = ""
    lineage: int | None = None
    plain: bool = False
    why: str = ""


class Executor(Protocol):
    """Executes a command on every rank and returns rank 0's result."""

    def execute(self, command: Command) -> Any: ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model's description for transports and clients.

    `outputs` names what it returns, of those in `wire.schema.OUTPUTS`; `attribute_names` are the columns of
    `attributes`, empty if unknown; if the reward is their weighted sum, `attribute_weights` are the weights. Without
    `merges_attributes` the tensor `rewards` has a column for each attribute. `max_length` and `vocab_size` bound what
    is accepted, None if unbounded. `takes_prompts` and `takes_labels` say that a user's function has such parameters;
    prompts also begin a teacher's texts. It gives at most the `max_top_k` likeliest ids, and hidden states of
    `hidden_size` numbers. `path` tells how it runs, and `why`. `source` is the folder, hub id or function that it was
    loaded from. `pooling` names the token that the reward is read from. `step_rule` tells where steps end, and how
    their rewards make the reward; `step_separator_ids` end a step if the request names none, and texts are tokenised
    step by step if it `splits_at` a separator. A gate reads where `gate_ids` stand last, which no sample may lack.
    `vocabulary` is a digest of the tokenizer's tokens and their ids, `tokenizer` tells what ids mean to it (see
    `vocabulary.identity`), `ending` how its chat template writes an answer (see `endings.Ending`). Texts are empty if
    there is none. An encoder `reads_pairs`, with special tokens where its pair template has them. `proofs` are the
    start's lines. Functions, sums and models of other servers are not `is_checkpoint`. If it `has_components`, the
    attributes are what the reward is made of, as a sum's and a judge's. With `adds_attributes` a sample may have more
    than `attribute_names`, with names of its own. Adapters over one model have it as `shared_base`. Its loss reads
    outputs by `activation`. If it `compares`, a sample's reward depends on the others of its group.
    """

    name: str
    kind: str
    outputs: tuple[str, ...] = ("rewards",)
    attribute_names: tuple[str, ...] = ()
    attribute_weights: tuple[float, ...] = ()
    vocab_size: int | None = None
    max_length: int | None = None
    eos_token_id: int | None = None
    takes_text: bool = True
    takes_messages: bool = False
    takes_tokens: bool = True
    takes_prompts: bool = False
    takes_labels: bool = False
    weights_version: str = "1"
    dtype: str = "float32"
    device: str = "cpu"
    path: str = "single"
    why: str = ""
    source: str = ""
    merges_attributes: bool = True
    pooling: str = ""
    step_rule: str = ""
    step_separator_ids: tuple[int, ...] = ()
    splits_at: str = ""
    gate_ids: tuple[int, ...] = ()
    vocabulary: str = ""
    tokenizer: str = ""
    ending: str = ""
    max_top_k: int = 0
    hidden_size: int = 0
    proofs: tuple[str, ...] = ()
    reads_pairs: bool = False
    is_checkpoint: bool = True
    has_components: bool = False
    adds_attributes: bool = False
    shared_base: str = ""
    activation: str = "fitting"
    compares: bool = False

    def names_of(self, num_attributes: int) -> tuple[str, ...]:
        """Returns the attributes' names: LABEL_0, LABEL_1, ... if the model names none, as a user's function."""
        return self.attribute_names or tuple(f"LABEL_{i}" for i in range(num_attributes))

    @property
    def is_by_token(self) -> bool:
        """Whether it returns results for single tokens or steps, whose positions clients count."""
        return not {"values", "step_rewards", "logprobs"}.isdisjoint(self.outputs)
