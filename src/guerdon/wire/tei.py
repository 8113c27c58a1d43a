"""The form of Text Embeddings Inference for classifiers: `/predict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest, Truncation
from guerdon.errors import (
    GuerdonError,
    InvalidRequest,
    Overloaded,
    SampleFailed,
    ServerFault,
    Unavailable,
    UnknownModel,
)
from guerdon.wire.bodies import check_url, kind_of, model_of, object_of
from guerdon.wire.forms import Asked, Form, text_of
from guerdon.wire.labels import Activation, components_of, labels_of, numbers_of
from guerdon.wire.rows import check_count, groups_of, scores_of
from guerdon.wire.samples import choice, flag, with_special_tokens

_EXAMPLE = '{"inputs": [["a prompt and its response"]], "raw_scores": true}'
_SHAPES = 'a string, ["text"], a pair ["prompt", "response"], or a list of such lists'

_TOLD = (
    (UnknownModel, 404, "Validation"),
    (InvalidRequest, 422, "Validation"),
    (Overloaded, 429, "Overloaded"),
    (Unavailable, 503, "Unhealthy"),
    (SampleFailed, 424, "Backend"),
    (ServerFault, 424, "Backend"),
)
"""Status and `error_type` of the errors that TEI has, too."""


def read_predict(body: Any, query: Mapping[str, str]) -> Asked:
    """What TEI's `/predict` is asked: one text or pair, or a list of those, a pair's texts joined.

    The answer has each sample's labels with their scores, the highest first; one sample by itself has no list around
    it. `raw_scores` false is what asks for an activation; TEI's own default is left to be asked for.
    """
    body = object_of(body, _EXAMPLE)
    check_url(query, "add_special_tokens", "raw_scores", "truncate")
    if "inputs" not in body:
        raise InvalidRequest(f"the body has no 'inputs'; send an object such as {_EXAMPLE}")
    rows, single = _rows(body["inputs"])
    texts, prompts = ["".join(row) for row in rows], [row[0] for row in rows]
    asked = with_special_tokens(ScoreRequest(texts=texts), body, query)
    if all(len(row) == 2 for row in rows):
        asked.prompts, asked.groups = prompts, groups_of(prompts)
    side = choice(body, "truncation_direction", "left", "right", "Left", "Right")
    if flag(body, query, "truncate"):
        asked.truncation = Truncation(None, "left" if side in ("left", "Left") else "right")
    activation = _activation(body, query)

    def answer(reply: ScoreReply, info: ModelInfo) -> Any:
        labelled = [_labelled(score, info, activation) for score in scores_of(reply)]
        return labelled[0] if single else labelled

    return Asked(model_of(body), asked, answer)


def told(error: GuerdonError) -> tuple[int, Any]:
    """An error as TEI tells it: by its own statuses, and a type of its six."""
    for kind, status, name in _TOLD:
        if isinstance(error, kind):
            return status, {"error": text_of(error), "error_type": name}
    return error.http, {"error": text_of(error), "error_type": "Backend" if error.http >= 500 else "Validation"}


FORMS = {"/predict": Form(read_predict, told)}
"""TEI's form by its path."""


def _rows(value: Any) -> tuple[list[list[str]], bool]:
    """The texts of each sample, one or two, and whether it is one sample by itself."""
    if isinstance(value, str):
        return [[value]], True
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else kind_of(value)
        raise InvalidRequest(f"inputs is {what}; send {_SHAPES}")
    if not isinstance(value[0], list):
        return [_row(value, "inputs")], True
    check_count(len(value), "inputs")
    return [_row(row, f"inputs[{i}]") for i, row in enumerate(value)], False


def _row(value: Any, name: str) -> list[str]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} is {kind_of(value)}; a batch is a list of lists, each of a text or a pair")
    for i, text in enumerate(value):
        if not isinstance(text, str):
            raise InvalidRequest(f"{name}[{i}] is {kind_of(text)}; send {_SHAPES}")
    if len(value) not in (1, 2):
        raise InvalidRequest(f"{name} has {len(value)} strings: one is a text, two are a pair, a batch is [[...], ...]")
    return value


def _activation(body: dict[str, Any], query: Mapping[str, str]) -> Activation | None:
    """What is asked for by `raw_scores`, or by the parameter that Hugging Face's own client has for it."""
    raw = flag(body, query, "raw_scores")
    parameters = body.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"parameters is {kind_of(parameters)}; send an object, or leave it out")
    wanted = choice(parameters, "function_to_apply", "none", "sigmoid", "softmax")
    if raw is not None or wanted is None:
        return "fitting" if raw is False else None
    return None if wanted == "none" else "sigmoid" if wanted == "sigmoid" else "softmax"


def _labelled(score: Score, info: ModelInfo, activation: Activation | None) -> list[dict[str, Any]]:
    numbers = numbers_of(score, info, activation)
    labels = labels_of(info, len(numbers))
    components = components_of(score, info)
    return [{"score": numbers[i], "label": labels[i], **components} for i in np.argsort(-numbers, kind="stable")]
