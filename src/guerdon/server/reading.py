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

from guerdon.core import Message, ModelInfo, ScoreRequest, Sequence, Truncation
from guerdon.endings import Ending
from guerdon.errors import InvalidRequest
from guerdon.kinds import all_kinds
from guerdon.kinds.kind import Asks, Rows, Served, Tokenizer
from guerdon.kinds.samples import find_fault, read_response, sequence
from guerdon.messages import before_response, plain
from guerdon.server import tracing
from guerdon.server.batching.sharing import FairTurns
from guerdon.server.catalog import Entry
from guerdon.settings.config import ServedModelConfig
from guerdon.wire import schema
from guerdon.wire.signature import why_no_text

T = TypeVar("T")

log = logging.getLogger(__name__)

INLINE_BYTES = 1 << 18
"""Work on more bytes runs in a thread: the event loop would be blocked for more than a few milliseconds."""

MANY_ROWS = 1024
"""Work on more samples, one after the other, runs in a thread."""

NUM_THREADS = 2
_RENDERED_AT_ONCE = 64
_SHOWN = 60

Parts = ListLike[str | InvalidRequest]
"""A part of each sample's text, or its error."""


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
        self.warned: set[ModelInfo] = set()
        """Models of which a text has come that does not end as the template ends an answer."""

    async def read(self, entry: Entry, request: ScoreRequest, client: str) -> Asks:
        """Returns what the request asks of the model that serves when this begins.

        Raises InvalidRequest if the model cannot read such samples, Unavailable if it is unloaded.
        """
        served = entry.loaded()
        cut = truncation(request, entry.config, served.info)
        if not len(request):
            raise InvalidRequest("the request has no samples; send at least one")
        if not request.is_checked:
            check(served, request)
        return await all_kinds.of(served.info).read(Reading(self, client), served, request, cut)


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """The reading of a client's request, as its model's kind does it, in the client's turns on the reader's threads."""

    reader: Reader
    client: str

    async def run(self, work: Callable[[], T]) -> T:
        """Runs `work` on one of the threads at the client's turn."""
        return await self.reader.run(self.client, work)

    async def run_over(self, num_rows: int, work: Callable[[], T]) -> T:
        """Runs `work` on so many rows, on one of the threads if they are many."""
        return await self.run(work) if num_rows > MANY_ROWS else work()

    async def read_samples(
        self, served: Served, request: ScoreRequest, cut: Truncation | None
    ) -> tuple[Rows, ScoreRequest]:
        """Does `read_text`, completes texts as the template ends an answer, and refuses what truncation spoils.

        Returns the request with the completed texts, too.
        """
        request = await self._ended(served.info, request)
        rows = await self.read_text(served, request, cut)
        if cut is not None:
            rows = await self._fail_lost(served, request, rows, cut)
        return rows, request

    async def make_sequences(self, rows: Rows, request: ScoreRequest, cut: Truncation | None, served: Served) -> Asks:
        """Returns a sequence for each row, and what is wrong with it, if anything."""
        work = functools.partial(_to_sequences, rows, request, cut, served.info)
        asked = Asks(served, *await self.run_over(len(rows), work))
        for one in asked.sequences if served.info.shared_base else ():
            one.adapter = served.index  # type: ignore[attr-defined]
        return asked

    async def join(self, served: Served, request: ScoreRequest) -> tuple[Parts, Parts]:
        """Returns the prompts, and the prompts with their responses; conversations are rendered."""
        texts, encoder, conversations = request.texts or [], served.encoder, request.messages
        if conversations is None:
            prompts = request.prompts or []
            return prompts, [_begun(text, prompt) for prompt, text in zip(prompts, texts, strict=True)]
        assert isinstance(encoder, Tokenizer)
        render = functools.partial(_render_prompts, encoder)
        if request.texts is None:
            whole = await self.run_in_parts(conversations, lambda some: [*map(encoder.render, some)])
            conversations = [before_response(one) for one in conversations]
            return await self.run_in_parts(conversations, render), whole
        rendered = await self.run_in_parts(conversations, render)
        return rendered, [p if isinstance(p, InvalidRequest) else p + t for p, t in zip(rendered, texts, strict=True)]

    async def read_text(self, served: Served, request: ScoreRequest, cut: Truncation | None) -> Rows:
        """Tokenises in steps, so that the clients' turns are short; stops at the next step if cancelled."""
        encoder, added, texts = served.encoder, adds_special_tokens(request, served.info), request.texts
        if encoder is None:
            return texts or [read_response(conversation) for conversation in request.messages or ()]
        most = served.info.max_length
        if request.prompt_lengths is not None and cut is not None:  # they shift by as many tokens as are cut off
            cut, most = cut if added else None, None
        name = served.info.name
        if not isinstance(encoder, Tokenizer):  # it takes no messages
            with tracing.step("tokenize", name):
                return await self.run(lambda: encoder.encode(texts or [], added, cut if added else None))
        whole = request.is_whole
        if texts is None:
            messages = encoder.encode_messages_in_steps(request.messages or [], cut, most, is_whole=whole)
            return await self.tokenize(messages, name)
        splits = find_splits(request, served.info, encoder)
        asks = added and request.add_special_tokens is None
        begun = {i for i, text in enumerate(texts) if encoder.has_special_tokens(text)} if asks else set()
        if splits is None and not begun:
            return await self.tokenize(encoder.encode_in_steps(texts, added, cut, most, is_whole=whole), name)
        splits = splits or [None] * len(texts)
        pairs = {i: (texts[i][:at], texts[i][at:]) for i, at in enumerate(splits) if isinstance(at, int)}
        steps = encoder.encode_pairs_in_steps([*pairs.values()], added, cut, most, is_whole=whole)
        made: dict[int, Any] = dict(zip(pairs, await self.tokenize(steps, name), strict=True))
        for adds in (True, False):
            lone = [i for i, at in enumerate(splits) if at is None and adds == (added and i not in begun)]
            others = encoder.encode_in_steps([texts[i] for i in lone], adds, cut, most, is_whole=whole)
            made |= zip(lone, await self.tokenize(others, name), strict=True)
        made |= {i: at for i, at in enumerate(splits) if isinstance(at, InvalidRequest)}
        return [made[i] for i in range(len(texts))]

    async def _fail_lost(self, served: Served, request: ScoreRequest, rows: Rows, cut: Truncation) -> Rows:
        """Puts an error in the place of each row in which truncation has left nothing of a known response."""
        encoder, most = served.encoder, cut.max_tokens
        if most is None or not isinstance(encoder, Tokenizer) or (request.messages is None and request.prompts is None):
            return rows
        full = {i: len(row) for i, row in enumerate(rows) if isinstance(row, np.ndarray) and len(row) >= most}
        split = functools.partial(split_at_cut, encoder, request, cut=cut)
        found = await self.run_in_parts([*full], lambda some: [*map(split, some)])
        suspects = {i: texts for i, texts in zip(full, found, strict=True) if texts is not None}
        texts = [text for pair in suspects.values() for text in pair]
        steps = encoder.encode_in_steps(texts, adds_special_tokens(request, served.info), None, most)
        found_ids = await self.tokenize(steps, served.info.name)
        lengths = iter([most + 1 if isinstance(ids, InvalidRequest) else len(ids) for ids in found_ids])
        made = [*rows]
        for i, whole, kept in zip(suspects, lengths, lengths, strict=True):
            if whole > most and kept >= full[i]:
                made[i] = nothing_left(cut)
        return made

    async def _ended(self, info: ModelInfo, request: ScoreRequest) -> ScoreRequest:
        """Ends texts as a reward model's chat template ends an answer, if the request asks for it; else warns once."""
        ending = Ending.parse(info.ending) if schema.REWARDS.has(info) and request.texts is not None else None
        if ending is None or not (request.completes or info not in self.reader.warned):
            return request
        texts = request.texts or []
        prompts = request.prompts or [""] * len(texts)
        made = await self.run_in_parts(
            [*zip(texts, prompts, strict=True)], lambda some: [ending.complete(*pair) for pair in some]
        )
        if request.completes:
            return _with_texts(request, ending.start, made)
        if any(whole not in (text, None) for text, whole in zip(texts, made, strict=True)):
            self.reader.warned.add(info)
            log.warning(
                "%s: a text that its chat template has made does not end with %r as the template ends an answer: "
                "its score is not that of the conversation; append the ending, or send messages",
                info.name,
                ending.text,
            )
        return request

    async def run_in_parts(self, items: Any, work: Callable[[Any], Any]) -> list[Any]:
        """Returns what `work` makes of a few items at a time, so that the clients' turns are short."""
        made: list[Any] = []
        for first in range(0, len(items), _RENDERED_AT_ONCE):
            made += await self.run(functools.partial(work, items[first : first + _RENDERED_AT_ONCE]))
        return made

    async def tokenize(self, steps: Generator[None, None, T], model: str) -> T:
        """Takes the steps of an encoder, each in the client's turn; stops at the next if cancelled."""
        with tracing.step("tokenize", model):
            while (rows := await self.run(lambda: _advance(steps))) is None:
                pass
            return rows


