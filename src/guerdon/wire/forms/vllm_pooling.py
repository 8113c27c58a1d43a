"""vLLM's and SGLang's forms for scores: `/classify`, `/pooling`, `/score`, `/encode` and `/v1/embeddings`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest, Truncation
from guerdon.errors import InvalidRequest
from guerdon.wire import schema
from guerdon.wire.forms import form, label_probs, labels, reward_services
from guerdon.wire.forms.openai import (
    FinishReason,
    Numbers,
    Row,
    Usage,
    count_tokens,
    new_id,
    to_error,
    to_flat_error,
)
from guerdon.wire.score_tensors import scores_of

CUT = "cut the texts before they are sent"
PUT_INTO_PROMPTS = "put it into the prompts"
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
_SEND_PAIRS = "to /score as text_1 and text_2"

EncodingFormat = Literal["float", "base64"] | None
Endianness = Literal["native", "little", "big"] | None


class OptionsUrl(form.TokensUrl, kw_only=True, forbid_unknown_fields=True):
    use_activation: form.Switch = None
    softmax: form.Switch = None
    activation: form.Switch = None


@form.refuses("mm_processor_kwargs media_io_kwargs", "this server reads texts and token ids")
class SampleOptions(form.GroupBody, kw_only=True):
    """`softmax` and `activation` are older names of `use_activation`."""

    priority_sign: ClassVar[int] = 1
    priority: form.Whole | None = None
    add_special_tokens: bool | None = None
    padding: Literal["do_not_pad"] | None = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, le=2**63 - 1, description="1 or more, or -1 for the model's own")] | None
    ) = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None


class PoolingOptions(SampleOptions, kw_only=True):
    """Requests of a lower priority go first."""

    priority_sign: ClassVar[int] = -1
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


@form.refuses(
    "input_embeds image_data video_data audio_data embed_overrides embed_override_token_id positional_embed_overrides "
    "multi_item_delimiter_indices token_indices_to_pool",
    "this server scores whole samples of text or token ids",
)
@form.refuses("is_cross_encoder_request", f"send the pairs {_SEND_PAIRS}")
@form.refuses("lora_path lora_id", "serve the merged checkpoint under a name of its own")
@form.refuses("dimensions", "a reward is no embedding that could be shortened")
@form.refuses("return_pooled_hidden_states return_prompt_token_ids", "this server answers with scores only")
class SGLangBody(SampleOptions, kw_only=True):
    """Requests of a higher priority go first. The options beyond `priority` are vLLM's."""

    no_model: ClassVar[str] = "default"


_Text = Annotated[str, Meta(description=f"a string; send pairs {_SEND_PAIRS}")]
_Texts = Annotated[str | Annotated[list[_Text], form.SOME], Meta(description="a string, or a list of strings")]


class NativeBody(SGLangBody, kw_only=True):
    """Either `text` or `input_ids`: one sample, or a list of them."""

    example: ClassVar[str] = '{"text": ["a prompt and its response"]}'
    text: _Texts | None = None
    input_ids: form.Ids | None = None
    rid: Annotated[str | list[str] | None, Meta(description="a string, or a list with one a sample")] = None


@form.refuses("messages", "send conversations to /classify or /pooling")
@form.refuses("normalize", "a reward has no length that could be made 1")
class EmbeddingsBody(SGLangBody, kw_only=True):
    example: ClassVar[str] = '{"input": ["a prompt and its response"]}'
    input: form.TextsOrIds
    encoding_format: EncodingFormat = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Endianness = None


class MetaInfo(msgspec.Struct):
    id: str
    prompt_tokens: int
    weight_version: str
    e2e_latency: float
    finish_reason: FinishReason


class NativeReply(Row, kw_only=True):
    embedding: np.ndarray
    meta_info: MetaInfo


