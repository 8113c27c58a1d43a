"""A judge's rubric: the settings of its YAML file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

import yaml

from guerdon.errors import ConfigError
from guerdon.judge_core import (
    COMPARED_FIELDS,
    FIELDS,
    RESERVED,
    Comparing,
    Criterion,
    GroupScores,
    Own,
    Reduce,
    Rubric,
    Schedule,
    Spellings,
)
from guerdon.settings.fields import Contradictions, caught, check_settings, from_mapping, setting
from guerdon.settings.yaml_files import read_yaml

_SET = ("messages", "add_generation_prompt")
"""Variables of a chat template that guerdon sets."""


@dataclass
class CriterionConfig:
    """One criterion of a rubric."""

    name: str = setting("", "Name of the criterion's attribute.")
    text: str = setting("", "Replaces {criterion} in the template.")
    weight: float = setting(1.0, "Weight in the reward.")

    def contradictions(self) -> Contradictions:
        if not re.fullmatch(r"[\w.-]+", self.name, re.ASCII) or self.name in RESERVED:
            advice = "use ASCII letters, digits, underscores, points and hyphens, and neither of "
            yield f"name is {self.name!r}", advice + ", ".join(RESERVED)


@dataclass
class ComparingConfig:
    """How a judge compares the responses to a prompt."""

    schedule: Schedule = setting("round_robin", "Which responses are compared.")
    scores: GroupScores = setting("bradley_terry", "How verdicts become rewards.")


@dataclass
class QuestionsConfig:
    """What any judge asks about a sample, by one token or in words."""

    template: str = setting("", "The question, with {response} and more in braces.")
    system: str = setting("", "The system message.")
    criteria: list[CriterionConfig] = setting([], "The criteria.")
    sample_criteria: Own = setting("ignore", "Criteria in a sample's label: add them to these, or replace these.")
    reduce: Reduce = setting("sum", "The reward: weighted sum or mean of the criteria's values.")
    compare: ComparingConfig | None = setting(None, "Compare two responses in each question.")

    def asked(self) -> tuple[Criterion, ...]:
        """Returns the criteria."""
        return tuple(Criterion(one.name, one.text, one.weight) for one in self.criteria)

    def comparing(self) -> Comparing | None:
        """Returns how it compares, if it does."""
        return Comparing(self.compare.schedule, self.compare.scores) if self.compare else None

    def contradictions(self) -> Contradictions:
        if self.criteria and not any(one.weight for one in self.criteria):
            yield "the weights of all criteria are 0", "give one criterion another weight"
        names = [one.name for one in self.criteria]
        for name in {name: None for i, name in enumerate(names) if name in names[:i]}:
            yield f"two criteria are named {name}", "give each another name"
        if self.compare is not None and self.sample_criteria != "ignore":
            yield "sample_criteria is set, and the judge compares", "leave one of them out"

    def contradictions_of_criteria(self, fields: set[str | None]) -> Contradictions:
        """Yields what does not go with the template's `fields`."""
        if "criterion" not in fields and (len(self.criteria) > 1 or self.sample_criteria != "ignore"):
            there = f"{len(self.criteria)} criteria" if self.sample_criteria == "ignore" else "sample_criteria"
            problem = f"template has no {{criterion}}, and there are {there}"
            yield problem, "put it after the response, so that criteria share their prefix"
        elif "criterion" not in fields and self.criteria and self.criteria[0].text:
            problem = f"the criterion {self.criteria[0].name} has a text, and template has no {{criterion}}"
            yield problem, "put it after the response, or leave out the text"
        if "criterion" in fields and not self.criteria and self.sample_criteria == "ignore":
            yield "template has {criterion}, and there are no criteria", "add `criteria:`, or set sample_criteria"
        for one in self.criteria:
            if "criterion" in fields and not one.text:
                yield f"the criterion {one.name} has no text", "add `text:`, for {criterion}"


@dataclass
class RubricConfig(QuestionsConfig):
    """A rubric as in its file."""

    labels: dict[str, float] = setting({}, "The answers and their values.")
    spellings: Spellings = setting("exact", "any: a label is also what differs from it by case and blanks.")
    chat_template_kwargs: dict[str, Any] = setting({}, "Variables of the chat template.")

    def contradictions(self) -> Contradictions:
        if len(self.labels) < 2:
            advice = "give at least two answers with their values, such as `labels: {yes: 1, no: 0}`"
            yield f"labels has {len(self.labels) or 'no'} labels", advice
        elif self.compare is None and len({*self.labels.values()}) == 1:
            yield "all labels have one value, and so have all rewards", "give better answers higher values"
        if not self.criteria and self.sample_criteria == "ignore" and "{criterion}" not in self.template:
            yield "criteria is empty", "add `criteria:` with `- {name: ..., text: ...}` lines"
        for name in self.chat_template_kwargs:
            if not name.isidentifier() or name in _SET:
                advice = "leave it out: it is no variable, or guerdon sets it"
                yield f"chat_template_kwargs has {name!r}", advice
        known = FIELDS if self.compare is None else COMPARED_FIELDS
        if not self.template:
            yield "template is not given", "write the question, with {response} in it"
        elif mistaken := [*caught(check_template, self.template, "template", known)]:
            yield from mistaken
        else:
            fields = fields_of(self.template)
            yield from self.contradictions_of_criteria(fields)
            yield from self._contradictions_of_fields(fields)

    def _contradictions_of_fields(self, fields: set[str | None]) -> Contradictions:
        if self.compare is None or not self.labels:
            return
        for label, value in self.labels.items():
            if not 0 <= value <= 1:
                advice = "give from 1, if {response_a} is better, to 0, if {response_b} is, and 0.5 for a tie"
                yield f"labels.{label} is {value:g}, and the rubric compares", advice
        lowest, highest = min(self.labels.values()), max(self.labels.values())
        if not lowest < 0.5 < highest:
            problem = f"no label prefers {'{response_a}' if highest <= 0.5 else '{response_b}'}"
            yield problem, "give one label more than 0.5 and one less, such as `labels: {A: 1, B: 0}`"
        if self.compare.schedule == "reference" and "reference" in fields:
            problem = "template has {reference}, which is one of the responses already"
            yield problem, "leave it out, or choose another schedule"


def read_rubric(path: str) -> Rubric:
    """Returns the rubric of a YAML file; raises ConfigError for all that is wrong with it."""
    data = read_yaml(path, "the rubric ", as_texts=True)
    if isinstance(data, dict) and "chat_template_kwargs" in data:
        data["chat_template_kwargs"] = _read_variables(path)
    config: RubricConfig = from_mapping(RubricConfig, data)
    check_settings(config, f"{path}: ")
    return Rubric(
        config.template,
        tuple(config.labels),
        tuple(config.labels.values()),
        config.asked(),
        config.system,
        path,
        config.comparing(),
        config.spellings,
        config.chat_template_kwargs,
        config.sample_criteria,
        config.reduce,
    )


def fields_of(template: str) -> set[str | None]:
    """Returns the template's fields."""
    return {name for _, name, _, _ in Formatter().parse(template)}


def _read_variables(path: str) -> Any:
    """Returns `chat_template_kwargs`, with the types that YAML gives its values."""
    root = yaml.compose(Path(path).read_text(encoding="utf-8"), yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode), "it was read as a mapping"
    (node,) = (value for key, value in root.value if key.value == "chat_template_kwargs")
    try:
        return yaml.constructor.SafeConstructor().construct_document(node)
    except (yaml.YAMLError, ValueError) as e:
        raise ConfigError(f"{path}: chat_template_kwargs: {e}", "correct it") from e


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
