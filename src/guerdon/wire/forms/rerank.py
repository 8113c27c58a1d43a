"""The forms of `/rerank`: vLLM's, which Cohere's and Jina's clients speak, and Text Embeddings Inference's."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from guerdon.core import ModelInfo, ScoreReply
from guerdon.errors import InvalidRequest
from guerdon.wire.forms.form import SOME, Body, FormRequest, Text, Whole, either, pair_samples, refuses, serves
from guerdon.wire.forms.labels import Activation, activated_rewards_of, components_of
from guerdon.wire.forms.openai import count_tokens, new_id, to_error
from guerdon.wire.forms.tei import Direction, truncation_of
from guerdon.wire.forms.vllm_pooling import (
    CUT,
    PUT_INTO_PROMPTS,
    ContentPart,
    OptionsUrl,
    PoolingOptions,
    PoolingUsage,
    activation_of,
    joined_parts,
    with_options,
)
from guerdon.wire.score_tensors import scores_of


class Document(msgspec.Struct):
    """A text, or a text in parts, which are joined by line breaks."""

    example: ClassVar[str] = '{"text": "..."}'
    text: str | None = None
    content: list[str | ContentPart] | None = None


_One = Annotated[str | Document, Meta(description="a string, or an object with text")]


@refuses("max_tokens_per_query max_tokens_per_doc max_chunks_per_doc", CUT)
@refuses("rank_fields", "documents are texts here; send each as one text")
@refuses("instruction", PUT_INTO_PROMPTS)
@refuses("chat_template_kwargs", "pairs go through no chat template")
class RerankBody(PoolingOptions, kw_only=True):
    """One query, and documents that are ordered by their scores; of `top_n` below 1 all are returned, as by vLLM."""

    example: ClassVar[str] = '{"query": "a prompt", "documents": ["a response", "another one"], "top_n": 1}'
    query: _One
    documents: Annotated[
        str | Document | Annotated[list[_One], SOME], Meta(description="a list of strings, or of objects with text")
    ]
    top_n: Whole | None = None
    return_documents: bool | None = None


class TEIRerankBody(Body, kw_only=True):
    """One query, and texts that are ordered by their scores; TEI's own sigmoid applies only if the client asks."""

    example: ClassVar[str] = '{"query": "a prompt", "texts": ["a response", "another one"], "raw_scores": true}'
    query: Text
    texts: Annotated[list[Text], SOME]
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    add_special_tokens: bool | None = None


class RankedDocument(msgspec.Struct):
    text: str
    multi_modal: None = None


class RerankRow(msgspec.Struct, kw_only=True):
    index: int
    document: RankedDocument | UnsetType = UNSET
    relevance_score: np.float32
    components: dict[str, np.float32] | UnsetType = UNSET


class RerankReply(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankRow]


class TEIRank(msgspec.Struct, kw_only=True):
    index: int
    text: str | UnsetType = UNSET
    score: np.float32
    components: dict[str, np.float32] | UnsetType = UNSET


@serves("/v1/rerank /v2/rerank", "vLLM, Cohere and Jina", RerankReply, to_error=to_error)
def _of_vllm(body: RerankBody, url: OptionsUrl) -> FormRequest:
    """The query and each document are a pair, tokenised apart; the highest score stands first."""
    entries = body.documents if isinstance(body.documents, list) else [body.documents]
    documents = [_text(entry, f"documents[{i}]") for i, entry in enumerate(entries)]
    request = with_options(pair_samples([_text(body.query, "query")], documents), body)
    reply_id = body.request_id or new_id()
    num_returned = body.top_n if body.top_n is not None and body.top_n > 0 else len(documents)

    def to_reply(reply: ScoreReply, info: ModelInfo) -> RerankReply:
        numbers, scores = activated_rewards_of(reply, info, activation_of(body, info)), scores_of(reply)

        def row(i: int) -> RerankRow:
            shown = UNSET if body.return_documents is False else RankedDocument(documents[i])
            return RerankRow(index=i, document=shown, relevance_score=numbers[i], **components_of(scores[i], info))

        rows = [row(int(i)) for i in np.argsort(-numbers, kind="stable")[:num_returned]]
        usage = count_tokens(reply, PoolingUsage)
        return RerankReply(id=f"score-{reply_id}", model=info.name, usage=usage, results=rows)

    return FormRequest(request, to_reply)


@serves("", "Text Embeddings Inference's ranking", list[TEIRank], to_error=to_error)
def _of_tei(body: TEIRerankBody, url: OptionsUrl) -> FormRequest:
    for name in ("use_activation", "softmax", "activation"):
        if getattr(url, name) is not None:
            raise InvalidRequest(f"the URL has the key {name!r}, which TEI's form does not have; send raw_scores")
    request = pair_samples([body.query], body.texts)
    request.add_special_tokens = body.add_special_tokens
    request.truncation = truncation_of(body.truncate, body.truncation_direction)
    activation: Activation | None = "sigmoid" if body.raw_scores is False else None

    def to_reply(reply: ScoreReply, info: ModelInfo) -> list[TEIRank]:
        numbers, scores = activated_rewards_of(reply, info, activation), scores_of(reply)

        def row(i: int) -> TEIRank:
            text = body.texts[i] if body.return_text else UNSET
            return TEIRank(index=i, text=text, score=numbers[i], **components_of(scores[i], info))

        # TEI reverses a stable ascending order, so that of equal scores the last stands first.
        return [row(int(i)) for i in np.argsort(numbers, kind="stable")[::-1]]

    return FormRequest(request, to_reply)


_rerank = either(
    "/rerank",
    "vLLM's ranking, and TEI's",
    _of_vllm,
    "documents",
    _of_tei,
    "texts",
    "vLLM's form and of TEI's; send documents, else texts",
)


def _text(entry: str | Document, name: str) -> str:
    if isinstance(entry, str):
        return entry
    if (entry.text is None) == (entry.content is None):
        raise InvalidRequest(f"{name} has {'no' if entry.text is None else 'both'} text and content; send one of them")
    return entry.text if entry.content is None else joined_parts(entry.content)  # type: ignore[return-value]