def _to_sequences(
    rows: Rows, request: ScoreRequest, cut: Truncation | None, info: ModelInfo
) -> tuple[list[Sequence], list[InvalidRequest | None]]:
    """Returns each row's sequence, and its error, if any."""
    sequences = [sequence(row, request, i) for i, row in enumerate(rows)]
    errors = [row if isinstance(row, InvalidRequest) else None for row in rows]
    if cut is not None:
        errors = [error or find_loss(s, cut) for error, s in zip(errors, sequences, strict=True)]
        sequences = [truncated(s, cut) for s in sequences]
    errors = [error or find_fault(s, info) for error, s in zip(errors, sequences, strict=True)]
    return sequences, errors


def check(served: Served, request: ScoreRequest) -> None:
    """Raises InvalidRequest if the samples are of a form that the model does not read."""
    info = served.info
    if request.tokens is not None:
        if not info.takes_tokens:
            raise InvalidRequest(f"{info.name} reads text, not token ids; send sentences")
        return
    if not info.takes_text:
        raise InvalidRequest(why_no_text(info))
    if request.messages is not None and not info.takes_messages:
        why = ": it has no chat template; "
        if info.path == "function":  # not a RewardModelServer's infer_fn, which reads ids
            why = ", but texts; name the function's first parameter `responses`, or "
        raise InvalidRequest(f"{info.name} reads no messages{why}send sentences or tokens, formatted for it")
    if served.encoder is None and (request.add_special_tokens or request.truncation is not None):
        raise InvalidRequest(
            f"{info.name} reads texts, not tokens: it has no special tokens to add, and nothing to truncate; "
            "leave these options out"
        )


