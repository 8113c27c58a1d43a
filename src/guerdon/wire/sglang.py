"""SGLang's forms: its native `/classify` and `/encode`, and `/v1/embeddings` as it answers it of a reward model."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from guerdon.core import ModelInfo, ScoreReply, ScoreRequest
from guerdon.errors import InvalidRequest
from guerdon.wire.bodies import check_url, kind_of, model_of, object_of
from guerdon.wire.forms import Asked, Form
from guerdon.wire.labels import in_base64, more_of, numbers_of
from guerdon.wire.openai import told, told_flat, usage
from guerdon.wire.rows import scores_of
from guerdon.wire.samples import (
    choice,
    integer,
    is_single,
    read_ids,
    read_input,
    read_texts,
    refuse,
    with_special_tokens,
)

_NATIVE = '{"text": ["a prompt and its response"]}'
_EMBEDDINGS = '{"input": ["a prompt and its response"]}'

_DEFAULT_MODEL = "default"
"""The name that SGLang's own clients send where they mean none."""

_NOT_ALONE = "this server scores whole samples of text or token ids"
_REFUSED = {
    "input_embeds": _NOT_ALONE,
    "image_data": _NOT_ALONE,
    "video_data": _NOT_ALONE,
    "audio_data": _NOT_ALONE,
    "embed_overrides": _NOT_ALONE,
    "multi_item_delimiter_indices": _NOT_ALONE,
    "token_indices_to_pool": _NOT_ALONE,
    "is_cross_encoder_request": "send the pairs to /score as text_1 and text_2",
    "lora_path": "serve the merged checkpoint under a name of its own",
    "dimensions": "a reward is no embedding that could be shortened",
    "return_pooled_hidden_states": "this server answers with scores only",
    "return_prompt_token_ids": "this server answers with scores only",
}


def read_native(body: Any, query: Mapping[str, str]) -> Asked:
    """What SGLang's `/classify` and `/encode` are asked: `text` or `input_ids`, one sample or a list of them.

    The answer has the raw numbers as `embedding`; one sample by itself has no list around it.
    """
    body = object_of(body, _NATIVE)
    check_url(query, "add_special_tokens")
    refuse(body, _REFUSED)
    names = [name for name in ("text", "input_ids") if body.get(name) is not None]
    if len(names) != 1:
        raise InvalidRequest(f"the body has {' and '.join(names) or 'neither text nor input_ids'}; send one of the two")
    (name,) = names
    value = body[name]
    asked = (
        ScoreRequest(texts=read_texts(value, name)) if name == "text" else ScoreRequest(tokens=read_ids(value, name))
    )
    single = is_single(value)
    ids = _ids(body.get("rid"), len(asked), single)

    def answer(reply: ScoreReply, info: ModelInfo) -> Any:
        scores = scores_of(reply)
        rows = [
            {"embedding": numbers_of(score, info), **more_of(score, info), "meta_info": _meta(rid, length, reply)}
            for rid, length, score in zip(ids, reply.lengths, scores, strict=True)
        ]
        return rows[0] if single else rows

    return Asked(_model(body), _with_options(asked, body, query), answer)


def read_embeddings(body: Any, query: Mapping[str, str]) -> Asked:
    """What `/v1/embeddings` is asked: `input`, texts or token ids. The answer has the raw numbers as `embedding`."""
    body = object_of(body, _EMBEDDINGS)
    check_url(query, "add_special_tokens")
    refuse(body, _REFUSED)
    if "input" not in body:
        raise InvalidRequest(f"the body has no 'input'; send an object such as {_EMBEDDINGS}")
    asked = read_input(body["input"], "input")
    encodes = choice(body, "encoding_format", "float", "base64") == "base64"

    def answer(reply: ScoreReply, info: ModelInfo) -> dict[str, Any]:
        rows = []
        for i, score in enumerate(scores_of(reply)):
            numbers = numbers_of(score, info)
            embedding = in_base64(numbers) if encodes else numbers
            rows.append({"object": "embedding", "index": i, "embedding": embedding, **more_of(score, info)})
        return {"object": "list", "data": rows, "model": info.name, "usage": {**usage(reply), "reasoning_tokens": 0}}

    return Asked(_model(body), _with_options(asked, body, query), answer)


FORMS = {"/encode": Form(read_native, told), "/v1/embeddings": Form(read_embeddings, told_flat)}
"""SGLang's forms by their paths, but for `/classify`, which vLLM has too."""


def _model(body: dict[str, Any]) -> str:
    model = model_of(body)
    return "" if model == _DEFAULT_MODEL else model


def _with_options(asked: ScoreRequest, body: dict[str, Any], query: Mapping[str, str]) -> ScoreRequest:
    asked.priority = integer(body, "priority") or 0
    return with_special_tokens(asked, body, query)


def _ids(value: Any, num: int, single: bool) -> list[str]:
    """The answer's id of each sample: the request's, a string by itself as a beginning for several."""
    if value is None:
        return [uuid.uuid4().hex for _ in range(num)]
    if isinstance(value, str):
        return [value] if single else [f"{value}_{i}" for i in range(num)]
    if not isinstance(value, list) or len(value) != num:
        what = f"a list of {len(value)}" if isinstance(value, list) else kind_of(value)
        raise InvalidRequest(f"rid is {what}; send a string, or a list of {num}, one a sample")
    for i, rid in enumerate(value):
        if not isinstance(rid, str):
            raise InvalidRequest(f"rid[{i}] is {kind_of(rid)}; send a string")
    return value


def _meta(rid: str, num_tokens: int, reply: ScoreReply) -> dict[str, Any]:
    return {
        "id": rid,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": num_tokens,
        "weight_version": reply.weights_version,
        "e2e_latency": reply.queue_s + reply.compute_s,
    }
