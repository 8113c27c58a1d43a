"""vLLM's forms for log-probs of prompts: `/v1/completions` and `/inference/v1/generate`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from guerdon.core import ModelInfo, ScoreReply, ScoreRequest
from guerdon.errors import InvalidRequest
from guerdon.teacher_core import LogprobQuery, TokenLogprobs
from guerdon.vocabulary import Decodes
from guerdon.wire import schema
from guerdon.wire.bodies import to_ids
from guerdon.wire.forms import form
from guerdon.wire.forms.labels import InBase64, in_base64
from guerdon.wire.forms.logprob_texts import (
    LEAST,
    OBJECT_BYTES,
    PAIR_BYTES,
    TEXT_BYTES,
    Count,
    Entries,
    NamedTeachers,
    OwnPrompts,
    Temperature,
    Written,
    check_counts,
    id_texts,
    number_texts,
    put_prompts,
    said_of,
    string_texts,
    write_positions,
    written,
)
from guerdon.wire.forms.openai import Usage, count_tokens, new_id, to_error
from guerdon.wire.tensors import pad_rows

CONTEXT = 16
"""Tokens before a new one that decide whether its text begins with a space."""

_NO_GENERATION = "a teacher does not generate: send max_tokens 0, or 1 for the likeliest next token"
_ONE_LIKELIEST = "the next token is the likeliest one of the whole vocabulary"
_GENERATE = "/inference/v1/generate"

Ids = Annotated[list[form.TokenId], form.SOME]
IdRows = Annotated[list[list[Annotated[int, Meta(ge=-1, le=2**63 - 1)]]], form.SOME]
One = Annotated[int, Meta(ge=1, le=1, description="1: a teacher gives only the likeliest next token")]


@form.refuses("logit_bias allowed_token_ids min_tokens bad_words structured_outputs watermarking", _ONE_LIKELIEST)
@form.refuses("repetition_penalty", _ONE_LIKELIEST, 1)
class SamplingKeys(form.Keys, kw_only=True):
    """`logprobs_temperature` is ours; `temperature` changes nothing, as in vLLM."""

    max_tokens: Count | None = None
    prompt_logprobs: Count | None = None
    logprobs: Count | None = None
    temperature: float | None = None
    logprobs_temperature: Temperature | None = None
    n: One | None = None


@form.refuses("stream", "the whole answer is there at once")
@form.refuses("suffix use_beam_search", _ONE_LIKELIEST)
@form.refuses("response_format", _ONE_LIKELIEST, {"type": "text"})
@form.refuses("vllm_xargs", "vLLM's extensions are not here")
@form.refuses("return_weight_versions", "the header guerdon-weights-version names them")
@form.refuses("prompt_embeds", "send text or token ids")
@form.refuses("truncate_prompt_tokens", "positions would shift; send shorter prompts")
@form.refuses("logprob_token_ids", f"send prompt_logprob_token_ids to {_GENERATE}")
@form.refuses("prompt_logprob_token_ids", f"send it to {_GENERATE}")
class CompletionsBody(SamplingKeys, kw_only=True):
    """Asks about each `prompt`."""

    example: ClassVar[str] = '{"prompt": [[5, 6, 7]], "max_tokens": 1, "prompt_logprobs": 20}'
    model: form.ModelName = None
    prompt: form.TextsOrIds
    echo: bool | None = None
    request_id: str | None = None
    priority: form.Whole | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    teacher_prompts: OwnPrompts | None = None
    teachers: NamedTeachers | None = None
    prompt_lengths: list[Count] | None = None


@form.refuses("logprob_token_ids", "send prompt_logprob_token_ids")
@form.refuses("trace_decode_token_ids", _ONE_LIKELIEST)
@form.refuses("extra_args", "vLLM's extensions are not here")
class SamplingParams(SamplingKeys, kw_only=True):
    """Row r of `prompt_logprob_token_ids` is about the prompt's token `prompt_logprob_start` + r + 1."""

    example: ClassVar[str] = '{"max_tokens": 1, "prompt_logprobs": 1}'
    prompt_logprob_token_ids: IdRows | None = None
    prompt_logprob_start: Count | None = None
    detokenize: bool = True


