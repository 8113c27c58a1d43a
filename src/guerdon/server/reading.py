"""Reads a request's samples for a model: text becomes token ids, long samples are cut, wrong ones named."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Callable, Generator
from collections.abc import Sequence as ListLike
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from guerdon.core import Message, ModelInfo, ScoreRequest, Sequence, Truncation, common_prefix
from guerdon.endings import Ending
from guerdon.errors import InvalidRequest
from guerdon.judge_core import Plan, Sample
from guerdon.messages import before_response, response
from guerdon.next_tokens import NextTokenRequest
from guerdon.server import judgements, tracing, truncating
from guerdon.server.batching.sharing import FairTurns
from guerdon.server.catalog import Asked, Entry, Judge, Served, Tokenizer
from guerdon.teacher_core import MAX_ANSWER_BYTES
from guerdon.wire.signature import why_no_text

T = TypeVar("T")

log = logging.getLogger(__name__)

INLINE_BYTES = 1 << 18
"""Work on more bytes runs in a thread: the event loop would be blocked for more than a few milliseconds."""

MANY_ROWS = 1024
"""Work on more samples, one after the other, runs in a thread."""

NUM_THREADS = 2
_RENDERED_AT_ONCE = 64
_SHOWN_IDS = 8
_SHOWN = 60

Parts = ListLike[str | InvalidRequest]
"""A part of each sample's text, or its error."""

Rows = ListLike[np.ndarray | Sequence | str | InvalidRequest]
"""Each sample's ids, its text, or its error."""


class Workers:
    """A few threads, on which the clients take turns: few, because what they do holds the GIL part of the time."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=f"guerdon-{name}")
        self._turns = FairTurns(NUM_THREADS)

    def close(self) -> None:
        """Ends the threads; cancels waiting work."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """Runs `work` on one of the threads at the client's turn, which lasts until `work` ends."""
        await self._turns.acquire(client)
        try:
            done = asyncio.get_running_loop().run_in_executor(self._threads, work)
        except BaseException:
            self._turns.release()
            raise
        done.add_done_callback(lambda _: self._turns.release())
        return await asyncio.shield(done)

    async def run_if(self, is_long: bool, client: str, work: Callable[[], T]) -> T:
        """Runs `work`, on one of the threads if it `is_long`."""
        return await self.run(client, work) if is_long else work()


