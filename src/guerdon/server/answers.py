"""Answers: about how large they will be, their assembly from a job's results, and their delivery."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable

from guerdon.core import ModelInfo, Score, ScoreReply, Sequence
from guerdon.errors import GuerdonError, InvalidRequest, Unavailable
from guerdon.server.batching.jobs import Job

_NUMBER_BYTES = 4

Hold = Callable[[list[Sequence], ModelInfo], None]
"""Makes room for the answer about the sequences; raises Overloaded if there is none."""


def hold_nothing(sequences: list[Sequence], info: ModelInfo) -> None:
    """Makes no room: the caller bounds its answers itself."""


def num_bytes(sequences: list[Sequence], info: ModelInfo, num_tables: int) -> int:
    """Returns about the bytes of the arrays that will answer the sequences, 0 if each has only a few numbers.

    `num_tables` tables are made of them besides, whose rows are as long as the longest.
    """
    if not info.is_by_token:
        return 0
    rows = [_NUMBER_BYTES * s.num_tokens if s.ask is None else s.ask.array_bytes for s in sequences]
    return sum(rows) + num_tables * len(rows) * max(rows, default=0)


def assemble(job: Job, version: str, sequences: list[Sequence], errors: list[InvalidRequest | None]) -> ScoreReply:
    """Puts the job's results between the `errors`; `version` is the weights' if nothing was computed."""
    computed = iter(job.results)
    results: list[Score | GuerdonError] = []
    for error in errors:
        result = next(computed) if error is None else error
        assert result is not None
        if isinstance(result, Unavailable):
            raise copy.copy(result)  # other requests raise it, too
        results.append(result)
    queue_s = max(0.0, job.taken - job.arrived) if job.sequences else 0.0
    lengths, tokens = [len(s.tokens) for s in sequences], [s.tokens for s in sequences]
    return ScoreReply(results, lengths, job.weights_version or version, queue_s, job.compute_s, tokens)


def deliver(jobs: list[Job], loop: asyncio.AbstractEventLoop | None) -> None:
    """Wakes all waiters for the jobs on `loop` at once; thread-safe."""
    if not jobs:
        return
    assert loop is not None, "start() comes first"
    try:
        loop.call_soon_threadsafe(_resolve, jobs)
    except RuntimeError:
        if not loop.is_closed():  # nobody waits any more
            raise


def _resolve(jobs: list[Job]) -> None:
    for job in jobs:
        assert isinstance(job.owner, asyncio.Future)
        if not job.owner.done():
            job.owner.set_result(None)
