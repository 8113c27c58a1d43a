"""The settings of a judge in words, which another server's language model is: a model, or a component of a sum."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from guerdon.judge_core import COMPARED_FIELDS, FIELDS
from guerdon.settings.fields import Contradictions, caught, setting
from guerdon.settings.rubrics import QuestionsConfig, check_template, fields_of

_OF_PRINCIPLES = ("prompt", "reference", "criterion")
RESERVED = ("model", "messages", "stream", "n")
"""Fields of the request that other settings decide, or that would change the form of the answer."""


TEMPLATES = {
    "genrm": "",
    "rm_r1": """\
Two chatbots, A and B, have answered the same client. Work out what a good answer needs, judge both by that, and then \
decide. The last line of your reply is <answer>[[A]]</answer> if chatbot A's response is better, and \
<answer>[[B]]</answer> if chatbot B's is.

[Client Question]
{prompt}

[The Start of Chatbot A's Response]
{response_a}
[The End of Chatbot A's Response]

[The Start of Chatbot B's Response]
{response_b}
[The End of Chatbot B's Response]""",
    "brackets": """\
Compare two answers to a question, whatever their order and length. Explain in a few sentences what is right and what \
is wrong in each. Then end with [[A]] if answer A is better, [[B]] if answer B is, or [[C]] if neither is.

[Question]
{prompt}

[Answer A]
{response_a}

[Answer B]
{response_b}""",
}
"""The default template of each preset, with the marks that the project's own prompt has.

`genrm`: NVIDIA's GenRM models and NeMo Gym's genrm_compare, whose chat template knows the roles; the template is the
principle. `rm_r1`: RM-R1 (arXiv 2505.02387), and J1 (arXiv 2505.10320). `brackets`: MT-bench's and Arena-Hard's.
"""


@dataclass
class ParseConfig:
    """How a number is read from an answer: first the place, then the value."""

    shorthand: ClassVar[str] = "preset"

    preset: Literal["", "genrm", "rm_r1", "brackets"] = setting(
        "", "The form of a project's verdicts on two responses, in place of the others; `parse: genrm` is short for it."
    )
    regex: str | None = setting(None, "Regular expression whose one group is the whole verdict; the last match counts.")
    json: str | None = setting(
        None,
        "Key of the verdict in the last top-level JSON object with it. Without regex and json the verdict is the whole "
        "text.",
    )
    values: dict[str, float] | None = setting(
        None, "Value of each verdict, such as {correct: 1, wrong: 0}; default: verdicts are numbers."
    )
    lowest: float | None = setting(None, "Lower bound; an answer below it is unreadable.")
    highest: float | None = setting(None, "Upper bound; an answer above it is unreadable.")

    def contradictions(self) -> Contradictions:
        others = ("regex", "json", "values", "lowest", "highest")
        if self.preset and (given := [name for name in others if getattr(self, name) is not None]):
            yield f"preset and {given[0]} are both given", "leave out one of them"
        if self.regex is not None and self.json is not None:
            yield "regex and json are both given", "leave out one of them"
        if self.regex is not None:
            try:
                num_groups = re.compile(self.regex).groups
            except re.error as e:
                yield f"regex is {self.regex!r}, which is no regular expression: {e}", "correct it"
            else:
                if num_groups != 1:
                    advice = "put parentheses around the verdict alone; (?:...) groups more"
                    yield f"regex has {num_groups} groups", advice
        if self.values is not None:
            if len({verdict.strip().casefold() for verdict in self.values}) != len(self.values):
                yield "values has a verdict twice", "leave out one; upper and lower case are the same"
            if not self.values:
                yield "values is empty", "give each verdict its value, or leave it out for numbers"
            if len(self.values) > 1 and len({*self.values.values()}) == 1:
                yield "all values are the same, and so are all rewards", "give better verdicts higher values"
            if self.lowest is not None or self.highest is not None:
                yield "values is given, and bounds too", "leave out lowest and highest: values decide"
        elif self.lowest is not None and self.highest is not None and self.lowest > self.highest:
            yield "lowest is above highest", "exchange them"


@dataclass
class BudgetConfig:
    """A judge's budget over the life of its cache folder, restarts included."""

    calls: int | None = setting(None, "Maximum number of answered calls.", least=1)
    tokens: int | None = setting(
        None, "Maximum number of prompt and answer tokens; calls in progress may exceed it.", least=1
    )
    cost: float | None = setting(
        None, "Maximum cost, in the currency of the prices; calls in progress may exceed it.", above=0
    )


@dataclass
class ChatJudgeConfig(QuestionsConfig):
    """One judge in words: a language model of another server, asked over OpenAI's chat completions."""

    truncation: ClassVar[Literal["error"]] = "error"  # what is too long, the judge's own server refuses

    kind: Literal["chat_judge"] = setting("chat_judge", "Kind of model.")
    model: str = setting("", "The model's name at the judge's server.")
    name: str = setting("chat_judge", "Name that clients ask for.")
    url: str = setting("", "Base URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1.")
    api_key_env: str | None = setting(None, "Environment variable with the API key.")
    api_key_file: str | None = setting(None, "File with the API key.")
    parse: ParseConfig = setting(ParseConfig, "How to parse a number from the answer.")
    parse_retries: int = setting(2, "Retries of a question after an unreadable, cut or refused answer.", least=0)
    samples: int = setting(1, "Answers per question; the reward is their mean.", least=1, most=1000)
    temperature: float | None = setting(None, "Temperature of the answers; default: the judge's own.", least=0)
    max_tokens: int | None = setting(1024, "Maximum length of an answer. null: the judge's own.", least=1)
    extra: dict[str, Any] | None = setting(None, "More fields of the request, such as {reasoning_effort: low}.")
    cache: str = setting("", "Cache folder of answers; chat judges of one server may share it.")
    concurrency: int = setting(16, "Maximum number of calls in progress.", least=1)
    timeout_s: float = setting(60.0, "Timeout of one call, in seconds.", above=0)
    call_retries: int = setting(
        8, "Retries of a call after a lost connection, a timeout, or status 408, 409, 429, 5xx.", least=0
    )
    budget: BudgetConfig = setting(BudgetConfig, "Limits of the judge's use.")
    prompt_price: float | None = setting(None, "Price of a million prompt tokens.", least=0)
    completion_price: float | None = setting(None, "Price of a million answer tokens.", least=0)
    max_queue_tokens: int = setting(
        4_000_000, "Maximum number of queued tokens (estimate); above it: status 503.", least=1
    )
    max_queue_sequences: int = setting(16_384, "Maximum number of queued samples; above it: status 503.", least=1)

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Returns the cost of so many tokens; 0 without prices."""
        prices = (self.prompt_price or 0.0, self.completion_price or 0.0)
        return (prompt_tokens * prices[0] + completion_tokens * prices[1]) / 1e6

    def contradictions(self) -> Contradictions:
        try:
            parts = urlsplit(self.url)
        except ValueError:  # of brackets that are no IPv6 address
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            yield f"url is {self.url!r}", "give the base URL of a server, such as http://127.0.0.1:8000/v1"
        elif parts.username is not None or parts.password is not None:
            yield "url has a user's name or password in it", "give a key by api_key_env or api_key_file"
        if self.compare is not None:
            values, bounds = self.parse.values, (self.parse.lowest, self.parse.highest)
            is_bounded = None not in bounds and 0 <= (bounds[0] or 0) <= (bounds[1] or 0) <= 1
            if not (self.parse.preset or is_bounded or (values and all(0 <= value <= 1 for value in values.values()))):
                advice = "choose a preset, or give values such as {A: 1, B: 0, tie: 0.5}, or lowest: 0 and highest: 1"
                yield "the judge compares, and parse has verdicts beyond 0 to 1", advice
        elif self.parse.preset:
            yield f"parse is {self.parse.preset}, which reads verdicts on two responses", "add `compare: {}`"
        if not self.question:
            if self.parse.preset != "genrm":
                yield "template is not given", "write the question, with {response} in it"
        else:
            known: tuple[str, ...] = FIELDS if self.compare is None else COMPARED_FIELDS
            if self.parse.preset == "genrm":
                known = _OF_PRINCIPLES
            mistaken = [*caught(check_template, self.question, "template", known)]
            yield from mistaken or self.contradictions_of_criteria(fields_of(self.question))
        if not self.cache:
            yield "cache is not given", "name a folder; it keeps each answer, so that none is paid for twice"
        if self.api_key_env is not None and self.api_key_file is not None:
            yield "api_key_env and api_key_file are both given", "leave out one of them"
        for name in RESERVED:
            if name in (self.extra or {}):
                yield f"extra has {name}", "leave it out there: guerdon sets it"
        if self.budget.cost is not None and None in (self.prompt_price, self.completion_price):
            problem = f"budget.cost is {self.budget.cost:g}, and a price is missing"
            yield problem, "give prompt_price and completion_price, for a million tokens"

    @property
    def question(self) -> str:
        """The template, or the preset's."""
        return self.template or TEMPLATES.get(self.parse.preset, "")


def take_out(components: Iterable[Any]) -> list[ChatJudgeConfig]:
    """Returns the judges that components have in place of a name; these components name them from now on."""
    found: list[ChatJudgeConfig] = []
    for component in components:
        if component is not None and component.judge is not None and not component.model:
            found.append(component.judge)
            component.model, component.judge = component.judge.name, None
    return found
