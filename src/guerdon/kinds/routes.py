"""Rows that name their teachers: one of the server's, or a mixture of several, all asked together.

A mixture is computed where its first teacher is (`engine/teacher.py`); here its rows are sent there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np

from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.errors import GuerdonError, InvalidRequest, named
from guerdon.kinds.sum import ask_together
from guerdon.teacher_core import LogprobQuery, MixturePart, Teachers
from guerdon.vocabulary import difference
from guerdon.wire import schema


def names_teachers(request: ScoreRequest) -> bool:
    """Whether a row of the request names its teachers."""
    return any(isinstance(query, LogprobQuery) and query.teachers is not None for query in request.asks or ())


async def ask_teachers(
    request: ScoreRequest,
    default: str,
    info_of: Callable[[str], Awaitable[ModelInfo]],
    score: Callable[..., Coroutine[Any, Any, ScoreReply]],
) -> ScoreReply:
    """Returns the reply of all teachers that the rows name, of `default` to rows that name none.

    `info_of` waits for a model that sleeps and raises for one that is not loaded; `score` asks a model. Raises
    InvalidRequest for the first row whose teachers cannot answer it. The reply's version names each teacher's.
    """
    queries: list[LogprobQuery] = list(request.asks or ())
    rows: dict[str, list[int]] = {}
    infos: dict[str, ModelInfo] = {}
    mixtures: dict[tuple[tuple[str, float], ...], tuple[MixturePart, ...]] = {}
    for i, query in enumerate(queries):
        teachers: Teachers = query.teachers or {default: 1.0}
        try:
            for name in teachers.keys() - infos:
                infos[name] = await info_of(name)
            if (key := tuple(teachers.items())) not in mixtures:
                mixtures[key] = _mixture(teachers, infos)
            for info in (infos[name] for name in teachers):
                if fault := query.find_fault_of_all(info.vocab_size or 0, info.max_top_k):
                    raise InvalidRequest(f"{info.name}: {fault}")
            queries[i] = dataclasses.replace(query, teachers=None, mixture=mixtures[key])
        except GuerdonError as e:
            raise named(f"row {i}, teachers", e) from e
        rows.setdefault(next(iter(teachers)), []).append(i)
    if any(query.with_hidden for query in queries):
        _check_hidden(queries, [await info_of(default), *(infos[name] for name in rows)])
    asks = [score(name, request=_some(request, own, queries)) for name, own in rows.items()]
    replies = await ask_together(asks)
    order = {row: at for at, row in enumerate(row for own in rows.values() for row in own)}
    places = [order[row] for row in range(len(queries))]

    def merged(parts: Iterator[ListLike[Any]]) -> list[Any]:
        flat = [one for part in parts for one in part]
        return [flat[at] for at in places]

    return ScoreReply(
        merged(reply.results for reply in replies),
        merged(reply.lengths for reply in replies),
        _version(rows, queries, replies),
        max(reply.queue_s for reply in replies),
        sum(reply.compute_s for reply in replies),
        merged(reply.tokens for reply in replies),
        replies[0].text,
    )


def _some(request: ScoreRequest, rows: list[int], queries: list[LogprobQuery]) -> ScoreRequest:
    """Returns the request for some of its samples, with these queries."""
    own: dict[str, Any] = {"asks": [queries[row] for row in rows]}
    for name in ("texts", "messages", "tokens", "groups", "prompt_lengths", "steps", "prompts", "references", "splits"):
        values = getattr(request, name)
        if values is not None:
            own[name] = values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows]
    return dataclasses.replace(request, **own)


def _mixture(teachers: Teachers, infos: dict[str, ModelInfo]) -> tuple[MixturePart, ...]:
    """Returns the parts of a mixture, none of a single teacher; raises InvalidRequest if they cannot be mixed."""
    log_total = math.log(math.fsum(teachers.values()))
    parts = tuple(MixturePart(infos[name], math.log(weight) - log_total) for name, weight in teachers.items())
    known = next((part.info for part in parts if part.info.tokenizer), None)
    for info in (part.info for part in parts):
        if not schema.LOGPROBS.has(info):
            raise InvalidRequest(f"{info.name} is no teacher: it gives {', '.join(info.outputs)}")
        if len(parts) > 1 and schema.CHUNKS.has(info):
            raise InvalidRequest(f"{info.name} cannot be mixed with others, because it reads a student's token ids")
        if info.tokenizer and known is not None and (why := difference(known.tokenizer, info.tokenizer)):
            raise InvalidRequest(f"{known.name} and {info.name} cannot be mixed, because token ids mean others: {why}")
    return parts if len(parts) > 1 else ()


def _check_hidden(queries: list[LogprobQuery], infos: list[ModelInfo]) -> None:
    """Raises InvalidRequest unless hidden states of all rows are of one form."""
    if any(query.mixture for query in queries):
        raise InvalidRequest("a mixture has no hidden states; ask each of its teachers")
    if len({(info.hidden_size, info.dtype) for info in infos}) > 1:
        names = ", ".join(dict.fromkeys(info.name for info in infos))
        raise InvalidRequest(f"hidden states of {names} differ in size or dtype; ask for those of one in a request")


def _version(rows: dict[str, list[int]], queries: list[LogprobQuery], replies: list[ScoreReply]) -> str:
    """Returns the names and versions of all teachers that have answered."""
    found: set[tuple[str, str]] = set()
    for (name, own), reply in zip(rows.items(), replies, strict=True):
        for i, result in zip(own, reply.results, strict=True):
            if not queries[i].mixture:
                found.add((name, reply.weights_version))
            elif isinstance(result, Score) and result.answer is not None:
                found.update(result.answer.versions)
    return ";".join(f"{name}={version}" for name, version in sorted(found))