@form.refuses("stream", "the whole answer is there at once")
@form.refuses("features content_parts", "send token ids")
class GenerateBody(form.Body, kw_only=True):
    example: ClassVar[str] = '{"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}'
    token_ids: Ids
    sampling_params: SamplingParams
    request_id: str | None = None
    priority: form.Whole | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] | None = None
    teacher_prompts: OwnPrompts | None = None
    teachers: NamedTeachers | None = None
    prompt_lengths: list[Count] | None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    text_offset: list[int]
    token_logprobs: Written
    tokens: Written
    top_logprobs: Written


class Choice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["length"] = "length"
    stop_reason: None = None
    token_ids: list[int] | None = None
    prompt_logprobs: Written | None = None
    prompt_token_ids: np.ndarray | None = None


class CompletionsReply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class NextToken(msgspec.Struct, kw_only=True):
    token_id: int
    logprob: np.float32
    rank: int


class ChosenToken(NextToken, kw_only=True):
    top_logprobs: list[NextToken]


class NextTokens(msgspec.Struct):
    content: list[ChosenToken]


class GenerateChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    logprobs: NextTokens | None
    finish_reason: Literal["length"] = "length"
    stop_reason: None = None
    token_ids: list[int]


class GenerateReply(msgspec.Struct, kw_only=True):
    request_id: str
    model: str
    created: int
    usage: Usage
    output_mode: Literal["tokens"] = "tokens"
    choices: list[GenerateChoice]
    prompt_logprobs: Written | None = None
    prompt_token_id_logprobs: InBase64 | None = None
    prompt_token_ids: np.ndarray | None = None


@form.serves(
    "/v1/completions",
    "vLLM's log-probs of prompts",
    CompletionsReply,
    to_error=to_error,
    output=schema.LOGPROBS.name,
)
def _completions(body: CompletionsBody, url: form.Url) -> form.FormRequest:
    """The reply has a choice for each prompt; its text and its log-probs begin with the prompt's if `echo` is true."""
    request = form.to_samples(body.prompt, "prompt")
    request.add_special_tokens = bool(body.add_special_tokens) and request.texts is not None
    echoes = bool(body.echo) and body.logprobs is not None
    query = _query(body.max_tokens, body.prompt_logprobs, body.logprobs, body.logprobs_temperature, echoes=echoes)
    firsts = _ask(request, query, body)
    if echoes and any(first is not None for first in firsts):
        raise InvalidRequest("the prompt is not echoed with teacher_prompts; send prompt_logprobs without echo")

    def to_reply(reply: ScoreReply, info: ModelInfo) -> CompletionsReply:
        choices = []
        for i, (said, tokens, first) in enumerate(zip(said_of(reply), _rows(request, reply), firsts, strict=True)):
            new = said.next_ids[:1].tolist() if said.next_ids is not None else []
            has_ids = bool(body.return_token_ids)
            choices.append(
                Choice(
                    index=i,
                    text=_text(reply.text, tokens, new, echoes=bool(body.echo)),
                    logprobs=None if body.logprobs is None else _logprobs(body, said, tokens, reply.text),
                    token_ids=new if has_ids else None,
                    prompt_logprobs=_prompt_logprobs(body.prompt_logprobs, said, tokens, reply.text, first),
                    prompt_token_ids=tokens if has_ids else None,
                )
            )
        usage = count_tokens(reply, Usage, len(choices) * query.with_next)
        reply_id = f"cmpl-{body.request_id or new_id()}"
        return CompletionsReply(id=reply_id, created=int(time.time()), model=info.name, choices=choices, usage=usage)

    check = check_counts(prompt_logprobs=body.prompt_logprobs or 0, logprobs=body.logprobs or 0)
    return form.FormRequest(request, to_reply, check)


