"""SGLang's forms: its native `/classify` and `/encode`, and `/v1/embeddings` as it answers it for a reward model."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from guerdon.core import ModelInfo, ScoreReply
from guerdon.errors import InvalidRequest
from guerdon.wire.forms import form, openai
from guerdon.wire.forms.labels import more_of, numbers_of
from guerdon.wire.forms.sample_options import (
    EncodingFormat,
    Endianness,
    OptionsUrl,
    SampleOptions,
    activation_of,
    encoder,
    with_options,
)
from guerdon.wire.score_tensors import scores_of

_DEFAULT_MODEL = "default"
"""The name that SGLang's own clients send if they mean none."""

_PAIRS = "to /score as text_1 and text_2"


@form.refuses(
    "input_embeds image_data video_data audio_data embed_overrides embed_override_token_id positional_embed_overrides "
    "multi_item_delimiter_indices token_indices_to_pool",
    "this server scores whole samples of text or token ids",
)
@form.refuses("is_cross_encoder_request", f"send the pairs {_PAIRS}")
@form.refuses("lora_path lora_id", "serve the merged checkpoint under a name of its own")
@form.refuses("dimensions", "a reward is no embedding that could be shortened")
@form.refuses("return_pooled_hidden_states return_prompt_token_ids", "this server answers with scores only")
class SGLangBody(SampleOptions, kw_only=True):
    """Requests of a higher priority go first. The options beyond `priority` are vLLM's."""


_Text = Annotated[str, Meta(description=f"a string; send pairs {_PAIRS}")]
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


class FinishReason(msgspec.Struct):
    type: str = "length"
    length: int = 0


class MetaInfo(msgspec.Struct):
    id: str
    prompt_tokens: int
    weight_version: str
    e2e_latency: float
    finish_reason: FinishReason


class NativeReply(openai.Row, kw_only=True):
    embedding: np.ndarray
    meta_info: MetaInfo


class EmbeddingsRow(openai.Row, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: openai.Numbers


class EmbeddingsUsage(openai.Usage, kw_only=True):
    reasoning_tokens: int = 0


class EmbeddingsReply(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[EmbeddingsRow]
    model: str
    usage: EmbeddingsUsage


NATIVE_REPLIES = (NativeReply, list[NativeReply])


@form.serves("/encode", "SGLang's embeddings", *NATIVE_REPLIES, to_error=openai.to_error)
def native(body: NativeBody, url: OptionsUrl) -> form.FormRequest:
    """The reply has the numbers as `embedding`, raw unless `use_activation` is true; a list only for a list."""
    name, samples = form.one_of(body, "text", "input_ids", "the two")
    request, activation = with_options(form.to_samples(samples, name), body, body.priority or 0), activation_of(body)
    single = form.is_single(samples)
    ids = _ids(body.rid, len(request), single)

    def to_reply(reply: ScoreReply, info: ModelInfo) -> NativeReply | list[NativeReply]:
        seconds, version = reply.queue_s + reply.compute_s, reply.weights_version
        rows = [
            NativeReply(
                embedding=numbers_of(score, info, activation),
                meta_info=MetaInfo(rid, length, version, seconds, FinishReason()),
                **more_of(score, info),
            )
            for rid, length, score in zip(ids, reply.lengths, scores_of(reply), strict=True)
        ]
        return rows[0] if single else rows

    return form.FormRequest(_model(body), request, to_reply)


@form.serves("/v1/embeddings", "SGLang's embeddings in OpenAI's form", EmbeddingsReply, to_error=openai.to_flat_error)
def _embeddings(body: EmbeddingsBody, url: OptionsUrl) -> form.FormRequest:
    """The reply has the numbers as `embedding`, raw unless `use_activation` is true."""
    request = with_options(form.to_samples(body.input, "input"), body, body.priority or 0)
    activation, encode = activation_of(body), encoder(body.encoding_format, body.endianness)

    def to_reply(reply: ScoreReply, info: ModelInfo) -> EmbeddingsReply:
        rows = []
        for i, score in enumerate(scores_of(reply)):
            embedding = encode(numbers_of(score, info, activation))
            rows.append(EmbeddingsRow(index=i, embedding=embedding, **more_of(score, info)))
        return EmbeddingsReply(data=rows, model=info.name, usage=openai.count_tokens(reply, EmbeddingsUsage))

    return form.FormRequest(_model(body), request, to_reply)


def _model(body: form.Body) -> str:
    return "" if body.model in (None, _DEFAULT_MODEL) else body.model


def _ids(rid: str | list[str] | None, num_samples: int, single: bool) -> list[str]:
    """The reply's id of each sample: the body's, or for several samples a string with their numbers."""
    if rid is None:
        return [openai.new_id() for _ in range(num_samples)]
    if isinstance(rid, str):
        return [rid] if single else [f"{rid}_{i}" for i in range(num_samples)]
    if len(rid) != num_samples:
        raise InvalidRequest(f"rid is a list of {len(rid)}; send a string, or a list of {num_samples}, one a sample")
    return rid
