"""What a kind of model must say; the rest of the server asks a model's kind, and never which kind it is."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Generator, Iterable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np

from guerdon.core import Message, ModelInfo, Score, ScoreReply, ScoreRequest, Sequence, Truncation
from guerdon.errors import GuerdonError, InvalidRequest, Unavailable
from guerdon.settings.config import ServerConfig

T = TypeVar("T")

Steps = Generator[None, None, ListLike[np.ndarray | InvalidRequest]]
"""Tokenises in short steps; returns rows of ids, or their errors."""

PairSteps = Generator[None, None, ListLike[Sequence | InvalidRequest]]
"""The same for pairs of texts."""

Rows = ListLike[np.ndarray | Sequence | str | InvalidRequest]
"""Each sample's ids, its text, or its error."""


class Encoder(Protocol):
    """Turns each text into ids, or into the error that it has; thread-safe."""

    def encode(
        self, texts: list[str], add_special_tokens: bool = False, truncation: Truncation | None = None
    ) -> list[np.ndarray | InvalidRequest]: ...


@runtime_checkable
class Tokenizer(Encoder, Protocol):
    """An encoder that also reads messages and decodes ids; a user's `tokenize_func` is not one."""

    def has_special_tokens(self, text: str) -> bool: ...

    def encode_messages(self, conversations: list[list[Message]]) -> list[np.ndarray | InvalidRequest]: ...

    def encode_in_steps(
        self,
        texts: list[str],
        add_special_tokens: bool,
        truncation: Truncation | None,
        max_tokens: int | None,
        *,
        is_whole: bool = False,
    ) -> Steps: ...

    def encode_pairs(
        self, pairs: ListLike[tuple[str, str]], add_special_tokens: bool = False
    ) -> list[Sequence | InvalidRequest]: ...

    def encode_pairs_in_steps(
        self,
        pairs: ListLike[tuple[str, str]],
        add_special_tokens: bool,
        truncation: Truncation | None,
        max_tokens: int | None,
        *,
        is_whole: bool = False,
    ) -> PairSteps: ...

    def encode_messages_in_steps(
        self,
        conversations: list[list[Message]],
        truncation: Truncation | None,
        max_tokens: int | None,
        *,
        is_whole: bool = False,
    ) -> Steps: ...

    def render(self, conversation: list[Message]) -> str | InvalidRequest: ...

    def render_prompts(self, conversations: list[list[Message]]) -> list[str | InvalidRequest]: ...

    def pieces(self, tokens: np.ndarray) -> list[str]: ...

    def texts_of(self, ids: np.ndarray) -> list[str]: ...


class Served(Protocol):
    """A model that the worker holds, as the service sees it: what it is, and how text becomes its ids.

    What it computes is its `score(sequences)`, as `distributed.commands.Scorer` has it.
    """

    info: ModelInfo
    encoder: Encoder | None
    max_batch_tokens: int
    takes_all: bool


class Numbers(Protocol):
    """Counts and measures for the metrics, by model and label."""

    def add(self, name: str, amount: float, *labels: str) -> None: ...

    def observe(self, name: str, value: float, *labels: str) -> None: ...


class SampleReader(Protocol):
    """Reads one request: tokenises and renders on a few threads, on which the clients take turns.

    `server/reading.py` documents the methods.
    """

    async def run(self, work: Callable[[], T]) -> T: ...

    async def run_over(self, num_rows: int, work: Callable[[], T]) -> T: ...

    async def run_in_parts(self, items: Any, work: Callable[[Any], Any]) -> list[Any]: ...

    async def tokenize(self, steps: Generator[None, None, T], model: str) -> T: ...

    async def read_text(self, served: Served, request: ScoreRequest, cut: Truncation | None) -> Rows: ...

    async def join(
        self, served: Served, request: ScoreRequest
    ) -> tuple[ListLike[str | InvalidRequest], ListLike[str | InvalidRequest]]: ...

    async def read_samples(
        self, served: Served, request: ScoreRequest, cut: Truncation | None
    ) -> tuple[Rows, ScoreRequest]: ...

    async def make_sequences(
        self, rows: Rows, request: ScoreRequest, cut: Truncation | None, served: Served
    ) -> Asks: ...


