"""Log-probs as the forms of other servers write them: JSON made of whole tables, without an object for each number."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, Protocol

import numpy as np
import orjson
from msgspec import Meta

from guerdon.core import ModelInfo, ScoreReply, ScoreRequest
from guerdon.errors import InvalidRequest
from guerdon.teacher_core import TokenLogprobs, named_teachers, own_prompt
from guerdon.wire import bodies
from guerdon.wire.bodies import to_ids
from guerdon.wire.forms import form
from guerdon.wire.forms.form import check_logprobs
from guerdon.wire.score_tensors import scores_of

LEAST = np.float32(-9999.0)
"""vLLM's number for minus infinity, which JSON does not have."""

OBJECT_BYTES, PAIR_BYTES, TRIPLE_BYTES, TEXT_BYTES = 80, 20, 30, 12
"""Approximate JSON bytes per id: vLLM's object of log-prob, rank and text, an id and a log-prob, SGLang's triple of
both and null, and a text.
"""

_POSITIONS = 1024
"""Positions that are written at once: their numbers take ten times as much memory as Python's strings as in JSON."""

Count = Annotated[int, Meta(ge=0, le=2**31 - 1, description="a whole number from 0 up")]
Temperature = Annotated[float, Meta(gt=0, description="a number above 0")]

_LIST = {"type": "array"}
Written = Annotated[Any, Meta(extra_json_schema=_LIST)]
"""A list that is written while it is sent, `bodies.Written`."""


OwnPrompts = Annotated[
    list[str | list[form.TokenId | dict[str, Any]] | None],
    Meta(
        min_length=1,
        max_length=bodies.MAX_ROWS,
        description="a list with a text, token ids, messages or null for each sample: a prompt of the teacher's own, "
        "in place of the first prompt_lengths tokens; all other tokens are scored",
    ),
]


NamedTeachers = Annotated[
    list[str | dict[str, float] | None],
    Meta(
        min_length=1,
        max_length=bodies.MAX_ROWS,
        description="a list with who answers each sample: a teacher's name, an object of names and weights, or null",
    ),
]


class _AsksTeachers(Protocol):
    """A body with keys that are ours: `teacher_prompts`, `teachers`, and `prompt_lengths` for forms that have none."""

    teacher_prompts: list[Any] | None
    teachers: list[Any] | None

    @property
    def prompt_lengths(self) -> list[int] | None: ...


def find_responses(body: _AsksTeachers, count: int) -> list[int | None]:
    """Returns where each of so many samples' response begins after a prompt of the teacher's own, None without."""
    for name in ("teacher_prompts", "teachers", "prompt_lengths"):
        if (values := getattr(body, name)) is not None and len(values) != count:
            raise InvalidRequest(f"{name} has {len(values)} entries for {count} samples; send one for each")
    prompts, lengths = body.teacher_prompts or [None] * count, body.prompt_lengths or [0] * count
    return [None if one is None else n for one, n in zip(prompts, lengths, strict=True)]


def put_prompts(body: _AsksTeachers, request: ScoreRequest) -> list[int | None]:
    """Adds the teachers and their own prompts to the request's queries; returns what `find_responses` does."""
    found, asks = find_responses(body, len(request)), request.asks or []
    if body.prompt_lengths is not None:
        request.prompt_lengths = to_ids(body.prompt_lengths)
    for i, value in enumerate(body.teacher_prompts or ()):
        if (prompt := own_prompt(value, f"teacher_prompts[{i}]")) is not None:
            asks[i] = replace(asks[i], prompt=prompt, start=None)  # replies say where the response begins
    for i, value in enumerate(body.teachers or ()):
        asks[i] = replace(asks[i], teachers=named_teachers(value, f"teachers[{i}]"))
    return found


def said_of(reply: ScoreReply) -> list[TokenLogprobs]:
    """Returns the teacher's answer for each sample; raises the first failed row's error."""
    said = []
    for score in scores_of(reply):
        assert score.answer is not None
        said.append(score.answer)
    return said


def check_counts(**counts: int) -> Callable[[ModelInfo], None]:
    """Returns a check that the model is a teacher which gives so many ids; the names are the body's keys."""

    def check(info: ModelInfo) -> None:
        check_logprobs(info)
        most = min(info.max_top_k, info.vocab_size or 0)
        for name, count in counts.items():
            if count > most:
                raise InvalidRequest(
                    f"{name} is {count}; {info.name} gives at most {most} ids for each token, as --max-top-k and its "
                    "vocabulary allow"
                )

    return check


def number_texts(numbers: np.ndarray) -> list[str]:
    """Returns each number as JSON: float32 in the fewest digits, minus infinity as LEAST."""
    if not numbers.size:
        return []
    if numbers.dtype == np.float32:
        numbers = np.maximum(numbers, LEAST)
    flat = np.ascontiguousarray(numbers).reshape(-1)
    return orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].decode().split(",")


def string_texts(strings: list[str]) -> list[str]:
    """Returns each string as JSON."""
    return [orjson.dumps(text.encode(errors="replace").decode()).decode() for text in strings]


