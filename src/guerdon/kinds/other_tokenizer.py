"""A teacher whose students have another tokenizer: their ids in, the same characters scored, their tokens' rows out.

The student's response is written as text after the teacher's prompt, and tokenised by the teacher's tokenizer. Both
tokenisations are cut where a token of each ends at the same character, into the smallest chunks that both can say. The
teacher's log-prob of a chunk is the sum over its own tokens (Niu et al., arXiv:2606.09456).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from guerdon.core import Score, ScoreReply, ScoreRequest, Truncation
from guerdon.errors import InvalidRequest
from guerdon.kinds.kind import Asks, SampleReader, Served
from guerdon.teacher_core import LogprobQuery, TokenLogprobs

UNALIGNED = -1
"""The chunk of a token that has none."""
_BROKEN = "\ufffd"
_MOST_A_TOKEN = 16
"""A student's tokens that one of the teacher's may stand for; longer rows are not read."""
_CONTEXT = 16
"""Tokens before a response that decide about the blank before its first word."""


class Spelling(Protocol):
    """A tokenizer that tells which characters its tokens are."""

    ends: tuple[int, ...]
    num_ids: int
    special_ids: frozenset[int]
    added_texts: frozenset[str]
    unk_token_id: int | None

    def split(self, tokens: np.ndarray) -> tuple[list[str], list[bool]]: ...

    def spell(self, text: str) -> tuple[np.ndarray, np.ndarray] | InvalidRequest: ...

    def spell_after(self, before: np.ndarray, text: str) -> tuple[np.ndarray, np.ndarray] | InvalidRequest: ...


@dataclass(frozen=True, slots=True)
class Alignment:
    """A student's n scored tokens beside a teacher's: `own` int64 `[n]` and `others` int64 `[k]` are their chunks.

    Chunks count from 0; a token in none has UNALIGNED.
    """

    own: np.ndarray
    others: np.ndarray

    def drop(self, chunks: set[int]) -> None:
        """Makes tokens of these chunks unaligned."""
        for side in (self.own, self.others):
            side[np.isin(side, [*chunks])] = UNALIGNED

    def spread(self, logprobs: np.ndarray, row: np.ndarray) -> TokenLogprobs:
        """Returns rows for the last tokens of the student's `row`: a chunk's sum in equal shares, NaN without one."""
        count = int(self.own.max(initial=UNALIGNED)) + 1
        is_in = self.others >= 0
        totals = np.bincount(self.others[is_in], logprobs[is_in].astype(np.float64), count)[:count]
        shares = totals / np.maximum(np.bincount(self.own[self.own >= 0], minlength=count), 1)
        rows = np.where(self.own >= 0, np.append(shares, np.nan)[self.own], np.nan)
        scored = row[len(row) - len(rows) :].astype(np.int32)
        return TokenLogprobs(rows.astype(np.float32), chunks=self.own.astype(np.int32), tokens=scored)


def align(own: np.ndarray, others: np.ndarray, start: int = 0, *, is_sharp: bool = True) -> Alignment:
    """Returns the smallest chunks of two tokenisations of a text's characters from `start` on.

    `own` and `others` are where each token ends, in half characters, ascending. Unless it `is_sharp`, the first of one
    begins before `start`, and the first chunk is none. A token without characters belongs to what follows it.
    """
    cuts = np.intersect1d(own, others)
    cuts = cuts[(cuts > start) & (cuts % 2 == 0)]
    found = []
    for ends in (own, others):
        is_empty = ends <= np.concatenate([[start], ends[:-1]])
        chunk = np.where(is_empty, np.searchsorted(cuts, ends, "right"), np.searchsorted(cuts, ends, "left"))
        chunk[(chunk >= len(cuts)) | ((chunk == 0) & (not is_sharp))] = UNALIGNED
        found.append(chunk)
    return Alignment(*found)


async def read_as_student(
    reading: SampleReader,
    served: Served,
    student: Spelling,
    prompts: dict[int, str | np.ndarray | InvalidRequest],
    request: ScoreRequest,
    cut: Truncation | None,
) -> Asks:
    """Returns what a request with the student's ids asks of the teacher; `prompts` are its own prompts, by sample."""
    teacher: Any = served.encoder
    queries: list[LogprobQuery] = [LogprobQuery()] * len(request) if request.asks is None else request.asks
    for query in queries:
        if (wanted := _beyond_logprobs(query)) is not None:
            raise InvalidRequest(
                f"{served.info.name} reads another tokenizer's ids, and gives their log-probs alone: leave out {wanted}"
            )
    lengths, most = request.prompt_lengths, _MOST_A_TOKEN * (served.info.max_length or sys.maxsize)
    read_rows: list[tuple[np.ndarray, int, Alignment] | InvalidRequest] = []
    for i, row in enumerate(request.tokens or ()):
        if len(row) > most:
            read_rows.append(
                InvalidRequest(f"the sample has {len(row)} tokens, many more than {served.info.name} takes")
            )
            continue
        length = None if lengths is None else int(lengths[i])
        read = functools.partial(_read_row, row, length, queries[i], prompts.get(i), student, teacher)
        read_rows.append(await reading.run(read))  # a row a turn: each token is decoded
    plan = [None if isinstance(row, InvalidRequest) else row[2] for row in read_rows]
    rows = [row if isinstance(row, InvalidRequest) else row[0] for row in read_rows]
    starts = [0 if isinstance(row, InvalidRequest) else row[1] for row in read_rows]
    asks = [dataclasses.replace(query, start=None, prompt=None) for query in queries]
    sent = dataclasses.replace(request, prompt_lengths=np.array(starts), asks=asks)
    asked = await reading.make_sequences(rows, sent, cut, served)
    asked.plan = (plan, request.tokens)
    return asked


