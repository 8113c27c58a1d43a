"""JSON Schemas of the bodies that are served: what each form is asked, and what it answers.

What a schema takes is read, but for what only the model can tell (which inputs it takes, how long a sample may be,
which tokens its vocabulary has) and what no schema says (an input that is there twice, or whose data are neither here
nor behind the JSON; a whole number is written without a point). What else is read, such as null in a key's place, is
left out.
"""

from __future__ import annotations

from typing import Any

from guerdon.wire.tensors import DTYPES, MAX_DIMENSION, MAX_RANK

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": ["boolean", "null"]}
_NUMBER: Schema = {"type": "number"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_WHOLE: Schema = {"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1}
_IDS: Schema = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}}
_TEXTS: Schema = {"type": "array", "minItems": 1, "items": TEXT}
_MODEL: Schema = {"type": ["string", "null"], "description": "a served model's name; else the first one"}


def ref(name: str) -> Schema:
    """The component of that name."""
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: dict[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _only(properties: dict[str, Schema]) -> Schema:
    """An object of these keys and no others."""
    return _object(properties) | {"additionalProperties": False}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _any(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _word(*words: str) -> Schema:
    return {"enum": [*words, None]}


def _without(names: str) -> dict[str, Schema]:
    """Keys that ask for what is not done here: nothing may stand there."""
    return {name: {"enum": [None, False, 0, ""]} for name in names.split()}


_PART = _object({"type": {"const": "text"}, "text": TEXT}, "text")
_MESSAGE = _object({"role": TEXT, "content": _any(TEXT, _list(_PART), {"type": "null"})}, "role")
_SIDE = _word("left", "right")

_POOLED: dict[str, Schema] = {
    "model": _MODEL,
    "request_id": {"type": ["string", "null"]},
    "priority": _WHOLE,
    "add_special_tokens": FLAG,
    "padding": _word("do_not_pad"),
    "truncate_prompt_tokens": {"type": ["integer", "null"], "minimum": -1, "maximum": 2**63 - 1, "not": {"const": 0}},
    "truncation_side": _SIDE,
    **dict.fromkeys(("use_activation", "softmax", "activation"), FLAG),
}
_SAMPLES: dict[str, Schema] = _POOLED | _without(
    "normalize dimensions chat_template chat_template_kwargs add_generation_prompt continue_final_message"
)
_INPUT = _any(TEXT, _TEXTS, _IDS, {"type": "array", "minItems": 1, "items": _IDS})
_NATIVE: dict[str, Schema] = {
    "model": _MODEL,
    "rid": _any(TEXT, _list(TEXT), {"type": "null"}),
    "priority": _WHOLE,
    "add_special_tokens": FLAG,
    **_without(
        "input_embeds image_data video_data audio_data embed_overrides multi_item_delimiter_indices lora_path "
        "token_indices_to_pool is_cross_encoder_request dimensions return_pooled_hidden_states return_prompt_token_ids"
    ),
}
_IDS_OR_LISTS = _any(_IDS, {"type": "array", "minItems": 1, "items": _IDS})
_TEXT_OR_LIST = _any(TEXT, _TEXTS)
_SGLANG_BODY = _any(
    _object(_NATIVE | {"text": _TEXT_OR_LIST, "input_ids": {"type": "null"}}, "text"),
    _object(_NATIVE | {"input_ids": _IDS_OR_LISTS, "text": {"type": "null"}}, "input_ids"),
)


def _sampled(more: dict[str, Schema]) -> Schema:
    """A body of vLLM's with samples, as texts and ids or as messages, and never both."""
    conversation = {"type": "array", "minItems": 1, "items": ref("Message")}
    with_input = _object(_SAMPLES | more | {"input": _INPUT}, "input") | {"not": {"required": ["messages"]}}
    spoken = _SAMPLES | more | {"messages": conversation, "add_special_tokens": {"enum": [None, False]}}
    return _any(with_input, _object(spoken, "messages") | {"not": {"required": ["input"]}})


def _pair(first: str, second: str) -> Schema:
    text = _any(TEXT, _object({"content": _list(ref("Part"))}, "content"))
    several = {"type": "array", "minItems": 1, "items": text}
    properties = _POOLED | {first: text, second: _any(text, several)}
    properties |= _without("max_tokens_per_query max_tokens_per_doc instruction chat_template_kwargs")
    others = ({"text_1", "queries", "data_1"} - {first}) | ({"text_2", "documents", "items", "data_2"} - {second})
    return _object(properties | {name: {"type": "null"} for name in sorted(others)}, first, second)


_CONFIG = {**TEXT, "contentMediaType": "application/json", "minLength": 2}
_PARAMETER = {"type": ["string", "number", "boolean"]}
_SHAPE = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_DIMENSION - 1},
    "maxItems": MAX_RANK,
}
_DATATYPE = {"enum": ["BYTES", *DTYPES]}
_ELEMENT = {"type": ["string", "number", "boolean", "null", "array"]}

