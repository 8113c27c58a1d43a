"""SGLang's `/v1/score` and vLLM's `/generative_scoring`: how likely labels are as the token after a query and an item.

Both ask a language model, a teacher or a judge's without its rubric. All items share the query.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from guerdon.core import ModelInfo, ScoreReply
from guerdon.errors import InvalidRequest, SampleFailed
from guerdon.teacher_core import NEXT_TOKENS, NextTokenRequest
from guerdon.wire.bodies import MAX_ROWS, kind_of, to_ids
from guerdon.wire.forms.form import MAX_JOINED, SOME, Body, FormRequest, TokenId, Url, Whole, refuses, serves
from guerdon.wire.forms.logprob_texts import Temperature, said_of
from guerdon.wire.forms.openai import Usage, new_id, to_error

_QUERY, _ITEMS = "a string or a list of token ids", "a list of strings, or a list of lists of token ids"
_MAX_JOINED_IDS = MAX_JOINED >> 2

Query = Annotated[str | Annotated[list[TokenId], Meta(max_length=MAX_ROWS)], Meta(description=_QUERY)]
Item = Annotated[str | list[TokenId], Meta(description="a string or a list of token ids")]
Labels = Annotated[list[TokenId], SOME]


@refuses("return_token_logprobs", "the scores are the labels' probabilities")
@refuses("score_extraction_token", "the labels follow query and item")
@refuses("return_pooled_hidden_states", "KServe's form gives hidden states")
@refuses("query_embed_overrides item_embed_overrides embed_override_token_id", "send text or token ids")
class SGLangScoreBody(Body, kw_only=True):
    """Query and items are both texts or both token ids; texts are joined before they are tokenised."""

    no_model: ClassVar[str] = "default"
    example: ClassVar[str] = '{"query": "Is it blue? ", "items": ["The sky.", "Grass."], "label_token_ids": [9, 2]}'
    query: Query
    items: Annotated[str | Annotated[list[Item], Meta(max_length=MAX_ROWS)], Meta(description=f"a string, {_ITEMS}")]
    label_token_ids: Labels
    apply_softmax: bool = False
    temperature: Temperature = 1.0
    item_first: bool = False


class SGLangScoreReply(msgspec.Struct, kw_only=True):
    """The probability of each label, in their order, for each item."""

    scores: list[list[float]]
    model: str
    usage: Usage
    object: Literal["scoring"] = "scoring"


class GenerativeScoringBody(Body, kw_only=True):
    """Query and items are tokenised apart, a text of the query with special tokens unless they are switched off."""

    example: ClassVar[str] = SGLangScoreBody.example
    query: Query
    items: Annotated[list[Item], SOME, Meta(description=_ITEMS)]
    label_token_ids: Labels
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True
    priority: Whole = 0
    request_id: str | None = None


class GenerativeScoringRow(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class GenerativeScoringReply(msgspec.Struct, kw_only=True):
    """The probability of the first label for each item."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[GenerativeScoringRow]
    usage: Usage


@serves("", "SGLang's probabilities of labels", SGLangScoreReply, to_error=to_error, output=NEXT_TOKENS)
def of_sglang(body: SGLangScoreBody, url: Url) -> FormRequest:
    """The reply has the labels' probabilities for each item: over all tokens, or with softmax over the labels."""
    for name in url.__struct_fields__:
        if name != "model" and getattr(url, name) is not None:  # only vLLM's form has them
            raise InvalidRequest(f"the URL has the key {name!r}, which SGLang's form does not have; leave it out")
    items = [body.items] if isinstance(body.items, str) else body.items
    wanted = str if isinstance(body.query, str) else list
    _check_kinds(items, wanted, f"query is {kind_of(body.query)}")
    labels, temperature = np.array(body.label_token_ids, np.int64), body.temperature
    if temperature != 1 and not body.apply_softmax:
        raise InvalidRequest("temperature goes with apply_softmax, as it divides the labels' logits; send both")

    def to_reply(reply: ScoreReply, info: ModelInfo) -> SGLangScoreReply:
        probs = _probs(reply, labels, over_labels=body.apply_softmax, temperature=temperature)
        num_tokens = sum(reply.lengths) - len(reply.lengths)
        usage = Usage(prompt_tokens=num_tokens, total_tokens=num_tokens)
        return SGLangScoreReply(scores=probs.tolist(), model=info.name, usage=usage)

    check = _check(body.label_token_ids)
    if not items:
        return FormRequest(None, to_reply, check, NEXT_TOKENS)
    _check_size(body.query, items)
    if isinstance(query := body.query, str):
        texts = [str(item) + query if body.item_first else query + str(item) for item in items]
        request = NextTokenRequest(texts=texts, add_special_tokens=True, ids=labels, shared=np.empty(0, np.int64))
    else:
        request = _to_request(items, ids=labels, shared=to_ids(query), is_item_first=body.item_first)
    return FormRequest(request, to_reply, check, NEXT_TOKENS)


