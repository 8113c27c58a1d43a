"""SGLang's `/generate`, as trainers ask it for the log-probs of tokens that are already there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from guerdon.core import ModelInfo, ScoreReply
from guerdon.errors import InvalidRequest
from guerdon.teacher_core import LogprobQuery, TokenLogprobs
from guerdon.vocabulary import Decodes
from guerdon.wire import schema
from guerdon.wire.forms import form
from guerdon.wire.forms.form import Ids as IdsOrRows
from guerdon.wire.forms.labels import InBase64, in_base64
from guerdon.wire.forms.logprob_texts import (
    LEAST,
    TEXT_BYTES,
    TRIPLE_BYTES,
    Count,
    Entries,
    NamedTeachers,
    OwnPrompts,
    Temperature,
    Written,
    check_counts,
    find_responses,
    id_texts,
    position_slices,
    put_prompts,
    said_of,
    triples,
    written,
)
from guerdon.wire.forms.openai import FinishReason, new_id, to_error
from guerdon.wire.tensors import pad_rows

_NO_GENERATION = "a teacher does not generate: send max_new_tokens 0, or 1 for the likeliest next token"
_ONE_LIKELIEST = "the next token is the likeliest one of the whole vocabulary"
_NOT_SERVED = "this server answers with log-probs only"

T = TypeVar("T")

GivenOrPad = Annotated[int, Meta(ge=-1, le=2**63 - 1, description="a token id, or -1 for none")]
GivenIds = Annotated[list[form.TokenId | list[form.TokenId] | None], form.SOME]
Start = Annotated[int, Meta(ge=-1, le=2**31 - 1, description="the first position in the reply, or -1 for none")]


@form.refuses("beam_width repetition_penalty", _ONE_LIKELIEST, 1)
@form.refuses("min_new_tokens logit_bias json_schema regex ebnf structural_tag custom_params watermark", _ONE_LIKELIEST)
class Sampling(form.Keys, kw_only=True):
    """`logprobs_temperature` is ours; `temperature` changes nothing, as the token is the likeliest one."""

    example: ClassVar[str] = '{"max_new_tokens": 0}'
    max_new_tokens: Count | None = None
    temperature: float | None = None
    logprobs_temperature: Temperature | None = None
    n: Annotated[int, Meta(ge=1, le=1, description="1: a teacher gives only the likeliest next token")] | None = None


@form.refuses("stream", "the whole answer is there at once")
@form.refuses(
    "input_embeds image_data audio_data video_data mm_processor_kwargs positional_embed_overrides",
    "send text or token ids",
)
@form.refuses("session_params", "send each prompt whole")
@form.refuses("multi_item_delimiter_indices", "send query and items to /v1/score")
@form.refuses("token_indices_to_pool", "send token_ids_logprob_positions")
@form.refuses("lora_path lora_id", "serve the merged checkpoint under a name of its own")
@form.refuses("custom_logit_processor watermark return_sampling_mask sampling_logprobs_mode", _ONE_LIKELIEST)
@form.refuses("return_flat_raw_output_top_logprobs", "output_top_logprobs has them")
@form.refuses("return_entropy", _NOT_SERVED + "; KServe's form gives entropies")
@form.refuses("return_prompt_token_ids", "send logprob_start_len 0: each entry has its id")
@form.refuses("return_routed_experts return_indexer_topk return_bytes", _NOT_SERVED)
@form.refuses("return_hidden_states", _NOT_SERVED + "; KServe's form gives hidden states")
class SGLangGenerateBody(form.Body, kw_only=True):
    """Either `text` or `input_ids`: one sample, or a list of them; other keys hold for all, or have a list."""

    no_model: ClassVar[str] = "default"
    example: ClassVar[str] = (
        '{"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 0}, "return_logprob": true, '
        '"logprob_start_len": 0}'
    )
    text: form.Texts | None = None
    input_ids: IdsOrRows | None = None
    sampling_params: Sampling | list[Sampling] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Start | list[Start] | None = None
    top_logprobs_num: Count | list[Count] | None = None
    token_ids_logprob: GivenIds | None = None
    token_ids_logprob_positions: list[Any] | None = None
    return_text_in_logprobs: bool | None = None
    return_flat_raw_top_logprobs: bool | None = None
    return_flat_raw_top_logprobs_b64: bool | None = None
    rid: Annotated[str | list[str] | None, Meta(description="a string, or a list with one a sample")] = None
    priority: form.Whole | None = None
    teacher_prompts: OwnPrompts | None = None
    teachers: NamedTeachers | None = None
    prompt_lengths: list[Count] | None = None


class GenerateMeta(msgspec.Struct, kw_only=True):
    """An entry of a list is `[log-prob, id, text]`; the first is null inside if it is the sequence's first token."""

    id: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    weight_version: str
    e2e_latency: float
    input_token_logprobs: Written | UnsetType = UNSET
    output_token_logprobs: Written | UnsetType = UNSET
    input_top_logprobs: Written | UnsetType = UNSET
    output_top_logprobs: Written | UnsetType = UNSET
    input_token_ids_logprobs: Written | UnsetType = UNSET
    input_top_logprobs_shape: list[int] | UnsetType = UNSET
    input_top_logprobs_null_prefix: int | UnsetType = UNSET
    input_top_logprobs_val_flat: Written | UnsetType = UNSET
    input_top_logprobs_idx_flat: Written | UnsetType = UNSET
    input_top_logprobs_val_flat_b64: InBase64 | UnsetType = UNSET
    input_top_logprobs_idx_flat_b64: InBase64 | UnsetType = UNSET
    input_top_logprobs_val_flat_b64_dtype: Literal["float32"] | UnsetType = UNSET
    input_top_logprobs_idx_flat_b64_dtype: Literal["int32"] | UnsetType = UNSET