class EmbeddingsRow(Row, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Numbers


class EmbeddingsUsage(Usage, kw_only=True):
    reasoning_tokens: int = 0


class EmbeddingsReply(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[EmbeddingsRow]
    model: str
    usage: EmbeddingsUsage


def with_options(request: ScoreRequest, body: SampleOptions) -> ScoreRequest:
    """Returns the request with the body's options; raises InvalidRequest."""
    request.add_special_tokens = body.add_special_tokens if request.texts is not None else None
    request.priority = body.priority_sign * (body.priority or 0)
    max_tokens = body.truncate_prompt_tokens
    if max_tokens is not None:
        if max_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens is 0; send 1 or more, or -1 for the model's own")
        # vLLM loads the tokenizers of pooling models so that they keep the beginning.
        request.truncation = Truncation(None if max_tokens == -1 else max_tokens, body.truncation_side or "right")
    return request


def use_activation(body: SampleOptions) -> bool | None:
    """Returns the switch under the first of its names that the body has, None if it has none."""
    wanted = (body.use_activation, body.softmax, body.activation)
    return next((value for value in wanted if value is not None), None)


def activation_of(body: SampleOptions, info: ModelInfo) -> labels.Activation | None:
    """Returns the activation of the scores: none unless the body requests one, then the checkpoint's, as in vLLM."""
    if not use_activation(body):
        return None
    if info.activation not in labels.ACTIVATIONS:
        raise InvalidRequest(
            f"the activation of {info.name} is {info.activation} by its config.json, which guerdon does not have: "
            "leave use_activation out, and apply it to the raw numbers"
        )
    return labels.ACTIVATIONS[info.activation]


def _encoder(body: PoolingBody | EmbeddingsBody) -> Callable[[np.ndarray], Any]:
    """Returns what writes numbers: as lists, or their bytes as base64."""
    dtype = ">f4" if body.endianness == "big" else "<f4"
    return (lambda numbers: labels.in_base64(numbers, dtype)) if body.encoding_format == "base64" else lambda x: x


@form.serves("/encode", "SGLang's embeddings", NativeReply, list[NativeReply], to_error=to_error)
def native(body: NativeBody, url: OptionsUrl) -> form.FormRequest:
    """The reply has the numbers as `embedding`, raw unless `use_activation` is true; a list only for a list."""
    name, samples = form.one_of(body, "text", "input_ids", "the two")
    request = with_options(form.to_samples(samples, name), body)
    single = form.is_single(samples)
    ids = _ids(body.rid, len(request), single)

    def to_reply(reply: ScoreReply, info: ModelInfo) -> NativeReply | list[NativeReply]:
        seconds, version = reply.queue_s + reply.compute_s, reply.weights_version
        activation = activation_of(body, info)
        rows = [
            NativeReply(
                embedding=labels.numbers_of(score, info, activation),
                meta_info=MetaInfo(rid, length, version, seconds, FinishReason()),
                **labels.more_of(score, info),
            )
            for rid, length, score in zip(ids, reply.lengths, scores_of(reply), strict=True)
        ]
        return rows[0] if single else rows

    return form.FormRequest(request, to_reply)


@form.serves("/v1/embeddings", "SGLang's embeddings in OpenAI's form", EmbeddingsReply, to_error=to_flat_error)
def _embeddings(body: EmbeddingsBody, url: OptionsUrl) -> form.FormRequest:
    """The reply has the numbers as `embedding`, raw unless `use_activation` is true."""
    request = with_options(form.to_samples(body.input, "input"), body)
    encode = _encoder(body)

    def to_reply(reply: ScoreReply, info: ModelInfo) -> EmbeddingsReply:
        rows, activation = [], activation_of(body, info)
        for i, score in enumerate(scores_of(reply)):
            embedding = encode(labels.numbers_of(score, info, activation))
            rows.append(EmbeddingsRow(index=i, embedding=embedding, **labels.more_of(score, info)))
        return EmbeddingsReply(data=rows, model=info.name, usage=count_tokens(reply, EmbeddingsUsage))

    return form.FormRequest(request, to_reply)


@form.serves("", "vLLM's classification", ClassifyReply, to_error=to_error)
def classification(body: ClassifyBody, url: OptionsUrl) -> form.FormRequest:
    """The reply has a number a label as `probs`: raw, unless `use_activation` is true."""
    request, reply_id = _samples(body), body.request_id or new_id()

    def to_reply(reply: ScoreReply, info: ModelInfo) -> ClassifyReply:
        rows, activation = [], activation_of(body, info)
        for i, score in enumerate(scores_of(reply)):
            probs = labels.numbers_of(score, info, activation)
            label, more = labels.labels_of(info, len(probs))[int(probs.argmax())], labels.more_of(score, info)
            rows.append(ClassifyRow(index=i, label=label, probs=probs, num_classes=len(probs), **more))
        return ClassifyReply(data=rows, **_head(f"classify-{reply_id}", reply, info))

    return form.FormRequest(request, to_reply)


_classify = form.either(
    "/classify",
    "vLLM's classification, and SGLang's",
    classification,
    "input messages",
    native,
    "text input_ids",
    "vLLM's form and of SGLang's; send input or messages, else text",
)


@form.serves("/pooling", "vLLM's pooling", PoolingReply, to_error=to_error)
def _pooling(body: PoolingBody, url: OptionsUrl) -> form.FormRequest:
    """The task `token_classify` gives a number a token or a step; without a task it is the model's own.

    A step's numbers are its probabilities of being wrong and of being right.
    """
    request, reply_id = _samples(body), body.request_id or new_id()
    task, encode, wants_raw = body.task, _encoder(body), use_activation(body) is False
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
        rows, activation = [], activation_of(body, info)
        for i, score in enumerate(scores_of(reply)):
            if is_by_token(info):
                rows.append(PoolingRow(index=i, data=encode(_token_numbers(score, activation))))
            else:
                numbers = encode(labels.numbers_of(score, info, activation))
                rows.append(PoolingRow(index=i, data=numbers, **labels.more_of(score, info)))
        return PoolingReply(data=rows, **_head(f"pooling-{reply_id}", reply, info))

    return form.FormRequest(request, to_reply, check)


@form.serves("", "vLLM's scores of pairs", PairsReply, to_error=to_error)
def _of_pairs(body: PairsBody, url: OptionsUrl) -> form.FormRequest:
    """The two texts of a pair are tokenised apart; the reply has one number a pair as `score`."""
    prompts, responses = _pairs(body)
    request = with_options(form.pair_samples(prompts, responses), body)
    reply_id = body.request_id or new_id()

    def to_reply(reply: ScoreReply, info: ModelInfo) -> PairsReply:
        numbers, scores = labels.activated_rewards_of(reply, info, activation_of(body, info)), scores_of(reply)
        rows = [ScoreRow(index=i, score=numbers[i], **labels.components_of(s, info)) for i, s in enumerate(scores)]
        return PairsReply(data=rows, **_head(f"score-{reply_id}", reply, info))

    return form.FormRequest(request, to_reply)


_score = form.either(
    "/score",
    "vLLM's scores of pairs, and UniRL's reward service",
    _of_pairs,
    "text_1 queries data_1",
    reward_services.of_unirl,
    "requests",
    "vLLM's form and of UniRL's; send text_1 and text_2, else requests",
)
_v1_score = form.either(
    "/v1/score",
    "vLLM's scores of pairs, and SGLang's probabilities of labels",
    _of_pairs,
    "text_1 queries data_1",
    label_probs.of_sglang,
    "query label_token_ids",
    "vLLM's form and of SGLang's; send text_1 and text_2, else query",
)


def _samples(body: ClassifyBody) -> ScoreRequest:
    name, samples = form.one_of(body, "input", "messages")
    if name == "input":
        return with_options(form.to_samples(samples, name), body)
    if body.add_special_tokens:
        raise InvalidRequest("add_special_tokens is true beside messages, whose template writes them; leave it out")
    return with_options(form.of_conversation(form.check_conversation(samples, name)), body)


def _ids(rid: str | list[str] | None, num_samples: int, single: bool) -> list[str]:
    """The reply's id of each sample: the body's, or for several samples a string with their numbers."""
    if rid is None:
        return [new_id() for _ in range(num_samples)]
    if isinstance(rid, str):
        return [rid] if single else [f"{rid}_{i}" for i in range(num_samples)]
    if len(rid) != num_samples:
        raise InvalidRequest(f"rid is a list of {len(rid)}; send a string, or a list of {num_samples}, one a sample")
    return rid


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
    usage = count_tokens(reply, PoolingUsage)
    return {"id": reply_id, "created": int(time.time()), "model": info.name, "usage": usage}