@serves(
    "/generative_scoring",
    "vLLM's probabilities of labels",
    GenerativeScoringReply,
    to_error=to_error,
    output=NEXT_TOKENS,
)
def _generative_scoring(body: GenerativeScoringBody, url: Url) -> FormRequest:
    """The reply has the first label's probability for each item: over the labels, or without softmax over all."""
    _check_kinds(body.items, type(body.items[0]), f"items[0] is {kind_of(body.items[0])}")
    _check_size(body.query, body.items)
    # vLLM keeps labels in a dict: a label that is given twice counts once.
    labels = np.array([*dict.fromkeys(body.label_token_ids)], np.int64)
    shared = body.query if isinstance(body.query, str) else to_ids(body.query)
    request = _to_request(body.items, ids=labels, shared=shared, is_item_first=body.item_first)
    request.shared_special_tokens = body.add_special_tokens
    request.priority = -body.priority  # vLLM's lower numbers go first
    reply_id = f"generative-scoring-{body.request_id or new_id()}"

    def to_reply(reply: ScoreReply, info: ModelInfo) -> GenerativeScoringReply:
        probs = _probs(reply, labels, over_labels=body.apply_softmax)
        # vLLM generates a token for each item, and counts it.
        usage = Usage(
            prompt_tokens=sum(reply.lengths) - len(probs), total_tokens=sum(reply.lengths), completion_tokens=len(probs)
        )
        rows = [GenerativeScoringRow(index=i, score=score) for i, score in enumerate(probs[:, 0].tolist())]
        return GenerativeScoringReply(id=reply_id, created=int(time.time()), model=info.name, data=rows, usage=usage)

    return FormRequest(request, to_reply, _check(body.label_token_ids), NEXT_TOKENS)


def _to_request(items: list[Any], **more: Any) -> NextTokenRequest:
    if isinstance(items[0], str):
        return NextTokenRequest(texts=items, **more)
    return NextTokenRequest(tokens=[to_ids(item) for item in items], **more)


def _check_kinds(items: list[Any], wanted: type, reason: str) -> None:
    """Raises InvalidRequest unless all items are strings, or all are lists of ids, as `reason` says."""
    for i, item in enumerate(items):
        if not isinstance(item, wanted):
            raise InvalidRequest(
                f"items[{i}] is {kind_of(item)}, and {reason}; send all as strings or all as token ids"
            )


def _check_size(query: str | list[int], items: list[Any]) -> None:
    """Raises InvalidRequest if one query before all items makes far more than was sent."""
    size, most = len(query) * len(items) + sum(map(len, items)), MAX_JOINED
    if isinstance(query, list) or not isinstance(items[0], str):
        most = _MAX_JOINED_IDS
    if size > most:
        raise InvalidRequest(
            f"the query with each of {len(items):,} items makes {size:,} characters or token ids, at most {most:,} are "
            "accepted; send fewer items in a request"
        )


def _check(labels: list[int]) -> Callable[[ModelInfo], None]:
    """Returns a check that the model is a language model which can answer with these tokens."""

    def check(info: ModelInfo) -> None:
        if not info.max_top_k:
            raise InvalidRequest(
                f"{info.name} gives {', '.join(info.outputs)} and no probabilities of tokens; name a language model, "
                "as guerdon serve-teacher and serve-judge serve them"
            )
        if len(labels) > info.max_top_k:
            raise InvalidRequest(
                f"label_token_ids has {len(labels)} ids; {info.name} answers about at most {info.max_top_k} at once"
            )
        strange = next((label for label in labels if label >= (info.vocab_size or 0)), None)
        if strange is not None:
            raise InvalidRequest(
                f"label_token_ids has {strange}, which is outside the vocabulary of {info.name} "
                f"(0 to {(info.vocab_size or 0) - 1}); was it taken from another tokenizer?"
            )

    return check


def _probs(reply: ScoreReply, labels: np.ndarray, *, over_labels: bool, temperature: float = 1) -> np.ndarray:
    """Returns the labels' probabilities, float64 `[N,L]`; raises the first failed item's error, or SampleFailed."""
    logprobs = np.zeros((len(reply.results), len(labels)))
    for into, said in zip(logprobs, said_of(reply), strict=True):
        assert said.given_logprobs is not None
        into[:] = said.given_logprobs[0]
    if not over_labels:
        return np.exp(logprobs)
    best = logprobs.max(-1, keepdims=True, initial=-np.inf)
    if np.isneginf(best).any():
        raise SampleFailed(f"no label is possible after items[{int(np.isneginf(best[:, 0]).argmax())}]; send others")
    shares = np.exp((logprobs - best) / temperature)
    return shares / shares.sum(-1, keepdims=True)
