"""Criteria that come with a sample, in its label: guerdon's own form, and those of other projects.

Read as open-instruct's `RubricVerifier`, verifiers' `RubricJudge`, tinker-cookbook's rubric recipe and HealthBench have
them. What belongs to their judges' prompts, such as a format of the answer, is ignored: the template here asks for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from guerdon.errors import InvalidRequest
from guerdon.judge_core import Criterion

LISTS = ("criteria", "rubrics", "rubric", "rubric_items")
"""Keys of a label that hold the list, in order of preference."""
TEXTS = ("criterion", "text", "description", "rubric_item", "rubric_str", "criteria", "Ingredient")
"""Keys of a criterion that hold its text."""
NAMES, WEIGHTS = ("name", "title"), ("weight", "points")
REFERENCES = ("reference", "answer", "ground_truth")
"""Keys of a label with criteria that hold the reference."""

_FORM = 'send a list such as [{"criterion": "Is it brief?", "weight": 1}], or an object with it under `criteria`'
_MOST_NAME = 64
_MOST = float(np.finfo(np.float32).max)
_BEGUN = re.compile(r"""\s*"?(\[\s*)?\{\s*\\?["']\w""")
"""How JSON begins that has a criterion or a list of them; Python's own notation as well, and what was cut off."""


def read_criteria(label: Any, choices: tuple[str, ...]) -> tuple[tuple[Criterion, ...], Any]:
    """Returns the criteria in a label, none if it has no list of them, and the reference beside them.

    `choices` are the rubric's labels from worst to best, the only ones that a criterion may ask for. Raises
    InvalidRequest for a criterion without a text, a weight that no float32 has, weights that are all 0, or broken JSON.
    """
    whole, label = label, _decoded(label)
    if isinstance(label, list):  # each entry may be JSON in open-instruct's datasets, and one the whole label
        label = [*map(_decoded, label)]
        inner = label[0] if len(label) == 1 else None
        if isinstance(inner, list) or (isinstance(inner, dict) and isinstance(_decoded(_first(inner, LISTS)), list)):
            label = inner
    for text in label if isinstance(label, list) else [label]:
        if isinstance(text, str) and _BEGUN.match(text):
            raise InvalidRequest(f"this sample's label, {_kind(text)}, begins as JSON, and is none; {_FORM}")
    if isinstance(label, dict):
        is_criterion = "criterion" in label or None not in (_first(label, TEXTS), _first(label, WEIGHTS))
        found = _first(label, LISTS) or ([label] if is_criterion else None)
        if found is None:
            return (), whole
        items, reference = _decoded(found), _first(label, REFERENCES)
    elif isinstance(label, list) and any(isinstance(item, dict) for item in label):
        items, reference = label, None
    else:
        return (), whole
    if not isinstance(items, list):
        raise InvalidRequest(f"the criteria of this sample's label are {_kind(items)}; {_FORM}")
    criteria = tuple(_criterion(item, i, choices) for i, item in enumerate(items))
    if criteria and not any(one.weight for one in criteria):
        raise InvalidRequest("the weights of all criteria in this sample's label are 0; give one another weight")
    return criteria, reference


def _criterion(item: Any, i: int, choices: tuple[str, ...]) -> Criterion:
    item = _decoded(item)
    given = {"text": item} if isinstance(item, str) and not _BEGUN.match(item) else item
    text = _first(given, TEXTS) if isinstance(given, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise InvalidRequest(f"criterion {i} of this sample's label has no text; {_FORM}")
    weight = _first(given, WEIGHTS)
    weight = 1.0 if weight is None else weight
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not -_MOST <= weight <= _MOST:
        raise InvalidRequest(f"the weight of criterion {i} of this sample's label is {_kind(weight)}; send a float32")
    asked = given.get("choices")
    listed = asked if isinstance(asked, list) else [asked]
    if asked is not None and [str(one).strip().casefold() for one in listed] != [*dict.fromkeys(choices)]:
        raise InvalidRequest(
            f"criterion {i} of this sample's label has the choices {asked!r:.80}, and the rubric's labels are, from "
            f"worst to best, {', '.join(choices) or 'none'}; leave them out, or serve a judge with these labels"
        )
    name = re.sub(r"[^\w.-]+", "_", str(_first(given, NAMES) or ""), flags=re.ASCII).strip("_")
    return Criterion(name[:_MOST_NAME], text, float(weight))


def _first(given: dict[str, Any], keys: Iterable[str]) -> Any:
    return next((given[key] for key in keys if given.get(key) is not None), None)


def _decoded(label: Any) -> Any:
    """Returns the list or object whose JSON a text is, also JSON of JSON; other values as they are."""
    found = label
    while isinstance(found, str) and found.lstrip()[:1] in ("[", "{", '"'):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            break
    return found if isinstance(found, list | dict) else label


def _kind(value: Any) -> str:
    return f"the {type(value).__name__} {value!r:.40}"