@form.serves(
    "/inference/v1/generate",
    "vLLM's log-probs of token ids",
    GenerateReply,
    to_error=to_error,
    output=schema.LOGPROBS.name,
)
def _generate(body: GenerateBody, url: form.Url) -> form.FormRequest:
    """The reply has ids only; log-probs of given ids are a float32 `.npy` file in base64, minus infinity at pads."""
    asked = body.sampling_params
    request = ScoreRequest(tokens=[to_ids(body.token_ids)])
    query = _query(asked.max_tokens, asked.prompt_logprobs, asked.logprobs, asked.logprobs_temperature)
    rows = asked.prompt_logprob_token_ids
    given = None if rows is None else pad_rows(rows, np.int64, -1, max(1, *map(len, rows)))
    skipped = asked.prompt_logprob_start or 0
    if given is not None:
        num_rows = len(body.token_ids) - 1
        if skipped + len(given) != num_rows:
            raise InvalidRequest(
                f"prompt_logprob_token_ids has {len(given)} rows from row {skipped} on, and the prompt of "
                f"{num_rows + 1} tokens has {num_rows} of them; send {max(0, num_rows - skipped)}, one for each token "
                "after that row"
            )
        # One query has one first token: that of `prompt_logprobs`.
        query = query.with_given(np.concatenate([np.full((skipped, given.shape[1]), -1), given]))
    elif asked.prompt_logprob_start is not None:
        raise InvalidRequest("prompt_logprob_start goes with prompt_logprob_token_ids; leave it out")
    (first,) = _ask(request, query, body)
    if first is not None and given is not None:
        raise InvalidRequest(
            "prompt_logprob_token_ids count the prompt's own tokens; send them without teacher_prompts"
        )

    def to_reply(reply: ScoreReply, info: ModelInfo) -> GenerateReply:
        (said,), (tokens,) = said_of(reply), _rows(request, reply)
        new = said.next_ids[:1].tolist() if said.next_ids is not None else []
        text = reply.text if asked.detokenize else None
        found = None
        if given is not None:
            assert said.given_logprobs is not None
            found = _as_npy(np.where(given < 0, np.float32(-np.inf), said.given_logprobs[skipped:]))
        return GenerateReply(
            request_id=body.request_id or new_id(),
            model=info.name,
            created=int(time.time()),
            usage=count_tokens(reply, Usage, len(new)),
            choices=[GenerateChoice(logprobs=_next_tokens(said, asked.logprobs), token_ids=new)],
            prompt_logprobs=_prompt_logprobs(asked.prompt_logprobs, said, tokens, text, first),
            prompt_token_id_logprobs=found,
            prompt_token_ids=tokens if body.return_token_ids else None,
        )

    check = check_counts(
        prompt_logprobs=asked.prompt_logprobs or 0,
        logprobs=asked.logprobs or 0,
        prompt_logprob_token_ids=0 if given is None else given.shape[1],
    )
    return form.FormRequest(request, to_reply, check, num_tables=0 if given is None else 2)


# --- asking --------------------------------------------------------------------------------------------------------


def _query(
    max_tokens: int | None,
    prompt_logprobs: int | None,
    logprobs: int | None,
    temperature: float | None,
    *,
    echoes: bool = False,
) -> LogprobQuery:
    if max_tokens is None:
        raise InvalidRequest(f"the body has no max_tokens, which means 16 to vLLM; {_NO_GENERATION}")
    if max_tokens > 1:
        raise InvalidRequest(f"max_tokens is {max_tokens}; {_NO_GENERATION}")
    with_next = max_tokens == 1
    counts = [prompt_logprobs or 0, (logprobs or 0) if echoes or with_next else 0]
    return LogprobQuery(
        start=1,
        top_k=max(counts),
        temperature=temperature or 1.0,
        with_ranks=prompt_logprobs is not None or echoes,
        with_next=with_next,
        top_bytes=8 + OBJECT_BYTES * (prompt_logprobs is not None) + (PAIR_BYTES + TEXT_BYTES) * echoes,
    )


def _ask(request: ScoreRequest, query: LogprobQuery, body: CompletionsBody | GenerateBody) -> list[int | None]:
    """Puts the query into the request; returns where each response begins after a prompt of the teacher's own."""
    request.asks = [query] * len(request)
    request.priority = -(body.priority or 0)  # vLLM's lower numbers go first
    return put_prompts(body, request)


# --- answering -----------------------------------------------------------------------------------------------------


def _first(said: TokenLogprobs, count: int) -> TokenLogprobs:
    """Returns the answer with only the `count` likeliest ids."""
    cut = TokenLogprobs(said.logprobs, ranks=said.ranks)
    if count and said.top_ids is not None and said.top_logprobs is not None:
        cut.top_ids, cut.top_logprobs = said.top_ids[:, :count], said.top_logprobs[:, :count]
    return cut


def _rows(request: ScoreRequest, reply: ScoreReply) -> list[np.ndarray]:
    """Returns each sample's tokens: as they were sent, or those of its text."""
    return reply.tokens if request.tokens is None else request.tokens