KSERVE: dict[str, Schema] = {
    "InferInput": _object(
        {
            "name": {"type": "string", "minLength": 1},
            "datatype": _DATATYPE,
            "shape": _SHAPE,
            "parameters": {"type": "object", "properties": {"binary_data_size": _COUNT}},
            "data": {**_list(_ELEMENT), "description": "flat or nested in row order"},
        },
        "name",
        "datatype",
        "shape",
    ),
    "InferRequest": _object(
        {
            "id": TEXT,
            "parameters": {
                "type": "object",
                "properties": {
                    "timeout": {**_COUNT, "description": "microseconds from arrival; 0: the server's own limit"},
                    "priority": {**_COUNT, "description": "1 goes first; 0 is the default"},
                    "binary_data_output": {"type": "boolean"},
                    "train_id": {**TEXT, "description": "names a train request, which is applied once"},
                },
            },
            "inputs": {"type": "array", "minItems": 1, "items": ref("InferInput")},
            "outputs": _list(
                _object(
                    {
                        "name": TEXT,
                        "parameters": {"type": "object", "properties": {"binary_data": {"type": "boolean"}}},
                    },
                    "name",
                )
            ),
        },
        "inputs",
    ),
    "InferReply": _object(
        {
            "model_name": TEXT,
            "model_version": TEXT,
            "id": TEXT,
            "parameters": {"type": "object", "additionalProperties": _PARAMETER},
            "outputs": _list(
                _object(
                    {"name": TEXT, "datatype": _DATATYPE, "shape": _SHAPE, "data": _list(_ELEMENT)},
                    "name",
                    "datatype",
                    "shape",
                )
            ),
        },
        "model_name",
        "model_version",
        "outputs",
    ),
    "Server": _object({"name": TEXT, "version": TEXT, "extensions": _list(TEXT)}, "name", "version", "extensions"),
    "Live": _object({"live": {"type": "boolean"}}, "live"),
    "Ready": _object({"name": TEXT, "ready": {"type": "boolean"}}, "ready"),
    "Statistics": _object({"model_stats": _list(ref("ModelStatistics"))}, "model_stats"),
    "ModelStatistics": _object(
        {
            "name": TEXT,
            "version": TEXT,
            **dict.fromkeys(("last_inference", "inference_count", "execution_count"), _COUNT),
            "inference_stats": {
                "type": "object",
                "additionalProperties": _object({"count": _COUNT, "ns": _COUNT}, "count", "ns"),
            },
            "batch_stats": _list({"type": "object"}),
        },
        "name",
        "version",
        "inference_stats",
    ),
    "Model": _object(
        {
            "name": TEXT,
            "versions": _list(TEXT),
            "platform": TEXT,
            "inputs": _list(ref("TensorKind")),
            "outputs": _list(ref("TensorKind")),
        },
        "name",
        "versions",
        "platform",
        "inputs",
        "outputs",
    ),
    "TensorKind": _object(
        {"name": TEXT, "datatype": _DATATYPE, "shape": _list({"type": "integer", "minimum": -1})},
        "name",
        "datatype",
        "shape",
    ),
    "ModelConfig": _object({"name": TEXT, "platform": TEXT, "max_batch_size": _COUNT}, "name", "max_batch_size"),
    "RepositoryAsked": _object({"ready": {"type": "boolean"}}),
    "RepositoryIndex": _list(
        _object({"name": TEXT, "version": TEXT, "state": {"enum": ["READY", "UNAVAILABLE"]}, "reason": TEXT}, "name")
    ),
    "RepositorySource": {
        **_only({"parameters": _only({"model": {**TEXT, "minLength": 1}, "config": _CONFIG})}),
        "description": "the checkpoint by its path, as `model` or in Triton's JSON as `config`; else the same again",
    },
    "RepositoryUnload": _only({"parameters": _only({"unload_dependents": {"type": "boolean"}})}),
    "OpenAIModel": _object(
        {"id": TEXT, "object": {"const": "model"}, "created": _COUNT, "max_model_len": {"type": ["integer", "null"]}},
        "id",
        "object",
        "created",
    ),
    "OpenAIModels": _object({"object": {"const": "list"}, "data": _list(ref("OpenAIModel"))}, "object", "data"),
    "Error": _object({"error": TEXT, "kind": TEXT, "num_steps": _COUNT}, "error", "kind"),
    "OpenAIError": _object({"error": ref("OpenAIErrorContent")}, "error"),
    "OpenAIErrorContent": _object(
        {"message": TEXT, "type": TEXT, "param": {"type": "null"}, "code": {"type": "integer"}},
        "message",
        "type",
        "code",
    ),
    "FlatError": _object(
        {"object": {"const": "error"}, "message": TEXT, "type": TEXT, "code": {"type": "integer"}},
        "object",
        "message",
        "type",
        "code",
    ),
    "TEIError": _object({"error": TEXT, "error_type": TEXT}, "error", "error_type"),
    "Message": _MESSAGE,
    "Part": _PART,
}
"""The components that other schemas name."""

