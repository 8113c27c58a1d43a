"""Text Embeddings Inference's form for classifiers: `/predict`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest, Truncation
from guerdon.errors import (
    EmptyBatch,
    GuerdonError,
    InvalidRequest,
    Overloaded,
    SampleFailed,
    ServerFault,
    Unavailable,
    UnknownModel,
)
from guerdon.wire.bodies import MAX_ROWS, cut, kind_of
from guerdon.wire.forms.form import Body, FormRequest, Switch, TokensUrl, serves
from guerdon.wire.forms.labels import Activation, components_of, labels_of, numbers_of
from guerdon.wire.score_tensors import prompt_groups, scores_of

_SHAPES = 'a string, ["text"], a pair ["prompt", "response"], or a list of such lists'

_ERRORS = (
    (EmptyBatch, 400, "Empty"),
    (UnknownModel, 404, "Validation"),
    (InvalidRequest, 422, "Validation"),
    (Overloaded, 429, "Overloaded"),
    (Unavailable, 503, "Unhealthy"),
    (SampleFailed, 424, "Backend"),
    (ServerFault, 424, "Backend"),
)
"""Status and `error_type` of the errors that TEI has, too."""

Direction = Annotated[str, Meta(pattern="^([Ll]eft|[Rr]ight)$", description="left or right")]
"""No enumeration: client generators cannot distinguish names that differ only in case."""

_Text = Annotated[str, Meta(description=_SHAPES)]
_Entry = Annotated[str | list[_Text], Meta(description=_SHAPES)]


class PredictUrl(TokensUrl, kw_only=True, forbid_unknown_fields=True):
    raw_scores: Switch = None
    truncate: Switch = None


class PredictParameters(msgspec.Struct):
    """Hugging Face's client's key in place of `raw_scores`."""

    function_to_apply: Literal["none", "sigmoid", "softmax"] | None = None


class PredictBody(Body, kw_only=True):
    """One text or pair, or a list of them; TEI's activation applies only on request."""

    example: ClassVar[str] = '{"inputs": [["a prompt and its response"]], "raw_scores": true}'
    inputs: Annotated[str | Annotated[list[_Entry], Meta(max_length=MAX_ROWS)], Meta(description=_SHAPES)]
    raw_scores: bool | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    add_special_tokens: bool | None = None
    parameters: PredictParameters | None = None


class Label(msgspec.Struct):
    score: np.float32
    label: str
    components: dict[str, np.float32] | UnsetType = UNSET


class TEIError(msgspec.Struct):
    error: str
    error_type: str


def truncation_of(truncate: bool | None, direction: str | None) -> Truncation | None:
    """Returns the options of TEI's two keys."""
    return Truncation(None, "left" if (direction or "").lower() == "left" else "right") if truncate else None


def to_error(error: GuerdonError) -> tuple[int, TEIError]:
    """Returns the status and the body by which TEI reports the error, of one of its six types."""
    for kind, status, name in _ERRORS:
        if isinstance(error, kind):
            return status, TEIError(cut(str(error)), name)
    return error.http, TEIError(cut(str(error)), "Backend" if error.http >= 500 else "Validation")


@serves("/predict", "the classifiers of Text Embeddings Inference", list[Label], list[list[Label]], to_error=to_error)
def _predict(body: PredictBody, url: PredictUrl) -> FormRequest:
    """The two texts of a pair are tokenised apart. The reply has each sample's labels with their scores, best first.

    A single sample has no list around its labels if the client sent it without a batch.
    """
    rows, single = _rows(body.inputs)
    request = ScoreRequest(texts=["".join(row) for row in rows], add_special_tokens=body.add_special_tokens)
    if any(len(row) == 2 for row in rows):
        request.splits = [len(row[0]) if len(row) == 2 else None for row in rows]
    if all(len(row) == 2 for row in rows):
        request.prompts = [row[0] for row in rows]
        request.groups = prompt_groups(request.prompts)
    request.truncation = truncation_of(body.truncate, body.truncation_direction)
    activation = _activation(body)

    def to_reply(reply: ScoreReply, info: ModelInfo) -> list[Label] | list[list[Label]]:
        labelled = [_labelled(score, info, activation) for score in scores_of(reply)]
        return labelled[0] if single else labelled

    return FormRequest(request, to_reply)


def _rows(inputs: str | list[str | list[str]]) -> tuple[list[list[str]], bool]:
    """The texts of each sample, one or two, and whether it is one sample that was sent without a list around it."""
    if isinstance(inputs, str):
        return [[inputs]], True
    if not inputs:
        raise EmptyBatch("inputs is an empty list; send at least one text")
    single = isinstance(inputs[0], str)
    rows: list[list[str]] = [inputs] if single else inputs  # type: ignore[assignment, list-item]
    for i, row in enumerate(rows):
        name = "inputs" if single else f"inputs[{i}]"
        if not isinstance(row, list):
            raise InvalidRequest(f"{name} is {kind_of(row)}; a batch is a list of lists, each of a text or a pair")
        for j, text in enumerate(row):
            if not isinstance(text, str):
                raise InvalidRequest(f"{name}[{j}] is {kind_of(text)}; send {_SHAPES}")
        if len(row) not in (1, 2):
            raise InvalidRequest(
                f"{name} has {len(row)} strings: one is a text, two are a pair, a batch is [[...], ...]"
            )
    return rows, single


def _activation(body: PredictBody) -> Activation | None:
    """The value of `raw_scores`, else of the parameter of Hugging Face's own client."""
    wanted = body.parameters.function_to_apply if body.parameters else None
    if body.raw_scores is not None or wanted is None:
        return "fitting" if body.raw_scores is False else None
    return None if wanted == "none" else wanted


def _labelled(score: Score, info: ModelInfo, activation: Activation | None) -> list[Label]:
    numbers = numbers_of(score, info, activation)
    labels = labels_of(info, len(numbers))
    more = components_of(score, info)
    return [Label(numbers[i], labels[i], **more) for i in np.argsort(-numbers, kind="stable")]