def adds_special_tokens(request: ScoreRequest, info: ModelInfo) -> bool:
    """Whether the tokenizer's special tokens are added to texts: by default to those of a model that reads one."""
    return info.reads_pairs if request.add_special_tokens is None else request.add_special_tokens


def find_splits(
    request: ScoreRequest, info: ModelInfo, encoder: Tokenizer
) -> ListLike[int | InvalidRequest | None] | None:
    """Returns where each text divides into a pair, None for one that does not; None if none does.

    For a model that `reads_pairs` a prompt and its continuation are a pair, unless the text already has special tokens.
    """
    if request.splits is not None or not info.reads_pairs or request.prompts is None:
        return request.splits

    def split(text: str, prompt: str) -> int | InvalidRequest | None:
        if encoder.has_special_tokens(text):
            return None
        if text.startswith(prompt):
            return len(prompt)
        return InvalidRequest(
            f"{info.name} reads a prompt and its response as a pair, and the text does not begin with its prompt; send "
            "the prompt exactly as in the text, or no prompts"
        )

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


def _advance(steps: Generator[None, None, T]) -> T | None:
    """Takes one step; returns the rows with the last."""
    try:
        return next(steps)
    except StopIteration as e:
        return e.value


def _render_prompts(encoder: Tokenizer, conversations: list[list[Message]]) -> list[str | InvalidRequest]:
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


