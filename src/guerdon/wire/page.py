"""JSON Schemas of what the page of a server reads, and asks to have scored."""

from __future__ import annotations

from guerdon.wire.schemas import FLAG, TEXT, Schema, ref

MAX_RESPONSES = 16
"""How many responses, or conversations, Try it takes at once."""

_NUMBER: Schema = {"type": "number"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_OBJECT: Schema = {"type": "object"}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_MAYBE_LIST: Schema = {"type": ["array", "null"]}
_MODEL: Schema = {"model": {**_MAYBE_TEXT, "description": "a served model's name; else the first one"}}


def _object(properties: dict[str, Schema], *optional: str) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _some(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "maxItems": MAX_RESPONSES, "items": items}


def _asked(properties: dict[str, Schema], *optional: str) -> Schema:
    return _object(_MODEL | properties, "model", *optional) | {"additionalProperties": False}


_EXTREMES: Schema = {"type": "array", "items": ref("Extreme")}
_RESULT = _object(
    {
        "reward": {"type": ["number", "null"]},
        "error": _MAYBE_TEXT,
        "attributes": _OBJECT,
        "components": _OBJECT,
        "num_tokens": _COUNT,
        "tokens": _MAYBE_LIST,
        "steps": _MAYBE_LIST,
    }
)
_CONVERSATION: Schema = {"type": "array", "minItems": 1, "items": ref("Message")}

SCHEMAS: dict[str, Schema] = {
    "Snapshot": _object(
        {
            "server": _OBJECT,
            "models": {"type": "array", "items": _OBJECT},
            "series": _OBJECT,
            "totals": _OBJECT,
            "rewards": _OBJECT,
            "critic": {"type": ["object", "null"]},
        }
    ),
    "Extremes": _object({"model": TEXT, "window_s": _NUMBER, "best": _EXTREMES, "worst": _EXTREMES}),
    "Extreme": _object(
        {
            "time": _NUMBER,
            "reward": _NUMBER,
            "num_tokens": _COUNT,
            "weights_version": TEXT,
            "prompt": _MAYBE_TEXT,
            "response": _MAYBE_TEXT,
            "is_cut": {"type": "boolean"},
            "attributes": _OBJECT,
            "components": _OBJECT,
        },
        *("attributes", "components"),
    ),
    "Trial": {
        "anyOf": [
            _asked(
                {"prompt": _MAYBE_TEXT, "responses": {"anyOf": [TEXT, _some(TEXT)]}, "template": FLAG},
                *("prompt", "template"),
            ),
            _asked({"messages": _some(_CONVERSATION)}),
        ]
    },
    "Tried": _object(
        {
            "model": TEXT,
            "weights_version": TEXT,
            "queue_s": _NUMBER,
            "compute_s": _NUMBER,
            "results": {"type": "array", "items": _RESULT},
        }
    ),
}
"""The components that the page's paths name."""