def _prompt_logprobs(
    count: int | None, said: TokenLogprobs, tokens: np.ndarray, text: Decodes | None, first: int | None
) -> Any:
    if count is None:
        return None
    first = 1 if first is None else first
    positions = (
        write_positions(entries, ["null"] * len(entries.ids) if text is None else _texts_among(entries, tokens, text))
        for entries in Entries.of(_first(said, count), tokens[first:], first)
    )
    return written(itertools.chain(["null"] * first, itertools.chain.from_iterable(positions)))


def _logprobs(
    body: CompletionsBody, said: TokenLogprobs, tokens: np.ndarray, text: Decodes | None
) -> CompletionLogprobs:
    """Returns OpenAI's lists: of the prompt's tokens if they are echoed, and of the next one if there is one."""
    if body.return_tokens_as_token_ids:
        text = None

    def told(count: int) -> Iterator[tuple[list[int], list[str], list[str]]]:
        """Yields how many ids some positions have, the actual one and `count` likeliest, their texts and log-probs."""
        echoed = Entries.of(_first(said, count), tokens[1:], 1) if body.echo else ()
        new = [Entries.after(said, count)] if said.next_ids is not None else []
        for part in itertools.chain(echoed, new):
            names = _names(part.ids) if text is None else _texts_among(part, tokens, text)
            yield part.counts.tolist(), names, number_texts(part.logprobs)

    def tops() -> Iterator[str]:
        yield from ["null"] * len(first)
        for counts, names, numbers in told(body.logprobs or 0):
            start = 0
            for size in counts:
                # Several ids may have the same text: the first, which is the actual or the likelier token, has it.
                row: dict[str, str] = {}
                for name, number in zip(names[start : start + size], numbers[start : start + size], strict=True):
                    row.setdefault(name, number)
                yield "{" + ",".join(map("%s:%s".__mod__, row.items())) + "}"
                start += size

    first = (_names(tokens[:1]) if text is None else id_texts(tokens[:1], text.texts_of)) if body.echo else []
    words, values = list(first), ["null"] * len(first)
    for _, names, numbers in told(0):
        words += names
        values += numbers
    lengths = [len(msgspec.json.decode(word)) for word in words]
    return CompletionLogprobs(
        text_offset=np.cumsum([0, *lengths])[:-1].tolist(),
        token_logprobs=written(values),
        tokens=written(words),
        top_logprobs=written(tops()),
    )


def _texts_among(entries: Entries, tokens: np.ndarray, text: Decodes) -> list[str]:
    """Returns the JSON of each id's text among the sequence's tokens."""
    return string_texts(text.texts_among(entries.ids, entries.places, tokens))


def _names(ids: np.ndarray) -> list[str]:
    """Returns the JSON of vLLM's name for each id."""
    return string_texts([f"token_id:{i}" for i in ids.tolist()])


def _next_tokens(said: TokenLogprobs, count: int | None) -> NextTokens | None:
    if count is None or said.next_ids is None:
        return None
    after = Entries.after(said, count)
    rows = zip(after.ids.tolist(), np.maximum(after.logprobs, LEAST), after.ranks.tolist(), strict=True)
    found = [NextToken(token_id=i, logprob=value, rank=rank) for i, value, rank in rows]
    best = found[0]
    return NextTokens([ChosenToken(token_id=best.token_id, logprob=best.logprob, rank=1, top_logprobs=found)])


def _text(text: Decodes | None, tokens: np.ndarray, new: list[int], *, echoes: bool) -> str:
    """Returns the text of the next token, after that of the prompt if it `echoes`; empty without a tokenizer."""
    if text is None:
        return ""
    piece = text.pieces(np.array([*tokens[-CONTEXT:], *new], np.int64))[-1] if new else ""
    is_open = piece.endswith("\ufffd")  # a character that is not complete, of which vLLM writes nothing
    if echoes:
        return text.decode(tokens if is_open else np.array([*tokens, *new], np.int64))
    return "" if is_open else piece


def _as_npy(table: np.ndarray) -> InBase64:
    """Returns the float32 table as numpy's file (NPY 1.0), in base64."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {table.shape}, }}"
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode("latin-1")
    data = np.ascontiguousarray(table, "<f4").reshape(-1).view(np.uint8)
    return in_base64(np.concatenate([np.frombuffer(start, np.uint8), data]), "u1")
