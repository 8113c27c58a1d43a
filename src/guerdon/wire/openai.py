"""What vLLM's and SGLang's forms have of OpenAI's API: how errors are told, models, tokens counted and ids made."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from guerdon.core import ModelInfo, ScoreReply
from guerdon.errors import GuerdonError, InvalidRequest, UnknownModel
from guerdon.wire.forms import text_of

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
"""The `type` that goes with a status."""


def told(error: GuerdonError) -> tuple[int, Any]:
    """An error as vLLM tells it since 0.10, in an object of its own; SGLang's native routes tell a part of that."""
    status, content = _told(error)
    return status, {"error": content}


def told_flat(error: GuerdonError) -> tuple[int, Any]:
    """An error as SGLang's OpenAI routes tell it."""
    status, content = _told(error)
    return status, {"object": "error", **content}


def models(infos: Iterable[ModelInfo], created: int) -> dict[str, Any]:
    """The body of `/v1/models`: what is served, in the order given, since `created` in seconds of the epoch."""
    return {"object": "list", "data": [model(info, created) for info in infos]}


def model(info: ModelInfo, created: int) -> dict[str, Any]:
    """The body of `/v1/models/NAME`, which is an entry of the list, too."""
    return {
        "id": info.name,
        "object": "model",
        "created": created,
        "owned_by": "guerdon",
        "root": info.source or info.name,
        "parent": None,
        "max_model_len": info.max_length,
        "permission": [],
    }


def usage(reply: ScoreReply) -> dict[str, Any]:
    """The token counts of all samples together."""
    num_tokens = sum(reply.lengths)
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


def request_id(body: dict[str, Any], name: str) -> str:
    """The id that the body has under that name, else a new one; raises InvalidRequest where it is no string."""
    value = body.get(name) or uuid.uuid4().hex
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is no string; send one, or leave it out")
    return value


def _told(error: GuerdonError) -> tuple[int, dict[str, Any]]:
    status = 404 if isinstance(error, UnknownModel) else error.http
    kind = _TYPES.get(status, type(error).__name__)
    return status, {"message": text_of(error), "type": kind, "param": None, "code": status}
