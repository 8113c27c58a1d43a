"""The OpenAPI document of a server's HTTP side: every path that it serves, what it takes, answers and refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from guerdon.core import ModelInfo, OperationInfo
from guerdon.wire import page, schemas
from guerdon.wire.schemas import Schema, ref

_JSON, _BINARY, _PROMETHEUS = "application/json", "application/octet-stream", "text/plain"
_READ, _WRITE, _FORM = ("get", "head"), ("post",), ("post", "put")

_STATUSES = {
    400: "the request is wrong; the text says what of it",
    401: "no key, or one that this server does not know",
    403: "the key's role does not allow it",
    404: "no such path, or no such model in forms that tell it so",
    405: "the path does not take this method",
    413: "the body is larger than this server accepts",
    422: "the request is wrong; the text says what of it",
    424: "the model gave no finite score, or something failed in the server",
    429: "the queue is full; Retry-After tells when to try again",
    431: "the request's head is larger than this server accepts",
    500: "the model gave no finite score, or something failed in the server",
    501: "the protocol has it, this server does not",
    503: "not ready, stopping, or the queue is full; Retry-After tells when to try again",
    504: "not answered, or not sent, within the time that it has",
    507: "the server's disk is full, read-only or broken",
}
_USUAL = (400, 401, 403, 404, 405, 413, 431, 500, 501, 503, 504)
_TOLD = {
    **dict.fromkeys(("/classify", "/pooling", "/score", "/v1/score", "/encode"), "OpenAIError"),
    "/v1/embeddings": "FlatError",
    "/predict": "TEIError",
}
"""The schema of each form's errors, where it is not KServe's."""

_IN_URL: dict[str, tuple[str, ...]] = {
    "/get_reward": ("extra_logs",),
    "/reward": (),
    **dict.fromkeys(
        ("/classify", "/pooling", "/score", "/v1/score"),
        ("add_special_tokens", "use_activation", "softmax", "activation"),
    ),
    "/encode": ("add_special_tokens",),
    "/v1/embeddings": ("add_special_tokens",),
    "/predict": ("add_special_tokens", "raw_scores", "truncate"),
}
"""The switches that each form also takes behind the URL's `?`."""

_PEERS = {
    "/get_reward": "OpenRLHF's remote reward model",
    "/reward": "slime's remote reward model",
    "/classify": "vLLM's classification, and SGLang's",
    "/pooling": "vLLM's pooling",
    "/score": "vLLM's scores of pairs",
    "/v1/score": "vLLM's scores of pairs",
    "/encode": "SGLang's embeddings",
    "/v1/embeddings": "SGLang's embeddings in OpenAI's form",
    "/predict": "the classifiers of Text Embeddings Inference",
}

_ADMIN = "needs a key of the role admin"
_ABOUT = """Reward models and critics over KServe v2, the open inference protocol, and in the forms of other servers.
Where the server has keys, every path but `/v2/health/live`, `/v2/health/ready` and `/health` needs one."""


def document(models: Sequence[ModelInfo | OperationInfo], *, has_page: bool = True) -> dict[str, Any]:
    """The document, OpenAPI 3.1, of a server of these models and operations, which `has_page` at `/`."""
    scored = [info.name for info in models if isinstance(info, ModelInfo)]
    paths = _kserve([info.name for info in models]) | _repository(scored) | _openai(scored)
    paths |= {path: _form(path, scored) for path in schemas.FORMS}
    paths |= _page(scored) if has_page else {}
    paths["/metrics"] = _path(_READ, "What the server has counted and measured", _ok(_PROMETHEUS, schemas.TEXT))
    paths["/openapi.json"] = _path(_READ, "This document", _ok(_JSON, {"type": "object"}))
    return {
        "openapi": "3.1.0",
        "info": {"title": "guerdon", "summary": "Rewards for RLHF", "description": _ABOUT, "version": "2"},
        "security": [{"bearer": []}, {"basic": []}],
        "paths": paths,
        "components": {
            "schemas": schemas.KSERVE | page.SCHEMAS,
            "responses": _refusals(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "basic": {"type": "http", "scheme": "basic", "description": "any name, the key as the password"},
            },
        },
    }


