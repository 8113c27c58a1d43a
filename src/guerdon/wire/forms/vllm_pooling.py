"""vLLM's forms `/classify`, `/pooling` and `/score`."""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.errors import InvalidRequest
from guerdon.wire import schema
from guerdon.wire.forms import form, label_probs, labels, reward_services, sglang
from guerdon.wire.forms.openai import Numbers, Row, Usage, count_tokens, new_id, to_error
from guerdon.wire.forms.sample_options import (
    EncodingFormat,
    Endianness,
    OptionsUrl,
    SampleOptions,
    activation_of,
    encoder,
    use_activation,
    with_options,
)
from guerdon.wire.score_tensors import scores_of

CUT = "cut the texts before they are sent"
PUT_INTO_PROMPTS = "put it into the prompts"
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class PoolingOptions(SampleOptions, kw_only=True):
    """Requests of a lower priority go first."""

    request_id: str | None = None


@form.refuses("normalize", "vLLM removed it; send use_activation")
@form.refuses("dimensions", "a reward is no embedding that could be shortened")
@form.refuses(
    "chat_template chat_template_kwargs",
    "the server renders messages by the checkpoint's own template; send input, rendered",
)
@form.refuses("add_generation_prompt continue_final_message", "conversations are scored whole; send rendered input")
class ClassifyBody(PoolingOptions, kw_only=True):
    """Samples as `input`, or one conversation as `messages`; never both."""

    example: ClassVar[str] = '{"input": ["a prompt and its response"], "use_activation": false}'
    input: form.TextsOrIds | UnsetType = UNSET
    messages: form.Conversation | UnsetType = UNSET


@form.refuses("data", "it is for plugins of vLLM; send input")
class PoolingBody(ClassifyBody, kw_only=True):
    task: Literal["classify", "token_classify"] | None = None
    encoding_format: EncodingFormat = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Endianness = None


class ContentPart(msgspec.Struct):
    example: ClassVar[str] = '{"type": "text", "text": "..."}'
    text: str
    type: Literal["text"] = "text"


class ContentParts(msgspec.Struct):
    """A text in parts, which are joined by line breaks."""

    example: ClassVar[str] = '{"content": [{"type": "text", "text": "..."}]}'
    content: list[str | ContentPart]


Side = Annotated[
    str | ContentParts | Annotated[list[Annotated[str | ContentParts, Meta(description="a string")]], form.SOME],
    Meta(description="a string, or a list of strings"),
]


@form.refuses("max_tokens_per_query max_tokens_per_doc", CUT)
@form.refuses("instruction", PUT_INTO_PROMPTS)
@form.refuses("chat_template_kwargs", "pairs go through no chat template")
class PairsBody(PoolingOptions, kw_only=True):
    """Prompts and responses under one pair of names; one prompt goes with all responses, or one with each."""

    example: ClassVar[str] = '{"text_1": "a prompt", "text_2": ["a response", "another one"]}'
    text_1: Side | None = None
    text_2: Side | None = None
    queries: Side | None = None
    documents: Side | None = None
    items: Side | None = None
    data_1: Side | None = None
    data_2: Side | None = None


class PoolingUsage(Usage, kw_only=True):
    completion_tokens_details: None = None


class _Reply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: PoolingUsage


class ClassifyRow(Row, kw_only=True):
    index: int
    label: str
    probs: np.ndarray
    num_classes: int


class ClassifyReply(_Reply, kw_only=True):
    data: list[ClassifyRow]


