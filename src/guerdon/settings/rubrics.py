"""Reads a judge's rubric from its YAML file."""

from __future__ import annotations

import re
from pathlib import Path
from string import Formatter
from typing import Any, get_args

import yaml

from guerdon.errors import ConfigError
from guerdon.judge_core import (
    COMPARED_FIELDS,
    DISAGREED,
    FIELDS,
    OTHER_MASS,
    Comparing,
    Criterion,
    GroupScores,
    Rubric,
    Schedule,
    Spellings,
)
from guerdon.settings.fields import nearest

_KEYS = ("template", "system", "labels", "criteria", "compare", "spellings", "chat_template_kwargs")
_CRITERION = ("name", "text", "weight")
_COMPARE = {"schedule": get_args(Schedule), "scores": get_args(GroupScores)}
_SET = ("messages", "add_generation_prompt")
"""Variables of a chat template that guerdon sets."""
_TAKEN = (OTHER_MASS, DISAGREED, "score")
"""Reserved names in replies or trainers' logs."""


class _Loader(yaml.BaseLoader):
    """Reads all scalars as texts, because YAML would read the label `yes` as true; refuses duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.constructor.ConstructorError("in a mapping", node.start_mark, f"{twice} is given twice")
        return super().construct_mapping(node, deep)


def read_rubric(path: str) -> Rubric:
    """Returns the rubric of a YAML file; raises ConfigError for the first thing that is wrong with it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = yaml.load(text, _Loader)  # nosec B506: BaseLoader makes only texts
    except OSError as e:
        raise ConfigError(f"cannot read the rubric {path}: {e.strerror}", "check its path") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not valid YAML: {e}", "correct it at that line") from e
    data = _mapping(data, path, _KEYS)
    template, system = _text(data, "template", path), _text(data, "system", path, default="")
    labels, criteria = _labels(data.get("labels"), path), _criteria(data.get("criteria"), path)
    compare = _compare(data["compare"], path) if "compare" in data else None
    spellings, variables = data.get("spellings", "exact"), {}
    if spellings not in get_args(Spellings):
        raise ConfigError(f"{path}: spellings is {spellings!r}", f"give one of {', '.join(get_args(Spellings))}")
    if "chat_template_kwargs" in data:
        variables = _variables(text, path)
    rubric = Rubric(
        template, tuple(labels), tuple(labels.values()), criteria, system, path, compare, spellings, variables
    )
    check_template(template, f"{path}: template", FIELDS if compare is None else COMPARED_FIELDS)
    _check_criteria(rubric)
    if compare is not None:
        _check_compared(rubric)
    return rubric


def _labels(data: Any, path: str) -> dict[str, float]:
    if not isinstance(data, dict) or len(data) < 2:
        raise ConfigError(
            f"{path}: labels has {len(data) if isinstance(data, dict) else 'no'} labels",
            "give at least two answers with their values, such as `labels: {yes: 1, no: 0}`",
        )
    return {label: _number(value, f"{path}: labels.{label}") for label, value in data.items()}


def _criteria(data: Any, path: str) -> tuple[Criterion, ...]:
    if not isinstance(data, list) or not data:
        raise ConfigError(f"{path} has no criteria", "add `criteria:` with `- {name: ..., text: ...}` lines")
    made: list[Criterion] = []
    for i, item in enumerate(data):
        where = f"{path}: criteria[{i}]"
        item = _mapping(item, where, _CRITERION)
        name, weight = _text(item, "name", where), _number(item.get("weight", "1"), f"{where}.weight")
        if not re.fullmatch(r"[\w.-]+", name, re.ASCII) or name in _TAKEN:
            raise ConfigError(
                f"{where}.name is {name!r}",
                f"use ASCII letters, digits, underscores, points and hyphens, and neither of {', '.join(_TAKEN)}",
            )
        if name in (one.name for one in made):
            raise ConfigError(f"{path}: two criteria are named {name}", "give each another name")
        made.append(Criterion(name, _text(item, "text", where, default=""), weight))
    if not any(one.weight for one in made):
        raise ConfigError(f"{path}: the weights of all criteria are 0", "give one criterion another weight")
    return tuple(made)


def _compare(data: Any, path: str) -> Comparing:
    where = f"{path}: compare"
    data = _mapping(data, where, tuple(_COMPARE))
    for name, value in data.items():
        if value not in _COMPARE[name]:
            raise ConfigError(f"{where}.{name} is {value!r}", f"give one of {', '.join(_COMPARE[name])}")
    return Comparing(**data)