def _kserve(names: list[str]) -> dict[str, Any]:
    live, health = _ok(_JSON, ref("Live")), _described("it is") | _described("it is not", 503)
    ready, statistics = _ok(_JSON, ref("Ready")), _ok(_JSON, ref("Statistics"))
    paths = {
        "/v2": _path(_READ, "The server", _ok(_JSON, ref("Server"))),
        "/v2/health/live": _path(_READ, "Whether the server is alive", live, is_open=True),
        "/v2/health/ready": _path(_READ, "Whether all models are ready", ready, is_open=True),
        "/health": _path(_READ, "Whether all models are ready", health, is_open=True),
    }
    paths["/v2/models/stats"] = _path(_READ, "Statistics of all models in Triton's terms", statistics)
    for version in ("", "/versions/{version}"):
        model, where = "/v2/models/{name}" + version, [_in_path("name", names)]
        if version:
            where.append(_in_path("version", ["1"]))
        metadata, config = _ok(_JSON, ref("Model")), _ok(_JSON, ref("ModelConfig"))
        paths[model] = _path(_READ, "The model's tensors", metadata, parameters=where)
        paths[model + "/config"] = _path(_READ, "The model's configuration in Triton's terms", config, parameters=where)
        paths[model + "/stats"] = _path(_READ, "Statistics in Triton's terms", statistics, parameters=where)
        paths[model + "/ready"] = _path(_READ, "Whether the model is ready", ready, parameters=where)
        paths[model + "/infer"] = _path(
            _WRITE,
            "Scores, or an operation on a critic",
            _inferred(),
            parameters=[*where, _HEADER_LENGTH],
            body=_content(_JSON, ref("InferRequest")) | _content(_BINARY, _BYTES),
            statuses=(*_USUAL, 507),
        )
    return paths


def _repository(names: list[str]) -> dict[str, Any]:
    one = "/v2/repository/models/{name}/"
    index, where = _ok(_JSON, ref("RepositoryIndex")), [_in_path("name", names)]
    asked, source, none = (_content(_JSON, ref(f"Repository{name}")) for name in ("Asked", "Source", "Unload"))
    unloaded = _described("done")
    loaded = {"200": unloaded["200"] | {"headers": {"guerdon-weights-version": _header("what serves now")}}}
    return {
        "/v2/repository/index": _path(_WRITE, "The served models", index, body=asked, needs_body=False),
        one + "load": _path(
            _WRITE, f"Serves other weights; {_ADMIN}", loaded, parameters=where, body=source, needs_body=False
        ),
        one + "unload": _path(
            _WRITE, f"Serves it no longer; {_ADMIN}", unloaded, parameters=where, body=none, needs_body=False
        ),
    }


def _page(names: list[str]) -> dict[str, Any]:
    file = {"name": "file", "in": "path", "required": True, "schema": schemas.TEXT}
    window = _in_query("window", {"type": "number", "minimum": 60, "maximum": 86_400})
    reference = _in_query("reference", {"type": "string", "pattern": r"^(previous|start|[0-9.]+-[0-9.]+)$"})
    model = _in_query("model", {"enum": names})
    told = {"200": _described("the file")["200"] | {"content": {"*/*": {"schema": schemas.TEXT}}}}
    told |= _described("the browser has it already", 304)
    return {
        "/": _path(_READ, "The page that shows what is served, and how", told),
        "/dashboard/{file}": _path(_READ, "A file of the page", told, parameters=[file]),
        "/dashboard/snapshot": _path(
            _READ, "All that the page shows", _ok(_JSON, ref("Snapshot")), parameters=[window, reference, model]
        ),
        "/dashboard/samples": _path(
            _READ,
            "The best and the worst recent samples; where there are keys, needs one of the role admin",
            _ok(_JSON, ref("Extremes")),
            parameters=[model, window],
        ),
        "/dashboard/try": _path(
            _WRITE, "Scores responses, token by token", _ok(_JSON, ref("Tried")), body=_content(_JSON, ref("Trial"))
        ),
    }


