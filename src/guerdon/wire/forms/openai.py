"""Common parts of vLLM's, SGLang's and OpenAI's APIs: errors, the list of models, token counts, ids."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from guerdon.core import ModelInfo, ScoreReply
from guerdon.errors import GuerdonError, UnknownModel
from guerdon.wire import schema
from guerdon.wire.bodies import cut

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "Method Not Allowed",
    413: "Request Entity Too Large",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}

_NUMBER_LIST = {"type": "array", "items": {"type": "number"}}
Numbers = Annotated[
    Any, Meta(extra_json_schema={"anyOf": [_NUMBER_LIST, {"type": "array", "items": _NUMBER_LIST}, {"type": "string"}]})
]
"""A float32 array, or its bytes as base64."""


class OpenAIErrorContent(msgspec.Struct):
    message: str
    type: str
    code: int
    param: None = None


class OpenAIError(msgspec.Struct):
    """An error of vLLM since 0.10; SGLang's native routes have a part of that."""

    error: OpenAIErrorContent


class FlatError(msgspec.Struct):
    """An error of SGLang's OpenAI routes."""

    message: str
    type: str
    code: int
    param: None = None
    object: Literal["error"] = "error"


class OpenAIModel(msgspec.Struct):
    id: str
    created: int
    root: str
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: str = "guerdon"
    parent: None = None
    permission: list[Any] = []


class OpenAIModels(msgspec.Struct):
    data: list[OpenAIModel]
    object: Literal["list"] = "list"


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of all samples together."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


U = TypeVar("U", bound=Usage)


class FinishReason(msgspec.Struct):
    """SGLang's, of an answer that ends with its first tokens."""

    type: str = "length"
    length: int = 0


class Row(msgspec.Struct, kw_only=True):
    """What a sample's row may have beside its numbers; see `labels.more_of`."""

    reward: np.float32 | UnsetType = UNSET
    components: dict[str, np.float32] | UnsetType = UNSET


def to_error(error: GuerdonError) -> tuple[int, OpenAIError]:
    """Returns the status and the body by which vLLM reports the error."""
    status, message, kind = _facts(error)
    return status, OpenAIError(OpenAIErrorContent(message, kind, status))


def to_flat_error(error: GuerdonError) -> tuple[int, FlatError]:
    """Returns the status and the body by which SGLang's OpenAI routes report the error."""
    status, message, kind = _facts(error)
    return status, FlatError(message, kind, status)


def list_models(infos: Iterable[ModelInfo], created: int) -> OpenAIModels:
    """Returns the body of `/v1/models`; `created` is in seconds of the epoch.

    Teachers come first, because TRL asks the first model for log-probs. Otherwise the order is the given one.
    """
    in_order = sorted(infos, key=lambda info: not schema.LOGPROBS.has(info))
    return OpenAIModels([describe_model(info, created) for info in in_order])


def describe_model(info: ModelInfo, created: int) -> OpenAIModel:
    """Returns the body of `/v1/models/NAME`, which is also an entry of the list."""
    return OpenAIModel(info.name, created, info.source or info.name, info.max_length)


def count_tokens(reply: ScoreReply, kind: type[U], num_new: int = 0) -> U:
    """Returns the token counts of all samples together, with so many that follow them."""
    num_tokens = sum(reply.lengths)
    return kind(prompt_tokens=num_tokens, completion_tokens=num_new, total_tokens=num_tokens + num_new)


def new_id() -> str:
    return uuid.uuid4().hex


def _facts(error: GuerdonError) -> tuple[int, str, str]:
    status = 404 if isinstance(error, UnknownModel) else error.http
    return status, cut(str(error)), _TYPES.get(status, type(error).__name__)