class SGLangGenerateReply(msgspec.Struct, kw_only=True):
    text: str
    output_ids: list[int]
    meta_info: GenerateMeta


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """One sample's query; `start` is None if no input token is scored.

    After a prompt of the teacher's own the response is scored, whose first token is `response`.
    """

    start: int | None
    top: int
    given: list[int] | None
    by_position: list[list[int]] | None
    wants: bool
    has_next: bool
    temperature: float
    entry_bytes: int
    response: int | None = None

    def first(self, num_tokens: int) -> int:
        """Returns the first scored token of so many."""
        if self.start is None:
            return num_tokens
        return max(1, self.start) if self.response is None else self.response

    def query(self, num_tokens: int | None) -> LogprobQuery:
        """Returns the query of a sample of so many tokens; None stands for a text, whose tokens are not counted yet."""
        first = self.first(num_tokens or 1)
        given = None if self.given is None else np.array(self.given, np.int64)
        if self.by_position is not None and self.start is not None:
            rows = self.by_position[first:]
            given = pad_rows(rows, np.int64, -1, max([1, *map(len, rows)]))
        return LogprobQuery(
            start=first,
            top_k=self.top,
            given=given if self.start is not None else None,
            temperature=self.temperature,
            with_next=self.has_next,
            top_bytes=self.entry_bytes,
            given_bytes=self.entry_bytes,
        )