def _openai(names: list[str]) -> dict[str, Any]:
    listed, one = _ok(_JSON, ref("OpenAIModels")), _ok(_JSON, ref("OpenAIModel"))
    where = [_in_path("name", names)]
    return {
        "/v1/models": _path(_READ, "The served models as OpenAI lists them", listed, told="OpenAIError"),
        "/v1/models/{name}": _path(_READ, "One of them", one, parameters=where, told="OpenAIError"),
    }


def _form(path: str, names: list[str]) -> dict[str, Any]:
    asked, answer = schemas.FORMS[path]
    parameters = [_in_query("model", {"enum": names}), *(_in_query(name, _SWITCH) for name in _IN_URL[path])]
    if path == "/reward":
        parameters.append(_in_query("key", {"type": "string", "not": {"const": "components"}}))
    told = _TOLD.get(path, "Error")
    statuses = (*_USUAL, 422, 424, 429) if told == "TEIError" else _USUAL
    scored = {"200": _answer("the scores", _TIMES, _content(_JSON, answer))}
    body = _content(_JSON, asked)
    return _path(_FORM, f"The form of {_PEERS[path]}", scored, parameters, body, statuses=statuses, told=told)


def _path(
    methods: Sequence[str],
    summary: str,
    answers: dict[str, Any],
    parameters: Sequence[dict[str, Any]] = (),
    body: dict[str, Any] | None = None,
    *,
    needs_body: bool = True,
    is_open: bool = False,
    statuses: Sequence[int] = _USUAL,
    told: str = "Error",
) -> dict[str, Any]:
    """The same operation by each of the methods; `told` names the schema of its errors."""
    operation: dict[str, Any] = {"summary": summary, "responses": _refused(told, *statuses) | answers}
    if parameters:
        operation["parameters"] = [*parameters]
    if body is not None:
        operation["requestBody"] = {"required": needs_body, "content": body}
    if is_open:
        operation["security"] = []
    return dict.fromkeys(methods, operation)


def _refused(told: str, *statuses: int) -> dict[str, Any]:
    """References to `_refusals`."""
    return {str(status): {"$ref": f"#/components/responses/{told}{status}"} for status in statuses}


def _refusals() -> dict[str, Any]:
    """Each status in each way to tell errors; whoever is refused before the form is known is told in KServe's."""
    found: dict[str, Any] = {}
    for told in ("Error", *dict.fromkeys(_TOLD.values())):
        schema = ref(told) if told == "Error" else {"anyOf": [ref(told), ref("Error")]}
        found |= {f"{told}{status}": _answer(text, {}, _content(_JSON, schema)) for status, text in _STATUSES.items()}
    return found


def _ok(media: str, schema: Schema) -> dict[str, Any]:
    return {"200": _answer("the answer", {}, _content(media, schema))}


def _described(text: str, status: int = 200) -> dict[str, Any]:
    """An answer without a body."""
    return {str(status): {"description": text}}


def _inferred() -> dict[str, Any]:
    """An answer in JSON, or in binary tensors behind their JSON, as long as the header says."""
    content = _content(_JSON, ref("InferReply")) | _content(_BINARY, _BYTES)
    length = {"inference-header-content-length": _header("bytes of JSON before the binary tensors")}
    return {"200": _answer("the tensors that answer", _TIMES | length, content)}


def _answer(text: str, headers: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": content} | ({"headers": headers} if headers else {})


def _content(media: str, schema: Schema) -> dict[str, Any]:
    return {media: {"schema": schema}}


def _header(text: str) -> dict[str, Any]:
    return {"description": text, "schema": schemas.TEXT}


def _in_path(name: str, values: list[str]) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"enum": values}}


def _in_query(name: str, schema: Schema) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema}


_SWITCH: Schema = {"enum": ["true", "false"]}
_BYTES: Schema = {"type": "string", "format": "binary"}
_TIMES = {
    "guerdon-queue-ms": _header("milliseconds until the last sample was taken up"),
    "guerdon-compute-ms": _header("milliseconds of the batches that held some of the samples"),
    "guerdon-weights-version": _header("the version of the weights that gave the scores"),
}
_HEADER_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "description": "bytes of JSON before the binary tensors; 0: the whole body is one text",
    "schema": {"type": "integer", "minimum": 0},
}