_NUMBERS = _any(_list(_NUMBER), _list(_list(_NUMBER)), {**TEXT, "contentEncoding": "base64"})
_COMPONENTS = {"type": "object", "additionalProperties": _NUMBER}
_MORE = {"reward": _NUMBER, "components": _COMPONENTS}
_USAGE = _object({"prompt_tokens": _COUNT, "total_tokens": _COUNT}, "prompt_tokens", "total_tokens")


def _listed(row: dict[str, Schema]) -> Schema:
    rows = _list(_object(row | _MORE, *row))
    properties = {"object": {"const": "list"}, "model": TEXT, "data": rows, "usage": _USAGE}
    return _object(properties, *properties)


_EMBEDDED = _object({"embedding": _list(_NUMBER), "meta_info": {"type": "object"}, **_MORE}, "embedding", "meta_info")
_NATIVE_ANSWER = _any(_EMBEDDED, _list(_EMBEDDED))
_CLASSIFIED = _listed({"index": _COUNT, "label": TEXT, "probs": _list(_NUMBER), "num_classes": _COUNT})
_LABELLED = _list(_object({"score": _NUMBER, "label": TEXT, "components": _COMPONENTS}, "score", "label"))
_ROW = {"type": "array", "minItems": 1, "maxItems": 2, "items": TEXT}
_SCORE = _any(*(_pair(*names) for names in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))))
_SCORED = _listed({"index": _COUNT, "object": {"const": "score"}, "score": _NUMBER})
_PROMPTS = {**_any(_TEXT_OR_LIST, {"enum": [None, []]}), "description": "one a text of `query`, or none"}
_LABELS = {"description": "any value, one a text of `query`, or none"}
_ENCODED = {
    "task": _word("classify", "token_classify"),
    "encoding_format": _word("float", "base64"),
    "embed_dtype": _word("float32"),
    "endianness": _word("native", "little", "big"),
}

FORMS: dict[str, tuple[Schema, Schema]] = {
    "/get_reward": (
        _object({"model": _MODEL, "query": _any(TEXT, _list(TEXT)), "prompts": _PROMPTS, "labels": _LABELS}, "query"),
        _object(
            {
                "rewards": _list(_NUMBER),
                "scores": _list(_NUMBER),
                "extra_logs": {"type": "object", "additionalProperties": _list(_NUMBER)},
            },
            "rewards",
            "scores",
            "extra_logs",
        ),
    ),
    "/reward": (
        _object(
            {
                "model": _MODEL,
                "prompt": _any(TEXT, {"type": "array", "minItems": 1, "items": ref("Message")}),
                "response": TEXT,
                "label": {},
            },
            "prompt",
            "response",
        ),
        _any(_NUMBER, {"type": "object"}),
    ),
    "/classify": (_any(_sampled({}), _SGLANG_BODY), _any(_CLASSIFIED, _NATIVE_ANSWER)),
    "/pooling": (
        _sampled(_ENCODED),
        _listed({"index": _COUNT, "object": {"const": "pooling"}, "data": _NUMBERS}),
    ),
    "/score": (_SCORE, _SCORED),
    "/v1/score": (_SCORE, _SCORED),
    "/encode": (_SGLANG_BODY, _NATIVE_ANSWER),
    "/v1/embeddings": (
        _object(
            {name: schema for name, schema in _NATIVE.items() if name != "rid"}
            | {"input": _INPUT, "encoding_format": _word("float", "base64")},
            "input",
        ),
        _listed({"index": _COUNT, "object": {"const": "embedding"}, "embedding": _NUMBERS}),
    ),
    "/predict": (
        _object(
            {
                "model": _MODEL,
                "inputs": _any(TEXT, _ROW, {"type": "array", "minItems": 1, "items": _ROW}),
                "raw_scores": FLAG,
                "truncate": FLAG,
                "truncation_direction": _word("left", "right", "Left", "Right"),
                "add_special_tokens": FLAG,
                "parameters": {
                    "type": ["object", "null"],
                    "properties": {"function_to_apply": _word("none", "sigmoid", "softmax")},
                },
            },
            "inputs",
        ),
        _any(_LABELLED, _list(_LABELLED)),
    ),
}
"""What each form is asked and what it answers, by its path."""