class PoolingRow(Row, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: Numbers


class PoolingReply(_Reply, kw_only=True):
    data: list[PoolingRow]


class ScoreRow(Row, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: np.float32


class PairsReply(_Reply, kw_only=True):
    data: list[ScoreRow]


@form.serves(
    "/classify",
    "vLLM's classification, and SGLang's",
    ClassifyReply,
    *sglang.NATIVE_REPLIES,
    to_error=to_error,
    choose=form.choose_by(
        "input messages",
        ClassifyBody,
        "text input_ids",
        sglang.NativeBody,
        "vLLM's form and of SGLang's; send input or messages, else text",
    ),
)
def _classify(body: ClassifyBody | sglang.NativeBody, url: OptionsUrl) -> form.FormRequest:
    """The reply has a number a label as `probs`: raw, unless `use_activation` is true."""
    if isinstance(body, sglang.NativeBody):
        return sglang.native.to_request(body, url)
    request, activation, reply_id = _samples(body), activation_of(body), body.request_id or new_id()

    def to_reply(reply: ScoreReply, info: ModelInfo) -> ClassifyReply:
        def row(index: int, score: Score) -> ClassifyRow:
            probs = labels.numbers_of(score, info, activation)
            label = labels.labels_of(info, len(probs))[int(probs.argmax())]
            return ClassifyRow(
                index=index, label=label, probs=probs, num_classes=len(probs), **labels.more_of(score, info)
            )

        rows = [row(i, score) for i, score in enumerate(scores_of(reply))]
        return ClassifyReply(data=rows, **_head(f"classify-{reply_id}", reply, info))

    return form.FormRequest(body.model or "", request, to_reply)


@form.serves("/pooling", "vLLM's pooling", PoolingReply, to_error=to_error)
def _pooling(body: PoolingBody, url: OptionsUrl) -> form.FormRequest:
    """The task `token_classify` gives a number a token or a step; without a task it is the model's own.

    A step's numbers are its probabilities of being wrong and of being right.
    """
    request, activation, reply_id = _samples(body), activation_of(body), body.request_id or new_id()
    task, encode, wants_raw = body.task, encoder(body.encoding_format, body.endianness), use_activation(body) is False
    request.wants_rewards = task != "token_classify"

    def is_by_token(info: ModelInfo) -> bool:
        return task == "token_classify" or (task is None and _has_tokens(info))

    def check(info: ModelInfo) -> None:
        if not is_by_token(info):
            form.check_rewards(info)
        elif not _has_tokens(info):
            raise InvalidRequest(f"{info.name} gives no numbers for single tokens; send the task classify")
        elif wants_raw and schema.STEP_REWARDS.has(info):
            raise InvalidRequest("step rewards are probabilities, there are no raw numbers: leave use_activation out")
        elif schema.STEP_REWARDS.has(info) and not info.step_separator_ids and request.tokens is not None:
            request.steps = [np.arange(len(row)) for row in request.tokens]  # as vLLM does without a step's tag

    def to_reply(reply: ScoreReply, info: ModelInfo) -> PoolingReply:
        by_token = is_by_token(info)

        def row(index: int, score: Score) -> PoolingRow:
            if by_token:
                return PoolingRow(index=index, data=encode(_token_numbers(score, activation)))
            return PoolingRow(
                index=index, data=encode(labels.numbers_of(score, info, activation)), **labels.more_of(score, info)
            )

        rows = [row(i, score) for i, score in enumerate(scores_of(reply))]
        return PoolingReply(data=rows, **_head(f"pooling-{reply_id}", reply, info))

    return form.FormRequest(body.model or "", request, to_reply, check)


@form.serves(
    "/score",
    "vLLM's scores of pairs, and UniRL's reward service",
    PairsReply,
    reward_services.UniRLReply,
    to_error=to_error,
    choose=form.choose_by(
        "text_1 queries data_1",
        PairsBody,
        "requests",
        reward_services.UniRLBody,
        "vLLM's form and of UniRL's; send text_1 and text_2, else requests",
    ),
)
def _score(body: PairsBody | reward_services.UniRLBody, url: OptionsUrl) -> form.FormRequest:
    """The two texts of a pair are tokenised apart; the reply has one number a pair as `score`."""
    if isinstance(body, reward_services.UniRLBody):
        return reward_services.of_unirl(body)
    prompts, responses = _pairs(body)
    request = with_options(form.pair_samples(prompts, responses), body, -(body.priority or 0))
    activation, reply_id = activation_of(body), body.request_id or new_id()

    def to_reply(reply: ScoreReply, info: ModelInfo) -> PairsReply:
        def row(index: int, score: Score) -> ScoreRow:
            (value,) = labels.activated(np.array([labels.number(score.reward)]), activation)
            return ScoreRow(index=index, score=value, **labels.components_of(score, info))

        rows = [row(i, score) for i, score in enumerate(scores_of(reply))]
        return PairsReply(data=rows, **_head(f"score-{reply_id}", reply, info))

    return form.FormRequest(body.model or "", request, to_reply)


@form.serves(
    "/v1/score",
    "vLLM's scores of pairs, and SGLang's probabilities of labels",
    PairsReply,
    label_probs.SGLangScoreReply,
    to_error=to_error,
    choose=form.choose_by(
        "text_1 queries data_1",
        PairsBody,
        "query label_token_ids",
        label_probs.SGLangScoreBody,
        "vLLM's form and of SGLang's; send text_1 and text_2, else query",
    ),
)
def _score_or_label_probs(body: PairsBody | label_probs.SGLangScoreBody, url: OptionsUrl) -> form.FormRequest:
    """SGLang's form asks a teacher or a judge how likely labels are as the next token."""
    if isinstance(body, label_probs.SGLangScoreBody):
        for name in ("use_activation", "softmax", "activation", "add_special_tokens"):  # only vLLM's form has them
            if getattr(url, name) is not None:
                raise InvalidRequest(f"the URL has the key {name!r}, which SGLang's form does not have; leave it out")
        return label_probs.to_sglang_request(body, url)
    return _score.to_request(body, url)


def _samples(body: ClassifyBody) -> ScoreRequest:
    name, samples = form.one_of(body, "input", "messages")
    priority = -(body.priority or 0)  # vLLM's lower numbers go first
    if name == "input":
        return with_options(form.to_samples(samples, name), body, priority)
    if body.add_special_tokens:
        raise InvalidRequest("add_special_tokens is true beside messages, whose template writes them; leave it out")
    return with_options(form.of_conversation(form.check_conversation(samples, name)), body, priority)


def _pairs(body: PairsBody) -> tuple[list[str], list[str]]:
    """One prompt, or as many as there are responses, and the responses."""
    present = [names for names in _PAIRS if all(getattr(body, name) is not None for name in names)]
    if len(present) != 1:
        ways = ", ".join(" and ".join(names) for names in _PAIRS)
        raise InvalidRequest(f"the body has {'several' if present else 'none'} of these pairs; send one of {ways}")
    first, second = present[0]
    prompts, responses = _side(getattr(body, first)), _side(getattr(body, second))
    if len(prompts) not in (1, len(responses)):
        raise InvalidRequest(
            f"{first} has {len(prompts)} entries, {second} {len(responses)}; send one {first}, or one for each"
        )
    return prompts, responses


def _side(value: str | ContentParts | list[str | ContentParts]) -> list[str]:
    entries = value if isinstance(value, list) else [value]
    return [entry if isinstance(entry, str) else joined_parts(entry.content) for entry in entries]


def joined_parts(parts: list[str | ContentPart]) -> str:
    """Returns the text of its parts, joined by line breaks."""
    return "\n".join(part if isinstance(part, str) else part.text for part in parts)


def _has_tokens(info: ModelInfo) -> bool:
    """Whether the model gives numbers for single tokens or steps."""
    return schema.VALUES.has(info) or schema.STEP_REWARDS.has(info)


def _token_numbers(score: Score, activation: labels.Activation | None) -> np.ndarray:
    """Float32 `[K, 2]` of the steps' probabilities of being wrong and right, else `[T, 1]` of the tokens' values."""
    if score.steps is not None:
        return np.stack([1 - score.steps, score.steps], axis=1)
    assert score.values is not None
    return labels.activated(score.values.reshape(-1, 1), activation)


def _head(reply_id: str, reply: ScoreReply, info: ModelInfo) -> dict[str, Any]:
    """Fields of the three replies beside their rows."""
    usage = count_tokens(reply, PoolingUsage)
    return {"id": reply_id, "created": int(time.time()), "model": info.name, "usage": usage}
