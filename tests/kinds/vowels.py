"""A kind of model in one file, as somebody else would add it: its models count the vowels of texts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from guerdon.client.calls import Call, ModelSignature, build, make_request
from guerdon.core import ModelInfo, Score, Sequence
from guerdon.kinds import all_kinds
from guerdon.kinds.kind import Kind, Subcommand
from guerdon.settings.config import ForwardConfig, QueueConfig
from guerdon.settings.fields import setting
from guerdon.settings.sources import read_server_settings
from guerdon.wire import schema
from guerdon.wire.tensors import InferReply, InferRequest


@dataclass
class VowelsConfig(QueueConfig, ForwardConfig):
    """One counter of vowels."""

    truncation: ClassVar[Literal["error"]] = "error"

    kind: Literal["vowels"] = setting("vowels", "Kind of model.", flag=False)
    model: str = setting("aeiou", "The letters that are vowels.", flag=False)
    name: str = setting("vowels", "Name that clients ask for.")


@dataclass(frozen=True)
class Count:
    """A model's answer about one text."""

    number: int

    def numbers(self) -> list[np.ndarray | None]:
        """Returns what two computations must agree on."""
        return [np.array([self.number])]


class Counter:
    """The model that a server loads."""

    encoder = None
    takes_all = False
    max_batch_tokens = 65_536

    def __init__(self, config: VowelsConfig) -> None:
        self._letters = config.model
        self.info = ModelInfo(
            config.name,
            "vowels",
            outputs=("rewards", "vowels"),
            takes_tokens=False,
            path="counted",
            why=config.model,
            source=config.model,
            is_checkpoint=False,
        )

    def watch(self, tick: Callable[..., None]) -> bool:
        """Returns False: it has no layers."""
        return False

    def score(self, sequences: list[Sequence]) -> list[Score]:
        """Returns the count of each text, and the share of its characters as the reward."""
        made = []
        for text in (s.text or "" for s in sequences):
            count = sum(letter in self._letters for letter in text.lower())
            made.append(Score(count / max(1, len(text)), answer=Count(count)))
        return made


class Vowels(Kind):
    """Counts letters."""

    names = ("vowels",)
    settings = VowelsConfig
    command = Subcommand(
        "serve-vowels",
        "Serve counts of vowels.",
        "config host port",
        functools.partial(read_server_settings, cls=VowelsConfig),
        help=("guerdon serve-vowels aeiou", None),
    )

    def load(self, config: VowelsConfig, ranks: Any) -> Counter:
        """Returns the counter."""
        return Counter(config)

    def describe(self, info: ModelInfo) -> str:
        """Returns the console's line."""
        return f"counts {info.why}"

    def tile(self, info: ModelInfo, infos: Iterable[ModelInfo]) -> dict[str, Any]:
        """Returns what the page shows."""
        return {**super().tile(info, infos), "estimates_tokens": True}


COUNTS = schema.Field(
    "vowels",
    "INT64",
    "B 1",
    "answer.number",
    lambda info: isinstance(info, ModelInfo) and "vowels" in info.outputs,
    "the number of a text's vowels",
)


def add() -> None:
    """Adds the kind and its output."""
    all_kinds.add(Vowels())
    schema.add_output(COUNTS)


def count_vowels(texts: list[str], model: str = "vowels") -> Call[list[int]]:
    """Returns the client's call that asks for the texts' counts."""
    request = make_request(texts=texts)

    def to_tensors(signature: ModelSignature, left_s: float) -> InferRequest:
        made = build(request, signature)
        made.outputs = {"vowels": True}
        return made

    def read(reply: InferReply, queue_s: float, compute_s: float) -> list[int]:
        (counts,) = (tensor.data for tensor in reply.outputs)
        return np.ravel(counts).tolist()

    return Call(model, to_tensors, read)
