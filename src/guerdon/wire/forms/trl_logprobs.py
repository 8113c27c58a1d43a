"""TRL's `/get_sequence_logprobs/`, as its own server of older releases (`trl vllm-serve`) answers it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from guerdon.core import ModelInfo, ScoreReply, ScoreRequest
from guerdon.errors import GuerdonError, InvalidRequest
from guerdon.teacher_core import LogprobQuery, TokenLogprobs
from guerdon.wire import schema
from guerdon.wire.bodies import to_ids
from guerdon.wire.forms.form import SOME, Body, FormRequest, TokenId, Url, serves
from guerdon.wire.forms.labels import InBase64, in_base64
from guerdon.wire.forms.logprob_texts import (
    PAIR_BYTES,
    Count,
    Entries,
    NamedTeachers,
    OwnPrompts,
    Temperature,
    Written,
    check_counts,
    number_texts,
    put_prompts,
    said_of,
    written,
)
from guerdon.wire.forms.openai import to_flat_error

Sequences = Annotated[
    list[Annotated[list[TokenId], SOME]], Meta(min_length=1, max_length=SOME.max_length, description="lists of ids")
]


class SequenceLogprobsBody(Body, kw_only=True):
    """Asks about the tokens after each prompt; `logprobs_temperature` is ours, `temperature` changes nothing."""

    example: ClassVar[str] = '{"sequences": [[5, 6, 7, 8]], "prompt_lengths": [2], "top_logprobs": 20}'
    sequences: Sequences
    prompt_lengths: list[Count]
    top_logprobs: Annotated[int, Meta(ge=1, le=2**31 - 1, description="a whole number from 1 up")] = 100
    temperature: float | None = None
    logprobs_temperature: Temperature | None = None
    response_format: Literal["json", "binary"] = "json"
    teacher_prompts: OwnPrompts | None = None
    teachers: NamedTeachers | None = None


class SequenceLogprobs(msgspec.Struct):
    """Lists by sequence and token, best first; the actual token is the last one if it is none of the likeliest."""

    logprobs: list[Written]
    logprob_token_ids: list[Written]


class BinarySequenceLogprobs(msgspec.Struct):
    """Float32 and int32 arrays `shape`, those of the actual tokens `[B,W,1]`; minus infinity and 0 after a row."""

    logprobs_b64: InBase64
    token_ids_b64: InBase64
    actual_logprobs_b64: InBase64
    actual_token_ids_b64: InBase64
    shape: list[int]
    completion_lengths: list[int]


class DetailError(msgspec.Struct):
    """An error of FastAPI."""

    detail: str


def _to_detail(error: GuerdonError) -> tuple[int, DetailError]:
    status, flat = to_flat_error(error)
    return status, DetailError(flat.message)


@serves(
    "/get_sequence_logprobs/",
    "TRL's log-probs of sequences",
    SequenceLogprobs,
    BinarySequenceLogprobs,
    to_error=_to_detail,
    output=schema.LOGPROBS.name,
)
def _sequence_logprobs(body: SequenceLogprobsBody, url: Url) -> FormRequest:
    """The reply has the likeliest ids of each token of the responses, and in binary form the actual ones as well."""
    lengths, count = body.prompt_lengths, len(body.sequences)
    if len(lengths) != count:
        raise InvalidRequest(f"prompt_lengths has {len(lengths)} entries, sequences {count}; send one for each")
    query = LogprobQuery(
        top_k=body.top_logprobs,
        temperature=body.logprobs_temperature or 1.0,
        with_ranks=True,
        top_bytes=PAIR_BYTES,
    )
    tokens = [to_ids(row) for row in body.sequences]
    request = ScoreRequest(tokens=tokens, asks=[query] * count)
    # Nothing predicts a sequence's own first token.
    firsts = [max(1, n) if own is None else n for own, n in zip(put_prompts(body, request), lengths, strict=True)]

    def to_reply(reply: ScoreReply, info: ModelInfo) -> SequenceLogprobs | BinarySequenceLogprobs:
        said = said_of(reply)
        if body.response_format == "json":
            return _in_json(said, tokens, firsts, lengths)
        return _in_binary(said, tokens, firsts, lengths, body.top_logprobs)

    check = check_counts(top_logprobs=body.top_logprobs)
    num_tables = int(body.response_format == "binary")
    return FormRequest(request, to_reply, check, num_tables=num_tables)


def _in_json(
    said: list[TokenLogprobs], tokens: list[np.ndarray], firsts: list[int], lengths: list[int]
) -> SequenceLogprobs:
    made = SequenceLogprobs([], [])
    for one, row, first, length in zip(said, tokens, firsts, lengths, strict=True):
        nothing = ["[]"] * (first - length)
        for into, name in ((made.logprobs, "logprobs"), (made.logprob_token_ids, "ids")):
            into.append(written(chain(nothing, _rows(one, row[first:], name))))
    return made


def _rows(one: TokenLogprobs, targets: np.ndarray, name: str) -> Iterator[str]:
    """Yields for each scored token a list of that field of its entries, best first."""
    for part in Entries.of(one, targets):
        entries = part.by_rank()
        texts = number_texts(getattr(entries, name))
        for size, stop in zip(entries.counts.tolist(), np.cumsum(entries.counts).tolist(), strict=True):
            yield f"[{','.join(texts[stop - size : stop])}]"


def _in_binary(
    said: list[TokenLogprobs], tokens: list[np.ndarray], firsts: list[int], lengths: list[int], count: int
) -> BinarySequenceLogprobs:
    sizes = [len(row) - length for row, length in zip(tokens, lengths, strict=True)]
    shape = (len(said), max(sizes), count)
    values, ids = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int32)
    actual_values, actual_ids = np.full((*shape[:2], 1), -np.inf, np.float32), np.zeros((*shape[:2], 1), np.int32)
    for i, (one, row, first, length) in enumerate(zip(said, tokens, firsts, lengths, strict=True)):
        part = slice(first - length, len(row) - length)
        values[i, part], ids[i, part] = one.top_logprobs, one.top_ids
        actual_values[i, part, 0], actual_ids[i, part, 0] = one.logprobs, row[first:]
    return BinarySequenceLogprobs(
        in_base64(values),
        in_base64(ids, "<i4"),
        in_base64(actual_values),
        in_base64(actual_ids, "<i4"),
        list(shape),
        sizes,
    )