class Reader(Workers):
    """Reads requests for every model; tokenises on its threads."""

    def __init__(self) -> None:
        super().__init__("tokenise")
        self._warned: set[ModelInfo] = set()

    async def read(
        self, entry: Entry, request: ScoreRequest, client: str
    ) -> tuple[Served, list[Sequence], list[InvalidRequest | None], Plan | None]:
        """Returns the current scorer, the samples' sequences, and each sample's error, if any.

        A judge's sequences are the questions of its plan, which comes last. Raises InvalidRequest if the model cannot
        read such samples, Unavailable if it is unloaded.
        """
        while True:
            served = entry.loaded()
            cut = truncating.truncation(request, entry.config, served.info)
            check(served, request)
            lengths = request.prompt_lengths
            if isinstance(request, NextTokenRequest):
                sequences, errors = await self._read_parts(served, request, client)
                if entry.served is served:
                    return served, sequences, errors, None
                continue
            if served.info.kind == "judge":
                assert isinstance(served, Judge)
                made = await self._read_for_judge(served, request, client)
                if entry.served is served:
                    return served, *made
                continue
            if request.tokens is not None:
                rows: Rows = request.tokens
            else:
                if _is_apart(request, served.info):
                    rows, lengths = await self._read_joined(served, request, client)
                else:
                    ended = await self._ended(served.info, request, client)
                    rows = await self._read_text(served, ended, cut, client)
                    if cut is not None:
                        rows = await self._fail_lost(served, ended, rows, cut, client)
                    if served.info.kind == "process-reward" and request.steps is None:
                        rows = await self._without_prompts_steps(served, ended, rows, client)
            if entry.served is served:
                break  # else another model has taken its place, whose tokenizer may be another
        if lengths is not request.prompt_lengths:
            request = dataclasses.replace(request, prompt_lengths=lengths)
        work = functools.partial(_to_sequences, rows, request, cut, served.info)
        sequences, errors = await self.run_if(len(rows) > MANY_ROWS, client, work)
        return served, sequences, errors, None

    async def _read_joined(self, served: Served, request: ScoreRequest, client: str) -> tuple[Rows, np.ndarray]:
        """Tokenises each prompt and its response together; returns the rows, and the prompts' lengths in tokens.

        A response whose prompt has other tokens without it gets an error. If a conversation does not end with a
        response, its prompt is empty.
        """
        prompts, joined = await self._join(served, request, client)
        asked = dataclasses.replace(request, messages=None)
        distinct = list(dict.fromkeys(map(_or_nothing, prompts)))
        together = dataclasses.replace(asked, texts=[*map(_or_nothing, joined)])
        rows = list(await self._read_text(served, together, None, client))
        alone = await self._read_text(served, dataclasses.replace(asked, texts=distinct), None, client)
        ids = dict(zip(distinct, alone, strict=True))
        lengths = np.zeros(len(rows), np.int64)
        for i, (row, text, prompt) in enumerate(zip(rows, joined, prompts, strict=True)):
            before = ids[_or_nothing(prompt)]
            fault = next((x for x in (prompt, text, before, row) if isinstance(x, InvalidRequest)), None)
            if isinstance(row, np.ndarray) and isinstance(before, np.ndarray):
                lengths[i] = len(before)
                fault = fault or changed_seam(before, row)
            rows[i] = fault or row
        return rows, lengths

    async def _without_prompts_steps(self, served: Served, request: ScoreRequest, rows: Rows, client: str) -> Rows:
        """Notes in each row where its prompt's last step ends: separators in prompts end no step of the response."""
        if not isinstance(served.encoder, Tokenizer) or (request.prompts is None and request.messages is None):
            return rows
        prompts, _ = await self._join(served, request, client)
        if request.texts is not None:
            prompts = [p if t.startswith(str(p)) else "" for p, t in zip(prompts, request.texts, strict=True)]
        distinct = list(dict.fromkeys(map(_or_nothing, prompts)))
        asked = dataclasses.replace(request, messages=None, prompts=None, splits=None, texts=distinct)
        ids, alone = served.info.step_separator_ids, await self._read_text(served, asked, None, client)
        num_steps = {
            prompt: len(Sequence(row).step_ends(ids)) if isinstance(row, np.ndarray) else 0
            for prompt, row in zip(distinct, alone, strict=True)
        }

        def noted(row: Any, prompt: str | InvalidRequest) -> Any:
            if isinstance(row, InvalidRequest):
                return row
            made = row if isinstance(row, Sequence) else Sequence(row)
            before = made.step_ends(ids)[: num_steps[_or_nothing(prompt)]]
            return dataclasses.replace(made, prompt_length=int(before[-1]) + 1 if len(before) else None)

        return [noted(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]

    async def _join(self, served: Served, request: ScoreRequest, client: str) -> tuple[Parts, Parts]:
        """Returns the prompts, and the prompts with their responses; conversations are rendered."""
        texts, encoder, conversations = request.texts or [], served.encoder, request.messages
        if conversations is None:
            prompts = request.prompts or []
            return prompts, [_begun(text, prompt) for prompt, text in zip(prompts, texts, strict=True)]
        assert isinstance(encoder, Tokenizer)
        rendered: list[str | InvalidRequest] = []
        whole: list[str | InvalidRequest] = []
        for first in range(0, len(conversations), _RENDERED_AT_ONCE):
            some = conversations[first : first + _RENDERED_AT_ONCE]
            if request.texts is None:
                whole += await self.run(client, functools.partial(_rendered, encoder, some))
                some = [before_response(one) for one in some]
            rendered += await self.run(client, functools.partial(_rendered, encoder, some, is_prompt=True))
        if request.texts is not None:
            whole = [p if isinstance(p, InvalidRequest) else p + t for p, t in zip(rendered, texts, strict=True)]
        return rendered, whole

    async def _read_text(self, served: Served, request: ScoreRequest, cut: Truncation | None, client: str) -> Rows:
        """Tokenises in steps, so that the clients' turns are short; stops at the next step if cancelled."""
        encoder, added, texts = served.encoder, bool(request.add_special_tokens), request.texts
        if isinstance(served, Asked):
            return await self._questions(served, request, client)
        if encoder is None:
            return texts or [_response(conversation) for conversation in request.messages or ()]
        most = served.info.max_length
        if request.prompt_lengths is not None and cut is not None:  # they shift by as many tokens as are cut off
            cut, most = cut if added else None, None
        with tracing.step("tokenize", served.info.name):
            if not isinstance(encoder, Tokenizer):  # it takes no messages
                return await self.run(client, lambda: encoder.encode(texts or [], added, cut if added else None))
            whole = request.is_whole
            if texts is None:
                messages = encoder.encode_messages_in_steps(request.messages or [], cut, most, is_whole=whole)
                return await self._finish(messages, client)
            splits = find_splits(request, served.info, encoder)
            if splits is None:
                return await self._finish(encoder.encode_in_steps(texts, added, cut, most, is_whole=whole), client)
            # A model that reads pairs distinguishes them by special tokens.
            template = served.info.reads_pairs if request.add_special_tokens is None else added
            pairs = {i: (texts[i][:at], texts[i][at:]) for i, at in enumerate(splits) if isinstance(at, int)}
            singles = {i: texts[i] for i, at in enumerate(splits) if at is None}
            steps = encoder.encode_pairs_in_steps([*pairs.values()], template, cut, most, is_whole=whole)
            apart = await self._finish(steps, client)
            others = encoder.encode_in_steps([*singles.values()], added, cut, most, is_whole=whole)
            alone = await self._finish(others, client)
            made = dict(zip((*pairs, *singles), (*apart, *alone), strict=True))
            made |= {i: at for i, at in enumerate(splits) if isinstance(at, InvalidRequest)}
            return [made[i] for i in range(len(texts))]

    async def _fail_lost(self, served: Served, request: ScoreRequest, rows: Rows, cut: Truncation, client: str) -> Rows:
        """Puts an error in the place of each row in which truncation has left nothing of a known response."""
        encoder, most = served.encoder, cut.max_tokens
        if most is None or not isinstance(encoder, Tokenizer) or (request.messages is None and request.prompts is None):
            return rows
        full = {i: len(row) for i, row in enumerate(rows) if isinstance(row, np.ndarray) and len(row) >= most}
        split = functools.partial(truncating.split_at_cut, encoder, request, cut=cut)
        found = await self._run_in_parts(client, [*full], lambda some: [*map(split, some)])
        suspects = {i: texts for i, texts in zip(full, found, strict=True) if texts is not None}
        texts = [text for pair in suspects.values() for text in pair]
        steps = encoder.encode_in_steps(texts, bool(request.add_special_tokens), None, most)
        lengths = iter(
            [most + 1 if isinstance(ids, InvalidRequest) else len(ids) for ids in await self._finish(steps, client)]
        )
        made = [*rows]
        for i, whole, kept in zip(suspects, lengths, lengths, strict=True):
            if whole > most and kept >= full[i]:
                made[i] = truncating.nothing_left(cut)
        return made

    async def _ended(self, info: ModelInfo, request: ScoreRequest, client: str) -> ScoreRequest:
        """Ends texts as a reward model's chat template ends an answer, if the request asks for it; else warns once."""
        ending = Ending.parse(info.ending) if "rewards" in info.outputs and request.texts is not None else None
        if ending is None or not (request.completes or info not in self._warned):
            return request
        texts = request.texts or []
        prompts = request.prompts or [""] * len(texts)
        made = await self._run_in_parts(
            client, [*zip(texts, prompts, strict=True)], lambda some: [ending.complete(*pair) for pair in some]
        )
        if request.completes:
            return _with_texts(request, ending.start, made)
        if any(whole not in (text, None) for text, whole in zip(texts, made, strict=True)):
            self._warned.add(info)
            log.warning(
                "%s: a text that its chat template has made does not end with %r as the template ends an answer: "
                "its score is not that of the conversation; append the ending, or send messages",
                info.name,
                ending.text,
            )
        return request

    async def _read_for_judge(
        self, judge: Judge, request: ScoreRequest, client: str
    ) -> tuple[list[Sequence], list[InvalidRequest | None], Plan]:
        """Returns a sequence for each question of the plan, what is wrong with each, if anything, and the plan."""
        num_criteria = len(judge.rubric.criteria)
        samples: list[Sample | InvalidRequest] = await self._run_in_parts(
            client, range(len(request)), functools.partial(judgements.read, judge, request)
        )
        plan = await self.run(client, functools.partial(judgements.make_plan, judge, request, samples))
        rows: list[np.ndarray | str | InvalidRequest] = await self._run_in_parts(
            client, plan.subjects, functools.partial(judgements.questions, judge)
        )
        places = [i for i, row in enumerate(rows) if isinstance(row, str)]
        with tracing.step("tokenize", judge.info.name):
            steps = judge.encode_in_steps([str(rows[i]) for i in places])
            for i, ids in zip(places, await self._finish(steps, client), strict=True):
                rows[i] = ids
        sequences: list[Sequence] = []
        errors: list[InvalidRequest | None] = []
        for i, row in enumerate(rows):
            fault = row if isinstance(row, InvalidRequest) else None
            ids = row if isinstance(row, np.ndarray) else np.empty(0, np.int64)
            made = judgements.question(judge, ids, request, plan.owners[i // num_criteria])
            sequences.append(made)
            errors.append(fault or find_fault(made, judge.info) or judgements.find_fault(judge, ids))
        size_answers([s for s, error in zip(sequences, errors, strict=True) if error is None], judge.info)
        return sequences, errors, plan

    async def _questions(self, judge: Asked, request: ScoreRequest, client: str) -> Parts:
        return await self._run_in_parts(
            client, range(len(request)), functools.partial(judgements.words, judge, request)
        )

    async def _run_in_parts(self, client: str, items: Any, work: Callable[[Any], Any]) -> list[Any]:
        """Returns what `work` makes of a few items at a time, so that the clients' turns are short."""
        made: list[Any] = []
        for first in range(0, len(items), _RENDERED_AT_ONCE):
            made += await self.run(client, functools.partial(work, items[first : first + _RENDERED_AT_ONCE]))
        return made

    async def _read_parts(
        self, served: Served, request: NextTokenRequest, client: str
    ) -> tuple[list[Sequence], list[InvalidRequest | None]]:
        """Returns each sample with the shared part, tokenised separately, and its error, if any."""
        info, encoder = served.info, served.text if isinstance(served, Judge) else served.encoder

        async def encode(texts: list[str], is_special: bool) -> ListLike[np.ndarray | InvalidRequest]:
            if not isinstance(encoder, Tokenizer):
                raise InvalidRequest(why_no_text(info))
            with tracing.step("tokenize", info.name):
                return await self._finish(encoder.encode_in_steps(texts, is_special, None, info.max_length), client)

        shared: np.ndarray | str | InvalidRequest = request.shared
        if isinstance(shared, str):
            (shared,) = await encode([shared], request.shared_special_tokens)
            if isinstance(shared, InvalidRequest):
                raise shared
        rows: Rows = request.tokens or await encode(request.texts or [], bool(request.add_special_tokens))
        sequences: list[Sequence] = []
        errors: list[InvalidRequest | None] = []
        for row in rows:
            ids = row if isinstance(row, np.ndarray) else np.empty(0, np.int64)
            assert isinstance(shared, np.ndarray)
            sequences.append(made := request.sequence(ids, shared))
            fault = row if isinstance(row, InvalidRequest) else None
            if len(made.tokens) == 1:
                fault = InvalidRequest("query and item have no tokens, and nothing predicts a first token; send some")
            errors.append(fault or find_fault(made, info))
        size_answers([s for s, error in zip(sequences, errors, strict=True) if error is None], info)
        return sequences, errors

    async def _finish(self, steps: Generator[None, None, T], client: str) -> T:
        while (rows := await self.run(client, lambda: _advance(steps))) is None:
            pass
        return rows


def _to_sequences(
    rows: Rows, request: ScoreRequest, cut: Truncation | None, info: ModelInfo
) -> tuple[list[Sequence], list[InvalidRequest | None]]:
    """Returns each row's sequence, and its error, if any."""
    sequences = [sequence(row, request, i) for i, row in enumerate(rows)]
    errors = [row if isinstance(row, InvalidRequest) else None for row in rows]
    if cut is not None:
        errors = [error or truncating.find_loss(s, cut) for error, s in zip(errors, sequences, strict=True)]
        sequences = [truncating.truncated(s, cut) for s in sequences]
    errors = [error or find_fault(s, info) for error, s in zip(errors, sequences, strict=True)]
    if request.queries is not None:
        size_answers([s for s, error in zip(sequences, errors, strict=True) if error is None], info)
    return sequences, errors


def check(served: Served, request: ScoreRequest) -> None:
    """Raises InvalidRequest if the samples are of a form that the model does not read, or a question suits none."""
    info = served.info
    if not len(request):
        raise InvalidRequest("the request has no samples; send at least one")
    if request.queries and (fault := request.queries[0].find_fault_of_all(info.vocab_size or 0, info.max_top_k)):
        raise InvalidRequest(fault)
    num_prompts = (request.prompts is not None) + (request.messages is not None)
    has_lengths = request.prompt_lengths is not None
    if "logprobs" in info.outputs and (
        (request.prompts is not None and request.texts is None)
        or (request.texts is not None and num_prompts and (num_prompts == 2 or has_lengths))
    ):
        raise InvalidRequest(
            "prompts go with sentences that begin with them, messages with sentences that are responses to them; both "
            "without prompt_lengths"
        )
    if isinstance(request, NextTokenRequest):
        return  # its form has checked the model
    if request.tokens is not None:
        if not info.takes_tokens:
            raise InvalidRequest(f"{info.name} reads text, not token ids; send sentences")
        return
    if not info.takes_text:
        raise InvalidRequest(why_no_text(info))
    if request.messages is not None and not info.takes_messages:
        raise InvalidRequest(f"{info.name} reads no messages{_why(info)}send sentences or tokens, formatted for it")
    if served.encoder is None and (request.add_special_tokens or request.truncation is not None):
        raise InvalidRequest(
            f"{info.name} reads texts, not tokens: it has no special tokens to add, and nothing to truncate; "
            "leave these options out"
        )


def changed_seam(prompt: np.ndarray, joined: np.ndarray) -> InvalidRequest | None:
    """Returns an error if the prompt's tokens change with the response appended: the boundary would be ambiguous."""
    same = common_prefix(prompt, joined)
    if same == len(prompt):
        return None
    shown = slice(same, same + _SHOWN_IDS)
    return InvalidRequest(
        f"the tokens change where the prompt ends: from token {same} on the prompt alone has {prompt[shown].tolist()}, "
        f"and with the response {joined[shown].tolist()}; send token ids, or split the text elsewhere"
    )


def find_splits(
    request: ScoreRequest, info: ModelInfo, encoder: Tokenizer
) -> ListLike[int | InvalidRequest | None] | None:
    """Returns where each text divides into a pair, None for one that does not; None if none does.

    For a model that `reads_pairs` a prompt and its continuation are a pair, unless the text already has special tokens.
    """
    if request.splits is not None or not info.reads_pairs or request.prompts is None:
        return request.splits
    start = encoder.pair_start

    def split(text: str, prompt: str) -> int | InvalidRequest | None:
        if start and text.startswith(start):
            return None
        return len(prompt) if text.startswith(prompt) else _other_prompt(info)

    return [split(text, prompt) for text, prompt in zip(request.texts or (), request.prompts, strict=True)]


def _with_texts(request: ScoreRequest, start: str, made: ListLike[str | None]) -> ScoreRequest:
    """Returns the request with the texts that are made anew, which are no pairs but whole conversations.

    The template's `start` may be new before them and before their prompts.
    """
    texts, prompts, splits = request.texts or [], request.prompts, request.splits
    starts = [
        start if whole is not None and not text.startswith(start) else ""
        for text, whole in zip(texts, made, strict=True)
    ]
    return dataclasses.replace(
        request,
        texts=[text if whole is None else whole for text, whole in zip(texts, made, strict=True)],
        prompts=prompts and [new + prompt for new, prompt in zip(starts, prompts, strict=True)],
        splits=splits and [at if whole is None else None for at, whole in zip(splits, made, strict=True)],
    )


def _other_prompt(info: ModelInfo) -> InvalidRequest:
    return InvalidRequest(
        f"{info.name} reads a prompt and its response as a pair, and the text does not begin with its prompt; send the "
        "prompt exactly as in the text, or no prompts"
    )


def sequence(row: np.ndarray | Sequence | str | InvalidRequest, request: ScoreRequest, i: int) -> Sequence:
    """Returns the request's sample `i`, which the scorer reads as `row`."""
    if isinstance(row, Sequence):
        # The sender has not counted the special tokens of a pair.
        made = sequence(row.tokens, request, i)
        return dataclasses.replace(made, second_start=row.second_start, prompt_length=row.prompt_length)
    return Sequence(
        row if isinstance(row, np.ndarray) else np.empty(0, dtype=np.int64),
        row if isinstance(row, str) else None,
        None if request.groups is None else int(request.groups[i]),
        None if request.prompt_lengths is None else int(request.prompt_lengths[i]),
        None if request.steps is None else request.steps[i],
        request.wants_rewards,
        None if request.prompts is None else request.prompts[i],
        None if request.labels is None else request.labels[i],
        request.messages is not None,
        request.width,
        None if request.queries is None else request.queries[i],
    )


def size_answers(sequences: list[Sequence], info: ModelInfo) -> None:
    """Notes how large each sequence's answer will be; raises InvalidRequest if they are too large together."""
    hidden_bytes = info.hidden_size * (4 if info.dtype == "float32" else 2)
    for s in sequences:
        assert s.query is not None
        num_asked = len(s.tokens) - s.query.first(s.prompt_length)
        s.query = s.query.sized(max(0, num_asked), 2 * info.hidden_size if s.query.rounds_hidden else hidden_bytes)
    # Tables are as wide as the longest row.
    num_bytes = len(sequences) * max((s.query.answer_bytes for s in sequences if s.query is not None), default=0)
    if num_bytes > MAX_ANSWER_BYTES:
        raise InvalidRequest(
            f"the answer would have {num_bytes / (1 << 20):,.0f} MiB, and may have at most "
            f"{MAX_ANSWER_BYTES >> 20:,} MiB: ask about fewer samples, tokens or ids at once"
        )


def find_fault(s: Sequence, info: ModelInfo) -> InvalidRequest | None:
    """Returns the error of one sequence, if any."""
    if s.text is not None:
        return None
    tokens = s.tokens
    if not len(tokens):
        return InvalidRequest("the sample has no tokens; send at least one")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0:
        return InvalidRequest(f"token id {low} is negative; send padding only beyond a row's length")
    if info.vocab_size is not None and high >= info.vocab_size:
        return InvalidRequest(
            f"token id {high} is outside the vocabulary of {info.name} (0 to {info.vocab_size - 1}); was it "
            "tokenised for another model?"
        )
    if s.steps is not None and len(s.steps) and (s.steps.min() < 0 or s.steps.max() >= len(tokens)):
        return InvalidRequest(f"a step position lies outside the sample's {len(tokens)} tokens")
    if info.kind == "process-reward" and not len(s.step_ends(info.step_separator_ids)):
        if not info.step_separator_ids:
            return InvalidRequest("no step to reward: this model has no tokenizer, so send step_positions")
        return InvalidRequest(
            f"no step to reward: {info.name} gives the {info.step_rule}, and no such token follows the prompt, or it "
            "is merged into another token; end each step with it, or send step_positions"
        )
    if s.prompt_length is not None and not 0 <= s.prompt_length <= len(tokens):
        return InvalidRequest(f"prompt length {s.prompt_length} lies outside the sample's {len(tokens)} tokens")
    if s.query is not None:
        fault = s.query.find_fault(len(tokens), s.prompt_length, info.vocab_size or 0)
        if fault is not None:
            return InvalidRequest(fault)
    if info.max_length is not None and len(tokens) > info.max_length:
        # Only a model that answers for whole samples may lose some of their tokens.
        may_cut = not (info.is_by_token or info.kind == "judge")
        instead = ", or start the server with --truncation left or right" if may_cut else ""
        return InvalidRequest(
            f"the sample has {len(tokens)} tokens, {info.name} takes at most {info.max_length}; shorten it{instead}"
        )
    return None


def estimate_lengths(request: ScoreRequest) -> list[int]:
    """Returns about the lengths in tokens of a request's samples, for whom nobody has counted them."""
    rows: Rows = request.tokens or request.texts or [_response(messages) for messages in request.messages or ()]
    return [sequence(row, request, i).num_tokens for i, row in enumerate(rows)]


def _advance(steps: Generator[None, None, T]) -> T | None:
    """Takes one step; returns the rows with the last."""
    try:
        return next(steps)
    except StopIteration as e:
        return e.value


def _is_apart(request: ScoreRequest, info: ModelInfo) -> bool:
    """Whether a teacher is asked about responses that are text, whose first token is not known yet."""
    if "logprobs" not in info.outputs or request.prompt_lengths is not None:
        return False
    if request.texts is not None:
        return request.prompts is not None or request.messages is not None
    return request.messages is not None and any(query.start is None for query in request.queries or ())


def _rendered(
    encoder: Tokenizer, conversations: list[list[Message]], is_prompt: bool = False
) -> list[str | InvalidRequest]:
    if not is_prompt:
        return [encoder.render(conversation) for conversation in conversations]
    made = iter(encoder.render_prompts([conversation for conversation in conversations if conversation]))
    return [next(made) if conversation else "" for conversation in conversations]


def _begun(text: str, prompt: str) -> str | InvalidRequest:
    """Returns the text, an error unless it begins with the prompt."""
    if text.startswith(prompt):
        return text
    return InvalidRequest(
        f"the text, {text[:_SHOWN]!r}, does not begin with its prompt, {prompt[:_SHOWN]!r}: send both as one text, or "
        "from Python the response alone as `responses`"
    )


def _or_nothing(text: str | InvalidRequest) -> str:
    return text if isinstance(text, str) else ""


def _why(info: ModelInfo) -> str:
    if info.path == "function":  # not a RewardModelServer's infer_fn, which reads ids
        return ", but texts; name the function's first parameter `responses`, or "
    return ": it has no chat template; "


def _response(conversation: list[Message]) -> str | InvalidRequest:
    """Returns a conversation's fields for a function."""
    try:
        return response(conversation)
    except InvalidRequest as e:
        return e