@form.serves(
    "/generate",
    "SGLang's log-probs of prompts",
    SGLangGenerateReply,
    list[SGLangGenerateReply],
    to_error=to_error,
    output=schema.LOGPROBS.name,
)
def _generate(body: SGLangGenerateBody, url: form.Url) -> form.FormRequest:
    """The reply is a list for several samples; it has the input's log-probs from `logprob_start_len` on."""
    name, samples = form.one_of(body, "text", "input_ids", "the two")
    if body.return_flat_raw_top_logprobs_b64 and not body.return_flat_raw_top_logprobs:
        raise InvalidRequest("return_flat_raw_top_logprobs_b64 goes with return_flat_raw_top_logprobs; send both")
    single, request = form.is_single(samples), form.to_samples(samples, name)
    count = len(request)
    responses = find_responses(body, count)
    asked = [dataclasses.replace(a, response=n) for a, n in zip(_asked(body, count, single), responses, strict=True)]
    rows: Sequence[np.ndarray | None] = [None] * count if request.tokens is None else request.tokens
    for i, (one, row) in enumerate(zip(asked, rows, strict=True)):
        if row is not None and one.by_position is not None and len(one.by_position) != len(row):
            raise InvalidRequest(
                f"token_ids_logprob_positions has {len(one.by_position)} entries for sample {i} of {len(row)} tokens; "
                "send one for each token, empty ones where nothing is asked"
            )
        if one.response is not None and one.start not in (None, 0, one.response):
            raise InvalidRequest(
                f"logprob_start_len is {one.start}; under teacher_prompts sample {i} is scored from its response's "
                f"token {one.response} on: send 0"
            )
    request.asks = [one.query(None if row is None else len(row)) for one, row in zip(asked, rows, strict=True)]
    request.priority = body.priority or 0
    put_prompts(body, request)
    ids = _each(body.rid, count, "rid") if body.rid is not None else [new_id() for _ in range(count)]

    def to_reply(reply: ScoreReply, info: ModelInfo) -> SGLangGenerateReply | list[SGLangGenerateReply]:
        seconds = reply.queue_s + reply.compute_s
        made = []
        own = reply.tokens if request.tokens is None else request.tokens
        for rid, said, one, tokens in zip(ids, said_of(reply), asked, own, strict=True):
            new = said.next_ids[:1].tolist() if said.next_ids is not None else []
            meta = GenerateMeta(
                id=rid or new_id(),
                finish_reason=FinishReason(length=len(new)),
                prompt_tokens=len(tokens),
                completion_tokens=len(new),
                weight_version=reply.weights_version,
                e2e_latency=seconds,
            )
            if one.wants:
                _fill(meta, body, one, said, tokens, reply.text)
            text = "" if reply.text is None or not new else reply.text.texts_of(np.array(new))[0]
            made.append(SGLangGenerateReply(text=text, output_ids=new, meta_info=meta))
        return made[0] if single else made

    widest = max((query.num_given for query in request.asks), default=0)
    check = check_counts(top_logprobs_num=max(one.top for one in asked), token_ids_logprob=widest)
    return form.FormRequest(request, to_reply, check)


def _asked(body: SGLangGenerateBody, count: int, single: bool) -> list[_Asked]:
    params = _each(body.sampling_params or Sampling(), count, "sampling_params")
    wants = _each(body.return_logprob or False, count, "return_logprob")
    starts = _each(-1 if body.logprob_start_len is None else body.logprob_start_len, count, "logprob_start_len")
    tops = _each(body.top_logprobs_num or 0, count, "top_logprobs_num")
    given = _given(body.token_ids_logprob, count)
    positions = _positions(body.token_ids_logprob_positions, count, single)
    made = []
    for i in range(count):
        num_new = params[i].max_new_tokens
        if num_new is None:
            raise InvalidRequest(f"sampling_params has no max_new_tokens, which means 128 to SGLang; {_NO_GENERATION}")
        if num_new > 1:
            raise InvalidRequest(f"max_new_tokens is {num_new}; {_NO_GENERATION}")
        if given[i] is not None and positions[i] is not None:
            raise InvalidRequest("the body has token_ids_logprob and token_ids_logprob_positions; send one of the two")
        start = starts[i] if wants[i] and starts[i] >= 0 else None
        is_told = wants[i] and (start is not None or num_new == 1)
        made.append(
            _Asked(
                start,
                tops[i] if is_told else 0,
                given[i],
                positions[i],
                wants[i],
                num_new == 1,
                params[i].logprobs_temperature or 1.0,
                TRIPLE_BYTES + TEXT_BYTES * bool(body.return_text_in_logprobs),
            )
        )
    return made


