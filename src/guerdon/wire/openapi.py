"""The OpenAPI document of a server's HTTP side: every path, with the structs that it reads and writes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from guerdon.core import ModelInfo
from guerdon.wire import kserve, signature
from guerdon.wire.forms import (
    ALL_FORMS,
    ANSWERS,
    TOKEN_FORMS,
    openai,
    page_bodies,
    tei,
    tokens,
    triton_repository,
    vllm_control,
)
from guerdon.wire.forms.form import Url
from guerdon.wire.schema import Info, inputs_of, outputs_of, table

Schema = dict[str, Any]

_JSON, _BINARY, _PROMETHEUS = "application/json", "application/octet-stream", "text/plain"
_READ, _WRITE, _FORM = ("get", "head"), ("post",), ("post", "put")

_STATUSES = {
    400: "the request is wrong; the error says why",
    401: "the key is missing, or unknown to this server",
    403: "the key's role does not allow it",
    404: "no such path, or no such model in forms that report it so",
    405: "the path does not accept this method",
    413: "the body is larger than this server accepts",
    422: "the request is wrong; the error says why",
    424: "the model gave no finite score, or the server failed",
    429: "the queue is full; Retry-After says when to try again",
    431: "the request's head is larger than this server accepts",
    500: "the model gave no finite score, or the server failed",
    501: "part of the protocol, but not of this server",
    503: "not ready, stopping, or the queue is full; Retry-After says when to try again",
    504: "not answered, or not sent, in time",
    507: "the server's disk is full, read-only or broken",
}
_USUAL = (400, 401, 403, 404, 405, 413, 431, 500, 501, 503, 504)
_OF_TEI = (*_USUAL, 422, 424, 429)

_ADMIN, _TRAIN = "needs a key of the role admin", "needs a key of the role train"
_ABOUT = """Reward models, critics, teachers and judges over KServe v2, the open inference protocol, and in the forms
of other servers. If the server has keys, every path but `/v2/health/live`, `/v2/health/ready`, `/health` and `/health/`
needs one."""

_TEXT: Schema = {"type": "string"}
_BYTES: Schema = {"type": "string", "format": "binary"}
_NUMPY: dict[type, Schema] = {
    np.ndarray: {"type": "array", "items": {"type": "number"}},
    np.float32: {"type": "number"},
}

_TYPES: list[Any] = list(
    dict.fromkeys(
        [
            *(kserve.RequestBody, kserve.ReplyBody, kserve.ErrorBody, openai.OpenAIModel, openai.OpenAIModels),
            *(signature.ServerMetadata, signature.Liveness, signature.Readiness, signature.Statistics),
            *(signature.ModelMetadata, signature.TritonConfig),
            *(triton_repository.LoadBody, triton_repository.LoadParameters, triton_repository.UnloadBody),
            *(triton_repository.IndexBody, list[triton_repository.IndexEntry]),
            *(page_bodies.TrialBody, page_bodies.TrialReply, page_bodies.Extremes, page_bodies.Snapshot),
            *(kind for form in ALL_FORMS.values() for kind in (*form.bodies, form.url, *form.replies, form.error)),
            *(kind for form in TOKEN_FORMS.values() for kind in (*form.bodies, form.url, *form.replies)),
            *(vllm_control.SleepUrl, vllm_control.WakeUrl, vllm_control.SleepReply, vllm_control.WakeReply),
            *(vllm_control.IsSleepingReply, vllm_control.UpdateUrl, vllm_control.InitBody, vllm_control.UpdateBody),
            *(vllm_control.FinishBody, vllm_control.PhaseReply, tokens.InfoReply),
            *(kind for answer in ANSWERS.values() for kind in (answer.body, answer.reply) if kind is not None),
        ]
    )
)
"""Every type that a path reads or writes."""


@functools.cache
def components() -> tuple[dict[Any, Schema], dict[str, Schema]]:
    """Returns the schema of each of `_TYPES`, and the named schemas to which they refer."""
    schemas, named = msgspec.json.schema_components(
        _TYPES, schema_hook=_NUMPY.__getitem__, ref_template="#/components/schemas/{name}"
    )
    _describe_items([*schemas, named])
    return dict(zip(_TYPES, schemas, strict=True)), named


def _describe_items(value: Any) -> None:
    """Gives arrays in the schemas what generators of clients need: an object as `items`, or `prefixItems` alone."""
    if isinstance(value, dict):
        if value.get("items") is False:  # `maxItems` says the same
            del value["items"]
        elif "array" in (value.get("type") or ()):
            value.setdefault("items", {})
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _describe_items(inner)


def schema_of(*kinds: Any) -> Schema:
    """Returns the schema of a value of one of these types."""
    schemas = [components()[0][kind] for kind in kinds]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def document(models: Sequence[Info], *, has_page: bool = True, version: str = "0") -> dict[str, Any]:
    """Returns the document, OpenAPI 3.1, of a server of these models and operations, with its page or without."""
    scored = [info.name for info in models if isinstance(info, ModelInfo)]
    sections = {
        "KServe v2": _kserve(models),
        "Forms of other servers": _forms(scored),
        "Swapping models": _repository(scored) | _control(scored),
        "Observing": _observing(),
        "Pages": _page(scored) if has_page else {},
    }
    paths = {}
    for tag, found in sections.items():
        for path, operations in found.items():
            paths[path] = {method: operation | {"tags": [tag]} for method, operation in operations.items()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "guerdon",
            "summary": "Models for RL trainers",
            "description": _ABOUT,
            "version": version,
        },
        "security": [{"bearer": []}, {"basic": []}],
        "tags": [{"name": tag} for tag, found in sections.items() if found],
        "paths": paths,
        "components": {
            "schemas": components()[1],
            "responses": _refusals(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "basic": {"type": "http", "scheme": "basic", "description": "any name, the key as the password"},
            },
        },
    }


def _observing() -> dict[str, Any]:
    health = _described("it is") | _described("it is not", 503)
    text, own = _ok(_content(_PROMETHEUS, _TEXT)), _ok(_content(_JSON, {"type": "object"}))
    return {
        "/v2/health/live": _path(_READ, "Whether the server is alive", signature.Liveness, is_open=True),
        "/v2/health/ready": _path(_READ, "Whether all models are ready", signature.Readiness, is_open=True),
        "/health": _path(_READ, "Whether all models are ready", health, is_open=True),
        "/health/": _path(_READ, "The same, for TRL before 1.11", health, is_open=True),
        "/metrics": _path(_READ, "What the server has counted and measured", text),
        "/openapi.json": _path(_READ, "This document", own),
    }


def _kserve(models: Sequence[Info]) -> dict[str, Any]:
    names = [info.name for info in models]
    inputs, outputs = (
        table(dict.fromkeys(field for info in models for field in found(info).values()))
        for found in (inputs_of, outputs_of)
    )
    paths = dict.fromkeys(("/v2", "/v2/"), _path(_READ, "The server", signature.ServerMetadata))
    head = {"200": _described("the head")["200"] | {"content": _content(_BINARY, _BYTES)}}
    head |= _described("the client's copy is current", 304)
    # In JSON, or in binary tensors after their JSON, whose length is in the header.
    replied = _content(_JSON, kserve.ReplyBody) | _content(_BINARY, _BYTES)
    length = {"inference-header-content-length": _header("bytes of JSON before the binary tensors")}
    questions = (
        ("", "The model's tensors", signature.ModelMetadata),
        ("/config", "The model's configuration in Triton's terms", signature.TritonConfig),
        ("/stats", "Statistics in Triton's terms", signature.Statistics),
        ("/ready", "Whether the model is ready", signature.Readiness),
        ("/head", "A teacher's output head, as safetensors", head),
    )
    paths["/v2/models/stats"] = _path(_READ, "Statistics of all models in Triton's terms", signature.Statistics)
    for version in ("", "/versions/{version}"):
        model, where = "/v2/models/{name}" + version, [_in_path("name", names)]
        if version:
            where.append(_in_path("version", [signature.MODEL_VERSION]))
        paths |= {model + path: _path(_READ, summary, reply, where) for path, summary, reply in questions}
        paths[model + "/infer"] = _path(
            _WRITE,
            "Scores, or an operation on a critic",
            {"200": _answer("the tensors", _TIMES | length, replied)},
            description=f"The inputs of these models and operations:\n\n{inputs}\nTheir outputs:\n\n{outputs}",
            parameters=[*where, _HEADER_LENGTH],
            body=_content(_JSON, kserve.RequestBody) | _content(_BINARY, _BYTES),
            statuses=(*_USUAL, 507),
        )
    return paths


def _repository(names: list[str]) -> dict[str, Any]:
    where, index = [_in_path("name", names)], list[triton_repository.IndexEntry]
    done = _described("done")
    loaded = {"200": done["200"] | {"headers": {"guerdon-weights-version": _header("what serves now")}}}

    def path(summary: str, reply: Any, body: Any, where: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        return _path(_WRITE, summary, reply, where, _content(_JSON, body), needs_body=False)

    load = path(f"Serves other weights; {_ADMIN}", loaded, triton_repository.LoadBody, where)
    return {
        "/v2/repository/index": path("The served models", index, triton_repository.IndexBody),
        "/v2/repository/models/{name}/load": load,
        "/v2/repository/models/{name}/unload": path(
            f"Stops serving it; {_ADMIN}", done, triton_repository.UnloadBody, where
        ),
    }


def _control(names: list[str]) -> dict[str, Any]:
    tensors = _content(_JSON, vllm_control.UpdateBody) | _content(_BINARY, _BYTES)
    phases = {
        "/init_weight_transfer_engine": ("Sets up live weights", _content(_JSON, vllm_control.InitBody)),
        "/start_weight_update": ("Begins an update of the weights", None),
        "/update_weights": ("Takes tensors, as safetensors or by files", tensors),
        "/finish_weight_update": ("Swaps the new weights in", _content(_JSON, vllm_control.FinishBody)),
    }
    of_sleep, of_wake, of_update, of_model = (
        _in_url(url, names) for url in (vllm_control.SleepUrl, vllm_control.WakeUrl, vllm_control.UpdateUrl, Url)
    )
    sleeps = f"Gives models' memory back until they wake up; {_TRAIN}"
    return {
        "/sleep": _path(_WRITE, sleeps, vllm_control.SleepReply, of_sleep),
        "/wake_up": _path(_WRITE, f"Wakes models up; {_TRAIN}", vllm_control.WakeReply, of_wake),
        **{
            path: _path(_WRITE, f"{what}; {_TRAIN}", vllm_control.PhaseReply, of_update, body)
            for path, (what, body) in phases.items()
        },
        "/is_sleeping": _path(_READ, "Which models sleep", vllm_control.IsSleepingReply, of_model),
    }


def _page(names: list[str]) -> dict[str, Any]:
    file = {"name": "file", "in": "path", "required": True, "schema": _TEXT}
    window = _in_query("window", {"type": "number", "minimum": 60, "maximum": 86_400})
    reference = _in_query("reference", {"type": "string", "pattern": r"^(previous|start|[0-9.]+-[0-9.]+)$"})
    model, beside = (_in_query(name, {"enum": names}) for name in ("model", "beside"))
    until = _in_query("until", {"type": "number", "exclusiveMinimum": 0})
    files = {"200": _described("the file")["200"] | {"content": {"*/*": {"schema": _TEXT}}}}
    files |= _described("the browser's copy is current", 304)
    shown = [window, reference, model, beside, until]
    samples = "The best and the worst recent samples; if there are keys, needs one of the role admin"
    trial = _content(_JSON, page_bodies.TrialBody)
    return {
        "/": _path(_READ, "The page", files),
        "/docs": _path(_READ, "The page that shows this document", files),
        "/dashboard/{file}": _path(_READ, "A file of these pages", files, [file]),
        "/dashboard/snapshot": _path(_READ, "All that the page shows", page_bodies.Snapshot, shown),
        "/dashboard/samples": _path(_READ, samples, page_bodies.Extremes, [model, window]),
        "/dashboard/try": _path(_WRITE, "Scores responses, token by token", page_bodies.TrialReply, body=trial),
    }


def _forms(names: list[str]) -> dict[str, Any]:
    paths = {}
    for path, form in ALL_FORMS.items():
        statuses = _OF_TEI if form.error.__name__ == "TEIError" else _USUAL
        scored = {"200": _answer("the scores", _TIMES, _content(_JSON, *form.replies))}
        where, body = _in_url(form.url, names), _content(_JSON, *form.bodies)
        what = f"The form of {form.peer}"
        paths[path] = _path(_FORM, what, scored, where, body, statuses=statuses, error=form.error)
    for path, answer in ANSWERS.items():
        asked = None if answer.body is None else _content(_JSON, answer.body)
        paths[path] = _path(_READ if asked is None else _WRITE, answer.summary, answer.reply, body=asked)
    for path, asks in TOKEN_FORMS.items():
        reply, body = _ok(_content(_JSON, *asks.replies)), _content(_JSON, *asks.bodies)
        paths[path] = _path(_WRITE, asks.summary, reply, _in_url(asks.url, names), body, error=openai.OpenAIError)
    about, where = "A model and the server's limits, in TEI's form", _in_url(Url, names)
    paths[tokens.INFO] = _path(_READ, about, tokens.InfoReply, where, statuses=_OF_TEI, error=tei.TEIError)
    listed, where, error = "The served models as OpenAI lists them", [_in_path("name", names)], openai.OpenAIError
    paths["/v1/models"] = _path(_READ, listed, openai.OpenAIModels, error=error)
    paths["/v1/models/{name}"] = _path(_READ, "One of them", openai.OpenAIModel, where, error=error)
    return paths


def _in_url(url: type[Url], names: list[str]) -> list[dict[str, Any]]:
    keys = components()[1][url.__name__]["properties"]
    return [_in_query(name, {"enum": names} if name == "model" else schema) for name, schema in keys.items()]


def _path(
    methods: Sequence[str],
    summary: str,
    reply: Any,
    parameters: Sequence[dict[str, Any]] = (),
    body: dict[str, Any] | None = None,
    *,
    needs_body: bool = True,
    is_open: bool = False,
    statuses: Sequence[int] = _USUAL,
    error: type[msgspec.Struct] = kserve.ErrorBody,
    description: str = "",
) -> dict[str, Any]:
    """The same operation for each of the methods; `reply` is the type of its JSON, or its answers by status."""
    answers = reply if isinstance(reply, dict) else _ok(_content(_JSON, reply))
    refused = {str(status): {"$ref": f"#/components/responses/{error.__name__}{status}"} for status in statuses}
    operation: dict[str, Any] = {"summary": summary, "responses": refused | answers}
    if description:
        operation["description"] = description
    if parameters:
        operation["parameters"] = [*parameters]
    if body is not None:
        operation["requestBody"] = {"required": needs_body, "content": body}
    if is_open:
        operation["security"] = []
    return dict.fromkeys(methods, operation)


def _refusals() -> dict[str, Any]:
    """Each status with each struct of errors; a request that is refused before its form is known gets KServe's."""
    found: dict[str, Any] = {}
    errors: list[type[msgspec.Struct]] = [kserve.ErrorBody, *(form.error for form in ALL_FORMS.values())]
    for error in dict.fromkeys(errors):
        content = _content(_JSON, *dict.fromkeys([error, kserve.ErrorBody]))
        for status, text in _STATUSES.items():
            found[f"{error.__name__}{status}"] = _answer(text, _KIND | _MORE_HEADERS.get(status, {}), content)
    return found