def spread(asked: Asks, reply: ScoreReply) -> ScoreReply:
    """Returns the reply with a row for each of the student's tokens."""
    plan, tokens = asked.plan
    results = [
        Score(result.reward, answer=alignment.spread(result.answer.logprobs, row))
        if isinstance(result, Score)
        else result
        for result, alignment, row in zip(reply.results, plan, tokens, strict=True)
    ]
    return dataclasses.replace(reply, results=results, tokens=tokens, lengths=[len(row) for row in tokens])


def _beyond_logprobs(query: LogprobQuery) -> str | None:
    """Returns the name of what is asked besides log-probs, if anything."""
    wants = {
        "top_k": query.top_k,
        "given ids": query.given is not None,
        "entropy": query.with_entropy,
        "ranks": query.with_ranks,
        "the next token": query.with_next,
        "hidden states": query.with_hidden,
        "mixtures": query.mixture,
    }
    return next((name for name, is_wanted in wants.items() if is_wanted), None)


def _read_row(
    row: np.ndarray,
    prompt_length: int | None,
    query: LogprobQuery,
    prompt: str | np.ndarray | InvalidRequest | None,
    student: Spelling,
    teacher: Spelling,
) -> tuple[np.ndarray, int, Alignment] | InvalidRequest:
    """Returns the teacher's ids, the first that it scores, and how the student's scored tokens lie among these."""
    if isinstance(prompt, InvalidRequest):
        return prompt
    first = query.first(prompt_length) if prompt is None else prompt_length or 0
    if not 0 <= (prompt_length or 0) <= len(row) or not 0 <= first <= max(len(row), 1):
        return InvalidRequest(f"the response begins at token {first}, outside the sample's {len(row)} tokens")
    if len(foreign := row[(row < 0) | (row >= student.num_ids)]):
        return InvalidRequest(
            f"token id {foreign[0]} is outside the student's tokenizer (0 to {student.num_ids - 1}); was it tokenised "
            "for another model?"
        )
    skipped = 0 if prompt is None else max(0, first - _CONTEXT)
    read, first = row[skipped:], first - skipped
    pieces, opens = student.split(read)
    # A special token of the student's means nothing to the teacher, unless it has one of the same name.
    named = zip(read.tolist(), pieces, strict=True)
    shared, unknown = teacher.added_texts, student.unk_token_id
    lost = [t in student.special_ids and (piece not in shared or t == unknown) for t, piece in named]
    is_lost = np.array(lost, bool)
    texts = ["" if lost else piece for lost, piece in zip(is_lost, pieces, strict=True)]
    before = "".join(texts[:first]) if prompt is None else prompt
    start, response = 2 * len(before) if isinstance(before, str) else 0, "".join(texts[first:])
    spelled = teacher.spell(before + response) if isinstance(before, str) else teacher.spell_after(before, response)
    if isinstance(spelled, InvalidRequest):
        return spelled
    ids, ends = spelled
    is_sharp = not start or start in ends
    num_before = int(np.searchsorted(ends, start)) + is_sharp if start else 0
    own = start + 2 * np.cumsum([len(text) for text in texts[first:]], dtype=np.int64) + opens[first:]
    is_sharp &= not first or not opens[first - 1]
    made = align(np.maximum.accumulate(own), ends[num_before:], start, is_sharp=is_sharp)
    is_broken = np.array([_BROKEN in piece for piece in pieces[first:]], bool)
    made.drop({*made.own[is_broken].tolist(), *made.others[ids[num_before:] == teacher.unk_token_id].tolist()})
    made.own[is_lost[first:]] = UNALIGNED
    if isinstance(before, np.ndarray):
        ids, num_before = np.concatenate([before, ids]), len(before)
    # Both have ways to end an answer, which are no characters.
    if len(read) > first and is_lost[-1] and int(read[-1]) in student.ends and (end := teacher.ends):
        count = int(made.own.max(initial=UNALIGNED)) + 1
        made.own[-1] = count
        ids, made = np.append(ids, end[0]), Alignment(made.own, np.append(made.others, count))
    if not num_before and len(ids):  # nothing predicts the first token
        made.drop({int(made.others[0])})
        num_before, made = 1, Alignment(made.own, made.others[1:])
    return ids, num_before, made
