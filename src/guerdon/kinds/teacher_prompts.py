"""Prompts before responses: texts that are tokenised together, and a teacher's own prompts before a student's ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np

from guerdon.core import ScoreRequest, common_prefix
from guerdon.errors import InvalidRequest
from guerdon.kinds.kind import Rows, SampleReader, Served, Tokenizer
from guerdon.kinds.samples import or_nothing
from guerdon.teacher_core import LogprobQuery
from guerdon.wire.signature import why_no_text

_SHOWN_IDS = 8


async def read_joined(reading: SampleReader, served: Served, request: ScoreRequest) -> tuple[Rows, np.ndarray]:
    """Tokenises each prompt and its response together; returns the rows, and the prompts' lengths in tokens.

    A response whose prompt has other tokens without it gets an error. If a conversation does not end with a
    response, its prompt is empty.
    """
    prompts, joined = await reading.join(served, request)
    asked = dataclasses.replace(request, messages=None)
    distinct = list(dict.fromkeys(map(or_nothing, prompts)))
    together = dataclasses.replace(asked, texts=[*map(or_nothing, joined)])
    rows = list(await reading.read_text(served, together, None))
    alone = await reading.read_text(served, dataclasses.replace(asked, texts=distinct), None)
    ids = dict(zip(distinct, alone, strict=True))
    lengths = np.zeros(len(rows), np.int64)
    for i, (row, text, prompt) in enumerate(zip(rows, joined, prompts, strict=True)):
        before = ids[or_nothing(prompt)]
        fault = next((x for x in (prompt, text, before, row) if isinstance(x, InvalidRequest)), None)
        if isinstance(row, np.ndarray) and isinstance(before, np.ndarray):
            lengths[i] = len(before)
            fault = fault or _changed_seam(before, row)
        rows[i] = fault or row
    return rows, lengths


async def read_under_own_prompts(
    reading: SampleReader, served: Served, request: ScoreRequest
) -> tuple[Rows, ScoreRequest]:
    """Puts the teacher's own prompts before the responses; returns the rows, and the request that they belong to.

    Equal prompts are rendered and tokenised once. A sample without one stays as it is.
    """
    if request.tokens is None or request.asks is None:
        raise InvalidRequest(
            "teacher_prompts go with token ids; of texts and messages, send the teacher's prompt as the prompt"
        )
    texts = await own_prompts(reading, served, request.asks)
    distinct = list({text: None for text in texts.values() if isinstance(text, str)})
    ids: dict[Any, Any] = {}
    if distinct:
        sent = dataclasses.replace(request, tokens=None, texts=distinct, prompt_lengths=None)
        ids = dict(zip(distinct, await reading.read_text(served, sent, None), strict=True))
    lengths = np.zeros(len(request), np.int64) if request.prompt_lengths is None else request.prompt_lengths.copy()
    rows: list[np.ndarray | InvalidRequest] = [*request.tokens]
    asks = list(request.asks)
    for i, (query, row) in enumerate(zip(request.asks, request.tokens, strict=True)):
        if query.prompt is None:
            continue
        before = ids[text] if isinstance(text := texts[i], str) else text
        length, asks[i] = int(lengths[i]), dataclasses.replace(query, prompt=None)
        if isinstance(before, InvalidRequest):
            rows[i] = before
        elif not 0 <= length <= len(row):
            rows[i] = InvalidRequest(f"prompt length {length} lies outside the sample's {len(row)} tokens")
        elif not len(before):
            rows[i] = InvalidRequest(
                "the teacher's own prompt has no tokens, and nothing predicts the response's first"
            )
        else:
            rows[i], lengths[i] = np.concatenate([before, row[length:]]), len(before)
    return rows, dataclasses.replace(request, prompt_lengths=lengths, asks=asks)


async def own_prompts(
    reading: SampleReader, served: Served, queries: ListLike[LogprobQuery]
) -> dict[int, str | np.ndarray | InvalidRequest]:
    """Returns the samples' own prompts by their places: ids as they are, else texts; equal chats are rendered once."""
    found: dict[int, Any] = {i: query.prompt for i, query in enumerate(queries) if query.prompt is not None}
    encoder = served.encoder
    if any(queries[i].start is not None for i in found):
        raise InvalidRequest(
            "start counts tokens of a prompt that teacher_prompts replace; leave start out: the response is scored, "
            "from its first token on, which prompt_lengths say"
        )
    if not all(isinstance(prompt, np.ndarray) for prompt in found.values()) and not isinstance(encoder, Tokenizer):
        raise InvalidRequest(why_no_text(served.info))
    chats = {repr(prompt): prompt for prompt in found.values() if isinstance(prompt, list)}
    if chats:
        assert isinstance(encoder, Tokenizer)
        rendered = dict(zip(chats, await reading.run_in_parts([*chats.values()], encoder.render_prompts), strict=True))
        found |= {i: rendered[repr(prompt)] for i, prompt in found.items() if isinstance(prompt, list)}
    return found


def _changed_seam(prompt: np.ndarray, joined: np.ndarray) -> InvalidRequest | None:
    """Returns an error if the prompt's tokens change with the response appended: the boundary would be ambiguous."""
    same = common_prefix(prompt, joined)
    if same == len(prompt):
        return None
    shown = slice(same, same + _SHOWN_IDS)
    return InvalidRequest(
        f"the tokens change where the prompt ends: from token {same} on the prompt alone has {prompt[shown].tolist()}, "
        f"and with the response {joined[shown].tolist()}; send token ids, or split the text elsewhere"
    )


def is_apart(request: ScoreRequest) -> bool:
    """Whether responses that are text are asked about, whose first token is not known yet."""
    if request.prompt_lengths is not None:
        return False
    if request.texts is not None:
        return request.prompts is not None or request.messages is not None
    return request.messages is not None and any(query.start is None for query in request.asks or ())