def _ok(content: dict[str, Any]) -> dict[str, Any]:
    return {"200": _answer("the reply", {}, content)}


def _described(text: str, status: int = 200) -> dict[str, Any]:
    """A reply without a body."""
    return {str(status): {"description": text}}


def _answer(text: str, headers: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": content} | ({"headers": headers} if headers else {})


def _content(media: str, *kinds: Any) -> dict[str, Any]:
    """The content of these types, or of a schema."""
    return {media: {"schema": kinds[0] if isinstance(kinds[0], dict) else schema_of(*kinds)}}


def _header(text: str) -> dict[str, Any]:
    return {"description": text, "schema": _TEXT}


def _in_path(name: str, values: list[str]) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"enum": values}}


def _in_query(name: str, schema: Schema) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema}


_KIND = {"guerdon-error": _header("the error's class in guerdon")}
_AGAIN = {"retry-after": _header("seconds after which to try again")}
_MORE_HEADERS = {405: {"allow": _header("the methods that the path accepts")}, 429: _AGAIN, 503: _AGAIN}
_TIMES = {
    "guerdon-queue-ms": _header("milliseconds until the last sample left the queue"),
    "guerdon-compute-ms": _header("milliseconds of the batches that held some of the samples"),
    "guerdon-weights-version": _header("the version of the weights that gave the scores"),
}
_HEADER_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "description": "bytes of JSON before the binary tensors; 0: the whole body is one text",
    "schema": {"type": "integer", "minimum": 0},
}