@dataclass(slots=True, eq=False)
class Asks:
    """What a request asks of a model: sequences to compute, and what is wrong with each, if anything.

    `plan` is what the kind needs to make the samples' results of them.
    """

    served: Served
    sequences: list[Sequence]
    errors: list[InvalidRequest | None]
    plan: Any = None

    def accepted(self) -> list[Sequence]:
        """Returns the sequences with which nothing is wrong."""
        return [s for s, error in zip(self.sequences, self.errors, strict=True) if error is None]

    def reply(self, computed: Iterable[Any], version: str, queue_s: float, compute_s: float) -> ScoreReply:
        """Returns a reply of the accepted sequences' results, with the errors of the others between them."""
        left = iter(computed)
        results: list[Score | GuerdonError] = []
        for error in self.errors:
            result = next(left) if error is None else error
            assert result is not None
            if isinstance(result, Unavailable):
                raise copy.copy(result)  # other requests raise it, too
            results.append(result)
        tokens = [s.tokens for s in self.sequences]
        return ScoreReply(results, [*map(len, tokens)], version, queue_s, compute_s, tokens)


@dataclass(frozen=True, slots=True)
class Subcommand:
    """The command that serves a model of a kind.

    `read` makes the server's settings of the arguments, whose `defaults` may be others than the fields'. `first` are
    the settings that `--help` shows, `help` has the examples and notes.
    """

    name: str
    summary: str
    first: str
    read: Callable[[argparse.Namespace], ServerConfig]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    help: tuple[str, str | None] = ("", None)


class Kind:
    """A kind of model. The methods here are those of a checkpoint that gives rewards; other kinds override them."""

    names: ClassVar[tuple[str, ...]] = ()
    """The `ModelInfo.kind` of its models."""
    settings: ClassVar[type[Any]]
    """The dataclass of its settings."""
    command: ClassVar[Subcommand | None] = None
    """The command that serves such a model, if it has one."""
    is_remote: ClassVar[bool] = False
    """Whether other servers compute it: nothing of it is loaded here."""
    device: ClassVar[str] = ""
    """What its models compute on if nobody knows that; they hold up no device."""

    def owns(self, config: Any) -> bool:
        """Whether these are the settings of a model of this kind."""
        return isinstance(config, self.settings)

    def load(self, config: Any, ranks: Any) -> Any:
        """Returns the scorer of a configured model; raises StartError."""
        raise NotImplementedError

    def num_children(self, config: Any) -> int:
        """Returns the number of child processes that compute such a model, 0 if this process does."""
        return 0

    async def read(self, reading: SampleReader, served: Served, request: ScoreRequest, cut: Truncation | None) -> Asks:
        """Returns what the request asks; raises InvalidRequest if the model cannot read such samples.

        `cut` says what to leave out of samples that are too long.
        """
        rows: Rows | None = request.tokens
        if rows is None:
            rows, _ = await reading.read_samples(served, request, cut)
        return await reading.make_sequences(rows, request, cut, served)

    def finish(self, asked: Asks, reply: ScoreReply, metrics: Numbers) -> ScoreReply:
        """Returns the reply to the request, made of the results of all sequences; in a thread if these are many."""
        return reply

    def tokenizer(self, served: Served) -> Any:
        """Returns what clients may tokenise with."""
        return served.encoder

    # ----------------------------------------------------------------------------------------- what people see

    def describe(self, info: ModelInfo) -> str:
        """Returns the console's line about a served model, without its name."""
        path = info.path + (f" ({info.why})" if info.why else "")
        parts = [info.kind, f"weights {info.weights_version}"]
        if not self.device:
            parts.insert(1, f"{info.dtype} on {info.device}")
        if info.pooling:
            parts.append(f"pooling {info.pooling}")
        if info.is_checkpoint and not info.takes_text:
            parts.append(f"no tokenizer in {info.source}: accepts token ids only")
        return ", ".join([*parts, path])

    def tile(self, info: ModelInfo, infos: Iterable[ModelInfo]) -> dict[str, Any]:
        """Returns what the model's tile on the page shows besides the facts of every model, of all `infos`."""
        return {"components": None, "estimates_tokens": not info.takes_tokens}

    def histories(self, scores: list[Score]) -> Iterable[tuple[str, str, list[np.ndarray]]]:
        """Yields what the page shows over time beside rewards: which history, the line's name, each sample's numbers.

        A history is `components` or `entropies`.
        """
        return ()

    def try_on_page(self, request: ScoreRequest, info: ModelInfo) -> ScoreRequest:
        """Returns what the page asks about samples that its reader tries."""
        return request

    def why_fixed(self, info: ModelInfo, what: str) -> str:
        """Returns why the model cannot be loaded or unloaded (`what`); empty if it can."""
        return ""