# ------------------------------------------------------------------------- truncation, and the part that must remain


def truncation(request: ScoreRequest, model: ServedModelConfig, info: ModelInfo) -> Truncation | None:
    """Returns what to cut off of long samples: as the request says, else as the server's setting does.

    The bound is the smaller of the request's and the model's. Raises InvalidRequest if positions would be lost.
    """
    asked = request.truncation
    if asked is None:
        return None if model.truncation == "error" else Truncation(info.max_length, model.truncation)
    if info.is_by_token:
        raise InvalidRequest(
            f"{info.name} answers for single tokens: truncation would shift the positions that clients count; send "
            "shorter samples"
        )
    bounds = [bound for bound in (asked.max_tokens, info.max_length) if bound is not None]
    return Truncation(min(bounds, default=None), asked.side)


def truncated(s: Sequence, cut: Truncation) -> Sequence:
    """Returns the sequence without its surplus at that side."""
    max_length = len(s.tokens) if cut.max_tokens is None else cut.max_tokens
    surplus = len(s.tokens) - max_length
    if surplus <= 0:
        return s
    first = surplus if cut.side == "left" else 0
    prompt = None if s.prompt_length is None else min(max(0, s.prompt_length - first), max_length)
    return dataclasses.replace(s, tokens=s.tokens[first : first + max_length], prompt_length=prompt, steps=None)


def find_loss(s: Sequence, cut: Truncation) -> InvalidRequest | None:
    """Returns an error if `truncated` would leave nothing of the response after a prompt of known length."""
    if cut.max_tokens is None or s.prompt_length is None or cut.side == "left":
        return None
    has_response = len(s.tokens) > max(cut.max_tokens, s.prompt_length)
    return nothing_left(cut) if has_response and s.prompt_length >= cut.max_tokens else None


def nothing_left(cut: Truncation) -> InvalidRequest:
    """Returns the error for a sample that truncation leaves without any of its response."""
    other = "truncate at the left, or allow more tokens" if cut.side == "right" else "allow more tokens"
    return InvalidRequest(
        f"truncation to {cut.max_tokens} tokens at the {cut.side} leaves nothing of the response; {other}"
    )


def split_at_cut(encoder: Tokenizer, request: ScoreRequest, i: int, cut: Truncation) -> tuple[str, str] | None:
    """Returns sample `i` as one text, and the part that truncation keeps before it keeps any of the response.

    None if the response's place is unknown, or if it is empty. A conversation's response is its last message.
    """
    if request.messages is not None:
        text = encoder.render(request.messages[i])
        assert isinstance(text, str), "it has token ids"
        start, end = _find_last_message(encoder, request, i, text)
    else:
        assert request.texts is not None
        text, prompt = request.texts[i], "" if request.prompts is None else request.prompts[i]
        start, end = (len(prompt) if text.startswith(prompt) else 0), len(text)
    if start == end:
        return None
    return text, text[:start] if cut.side == "right" else text[end:]


def _find_last_message(encoder: Tokenizer, request: ScoreRequest, i: int, text: str) -> tuple[int, int]:
    """Returns the characters between which the content of a rendered conversation's last message stands."""
    assert request.messages is not None
    *before, last = plain(request.messages[i])
    content = last["content"].strip()  # as templates do
    prompt: str | InvalidRequest = ""
    if before:
        prompt = encoder.render_prompts([before])[0] if last["role"] == "assistant" else encoder.render(before)
    start = len(prompt) if isinstance(prompt, str) and text.startswith(prompt) else 0
    at = text.find(content, start) if start else text.rfind(content)
    return (start, len(text)) if at < 0 else (at, at + len(content))  # some templates rewrite contents