def _variables(text: str, path: str) -> dict[str, Any]:
    """Returns `chat_template_kwargs`, with the types that YAML gives its values."""
    where = f"{path}: chat_template_kwargs"
    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode), "it was read as a mapping"
    (node,) = (value for key, value in root.value if key.value == "chat_template_kwargs")
    try:
        found = yaml.constructor.SafeConstructor().construct_document(node)
    except (yaml.YAMLError, ValueError) as e:
        raise ConfigError(f"{where}: {e}", "correct it") from e
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is no mapping", "write variables of the chat template, as {enable_thinking: false}")
    for name in found:
        if not isinstance(name, str) or not name.isidentifier() or name in _SET:
            raise ConfigError(f"{where} has {name!r}", "leave it out: it is no variable, or guerdon sets it")
    return found


def _check_compared(rubric: Rubric) -> None:
    """Raises ConfigError if labels or fields do not suit comparisons."""
    assert rubric.compare is not None
    for label, value in zip(rubric.labels, rubric.values, strict=True):
        if not 0 <= value <= 1:
            raise ConfigError(
                f"{rubric.path}: labels.{label} is {value:g}, and the rubric compares",
                "give from 1, if {response_a} is better, to 0, if {response_b} is, and 0.5 for a tie",
            )
    if not min(rubric.values) < 0.5 < max(rubric.values):
        raise ConfigError(
            f"{rubric.path}: no label prefers {'{response_a}' if max(rubric.values) <= 0.5 else '{response_b}'}",
            "give one label more than 0.5 and one less, such as `labels: {A: 1, B: 0}`",
        )
    if rubric.compare.schedule == "reference" and "reference" in rubric.fields:
        raise ConfigError(
            f"{rubric.path}: template has {{reference}}, which is one of the responses already",
            "leave it out, or choose another schedule",
        )


def check_template(template: str, where: str, known: tuple[str, ...]) -> None:
    """Raises ConfigError if a field of the template is not `known`, or if a response is missing."""
    try:
        parts = [*Formatter().parse(template)]
    except ValueError as e:
        raise ConfigError(f"{where} has a stray brace: {e}", "write {{ and }} for braces that are no field's") from e
    for _, name, form, conversion in parts:
        if name is not None and (name not in known or form or conversion):
            lacks_compare = known == FIELDS and name in COMPARED_FIELDS and not (form or conversion)
            listed = ", ".join(f"{{{field}}}" for field in known)
            raise ConfigError(
                f"{where} has the unknown field {{{name}{'!' + conversion if conversion else ''}"
                f"{':' + form if form else ''}}}",
                "add `compare: {}`, by which the judge compares two responses"
                if lacks_compare
                else f"known are {listed}; write {{{{ and }}}} for braces that are no field's",
            )
    found = {name for _, name, _, _ in parts}
    for name in known:
        if name.startswith("response") and name not in found:
            raise ConfigError(f"{where} has no {{{name}}}", "put it where the judge should read the response")


def _check_criteria(rubric: Rubric) -> None:
    """Raises ConfigError if the template and the criteria do not go together."""
    where = f"{rubric.path}: template"
    if "criterion" not in rubric.fields and len(rubric.criteria) > 1:
        raise ConfigError(
            f"{where} has no {{criterion}}, and there are {len(rubric.criteria)} criteria",
            "put it after the response, so that criteria share their prefix",
        )
    without = next((one.name for one in rubric.criteria if "criterion" in rubric.fields and not one.text), None)
    if without is not None:
        raise ConfigError(f"{rubric.path}: the criterion {without} has no text", "add `text:`, for {criterion}")


def _mapping(data: Any, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(f"{where} is no mapping", f"write `key: value` lines; known here: {', '.join(known)}")
    for key in data:
        if key not in known:
            near = nearest(key, known)
            raise ConfigError(
                f"{where}: unknown setting {key}",
                f"{f'did you mean {near}? ' if near else ''}known here: {', '.join(known)}",
            )
    return data


def _text(data: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = data.get(key, default)
    if not isinstance(value, str) or (default is None and not value):
        raise ConfigError(f"{where}: {key} is {'missing' if not value else 'no text'}", f"give `{key}:` a text")
    return value


def _number(value: Any, where: str) -> float:
    if not isinstance(value, str) or not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,2})?", value):
        raise ConfigError(f"{where} is {value!r}", "give a finite number")
    return float(value)