def written(parts: Iterable[str]) -> bodies.Written:
    """Returns the list of the parts, which are JSON and are made while the list is sent."""

    def pieces() -> Iterator[bytes]:
        left, between = iter(parts), "["
        while some := list(islice(left, _POSITIONS)):
            yield (between + ",".join(some)).encode()
            between = ","
        yield b"[]" if between == "[" else b"]"

    return bodies.Written(pieces())


def position_slices(count: int) -> Iterator[slice]:
    """Yields slices of as many positions as are written at once."""
    return (slice(first, min(first + _POSITIONS, count)) for first in range(0, count, _POSITIONS))


@dataclass(frozen=True, slots=True)
class Entries:
    """Ids with their log-probs and ranks at consecutive positions, flat; position i has `counts[i]` of them.

    The actual token comes first, the likeliest others follow, best first. `places` are the positions of the ids.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    counts: np.ndarray
    first: int = 0

    @property
    def places(self) -> np.ndarray:
        return self.first + np.repeat(np.arange(len(self.counts)), self.counts)

    @classmethod
    def of(cls, said: TokenLogprobs, targets: np.ndarray, first: int = 0) -> Iterator[Entries]:
        """Yields some positions at a time, from `first` on: the actual tokens `targets` and the likeliest ids."""
        logprobs, ranks, ids, values = said.logprobs, said.ranks, said.top_ids, said.top_logprobs
        assert logprobs is not None and ranks is not None
        for part in position_slices(len(targets)):
            if ids is None or values is None:
                counts = np.ones(part.stop - part.start, np.int64)
                yield Entries(targets[part].astype(np.int32), logprobs[part], ranks[part], counts, first + part.start)
            else:
                made = _merged(targets[part], logprobs[part], ranks[part], ids[part], values[part])
                yield replace(made, first=first + part.start)

    def by_rank(self) -> Entries:
        """Returns the same with the best first at each position."""
        order = np.lexsort((self.ranks, np.repeat(np.arange(len(self.counts)), self.counts)))
        return Entries(self.ids[order], self.logprobs[order], self.ranks[order], self.counts, self.first)

    @classmethod
    def after(cls, said: TokenLogprobs, count: int) -> Entries:
        """Returns the `count` likeliest ids after the last token; the best is the completion.

        To vLLM the prompt is no context of their texts, as of a first token's.
        """
        assert said.next_ids is not None and said.next_logprobs is not None
        count = max(1, min(count, len(said.next_ids)))
        ranks = np.arange(1, count + 1, dtype=np.int32)
        return cls(said.next_ids[:count], said.next_logprobs[:count], ranks, np.array([count]))


def _merged(
    targets: np.ndarray,
    logprobs: np.ndarray,
    ranks: np.ndarray,
    top_ids: np.ndarray,
    top_logprobs: np.ndarray,
) -> Entries:
    is_actual = top_ids == targets[:, None]
    places = np.arange(1, top_ids.shape[1] + 1, dtype=np.int32)
    # Among the likeliest, equal ones have ranks in their order.
    ranks = np.where(is_actual.any(1), is_actual.argmax(1).astype(np.int32) + 1, ranks)
    keep = np.concatenate([np.ones((len(targets), 1), bool), ~is_actual], 1)
    ids = np.concatenate([targets.astype(np.int32)[:, None], top_ids], 1)
    values = np.concatenate([logprobs[:, None], top_logprobs], 1)
    all_ranks = np.concatenate([ranks[:, None], np.broadcast_to(places, top_ids.shape)], 1)
    return Entries(ids[keep], values[keep], all_ranks[keep], keep.sum(1))


def write_positions(entries: Entries, texts: list[str]) -> list[str]:
    """Returns vLLM's object of each position: by id the log-prob, the rank and the token's text, which is JSON."""
    flat = [""] * (4 * len(entries.ids))
    flat[0::4], flat[1::4] = number_texts(entries.ids), number_texts(entries.logprobs)
    flat[2::4], flat[3::4] = number_texts(entries.ranks), texts
    made, start = [], 0
    for count in entries.counts.tolist():
        made.append(_template(count) % tuple(flat[4 * start : 4 * (start + count)]))
        start += count
    return made


def id_texts(ids: np.ndarray, texts_of: Callable[[np.ndarray], list[str]] | None) -> list[str]:
    """Returns the JSON of each id's own text, null without `texts_of`."""
    if texts_of is None:
        return ["null"] * len(ids)
    unique, places = np.unique(ids, return_inverse=True)
    texts = string_texts(texts_of(unique))
    return [texts[i] for i in places.tolist()]


def triples(ids: np.ndarray, logprobs: np.ndarray, texts_of: Callable[[np.ndarray], list[str]] | None) -> list[str]:
    """Returns SGLang's `[log-prob, id, text]` of each id."""
    columns = zip(number_texts(logprobs), number_texts(ids), id_texts(ids, texts_of), strict=True)
    return list(map("[%s,%s,%s]".__mod__, columns))


@functools.cache
def _template(count: int) -> str:
    return "{" + ",".join(['"%s":{"logprob":%s,"rank":%s,"decoded_token":%s}'] * count) + "}"