def _each(value: T | list[T], count: int, name: str) -> list[T]:
    """Returns one value for each sample."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} is a list of {len(value)}; send one value, or a list of {count}, one a sample")
    return value


def _given(value: list[Any] | None, count: int) -> list[list[int] | None]:
    """Returns the ids of each sample; one list of ids is for all."""
    if value is None or all(isinstance(entry, int) for entry in value):
        return [value] * count
    if any(isinstance(entry, int) for entry in value):
        raise InvalidRequest("token_ids_logprob holds ids and lists; send a list of ids, or one list a sample")
    return _each(value, count, "token_ids_logprob")


def _positions(value: list[Any] | None, count: int, single: bool) -> list[list[list[int]] | None]:
    """Returns by sample the ids of each position."""
    if value is None:
        return [None] * count
    try:
        if single:
            return [msgspec.convert(value, list[list[GivenOrPad]])]
        return _each(msgspec.convert(value, list[list[list[GivenOrPad]] | None]), count, "token_ids_logprob_positions")
    except msgspec.ValidationError as e:
        raise InvalidRequest(
            f"token_ids_logprob_positions is wrong: {e}; send a list of ids for each token, in a list with one such "
            "list a sample if there are several"
        ) from e


def _fill(
    meta: GenerateMeta,
    body: SGLangGenerateBody,
    one: _Asked,
    said: TokenLogprobs,
    tokens: np.ndarray,
    text: Decodes | None,
) -> None:
    texts_of = text.texts_of if text is not None and body.return_text_in_logprobs else None
    first = one.first(len(tokens))
    # Nothing predicts the first token; clients skip the entry before those that they read.
    blank = one.start == 0 and first > 0
    asked = tokens[first:]
    told = slice(0, len(asked))  # of a text more may be computed, since its tokens were not counted when it came
    assert said.logprobs is not None
    values = said.logprobs[told]
    entries = (triples(asked[part], values[part], texts_of) for part in position_slices(len(asked)))
    before = tokens[first - 1 : first]
    heads = [f"[null,{before[0]},{id_texts(before, texts_of)[0]}]"] if blank else []
    meta.input_token_logprobs = written(chain(heads, chain.from_iterable(entries)))
    new = Entries.after(said, one.top) if said.next_ids is not None else None
    meta.output_token_logprobs = written([] if new is None else triples(new.ids[:1], new.logprobs[:1], texts_of))
    nulls = ["null"] * blank
    if one.top:
        meta.output_top_logprobs = written([] if new is None else [_row(triples(new.ids, new.logprobs, texts_of))])
        assert said.top_ids is not None and said.top_logprobs is not None
        ids, tops = said.top_ids[told], said.top_logprobs[told]
        if body.return_flat_raw_top_logprobs:
            _fill_flat(meta, ids, tops, int(blank), in_binary=bool(body.return_flat_raw_top_logprobs_b64))
        else:
            meta.input_top_logprobs = written(chain(nulls, _rows(ids, tops, texts_of)))
    if said.given_logprobs is not None:
        query = one.query(len(tokens))
        assert query.given is not None
        given = np.broadcast_to(query.given, said.given_logprobs.shape)
        rows = _rows(given, said.given_logprobs, texts_of)
        meta.input_token_ids_logprobs = written(chain(nulls, rows))


def _fill_flat(meta: GenerateMeta, ids: np.ndarray, values: np.ndarray, blank: int, *, in_binary: bool) -> None:
    meta.input_top_logprobs_shape, meta.input_top_logprobs_null_prefix = list(ids.shape), blank
    values = np.maximum(values, LEAST)
    if in_binary:
        meta.input_top_logprobs_val_flat_b64 = in_base64(values)
        meta.input_top_logprobs_idx_flat_b64 = in_base64(ids, "<i4")
        meta.input_top_logprobs_val_flat_b64_dtype, meta.input_top_logprobs_idx_flat_b64_dtype = "float32", "int32"
    else:
        meta.input_top_logprobs_val_flat, meta.input_top_logprobs_idx_flat = values.reshape(-1), ids.reshape(-1)


def _rows(ids: np.ndarray, values: np.ndarray, texts_of: Any) -> Iterator[str]:
    """Yields a list of triples for each row of the tables `[n,K]`, without pads."""
    for part in position_slices(len(ids)):
        keep = ids[part] >= 0
        parts, at = triples(ids[part][keep], values[part][keep], texts_of), 0
        for size in keep.sum(1).tolist():
            yield _row(parts[at : at + size])
            at += size


def _row(parts: list[str]) -> str:
    return f"[{','.join(parts)}]"
