"""Finds chat templates that print more than the conversation: the date, random text, addresses of objects.

The same messages would score differently on another day or after a restart, under the same version of the weights.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

REMEDY = "replace it by a fixed text in chat_template.jinja, or in the chat_template of tokenizer_config.json"

CHANGES = "the same messages score differently another time"
"""The end of the proof's line if the text changes."""

_SYSTEM, _USER, _ANSWER = ({"role": role, "content": f"From the {role}."} for role in ("system", "user", "assistant"))
_CONVERSATIONS = ([_USER, _ANSWER], [_SYSTEM, _USER, _ANSWER], [_USER], [_SYSTEM, _USER])
_DAYS = ("2001", "12")
"""Results of `strftime_now` on two days."""
_TRIES = 4
_CLOCK = re.compile(r"\bstrftime_now\b")
_CHANCE = re.compile(r"\|\s*random\b|\blipsum\b")
_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")


def find_dependence(tokenizer: Any) -> str:
    """Returns the changing text, such as a date, that the chat template prints, and its count; empty if none."""
    template = tokenizer.chat_template
    source = template.get("default", "") if isinstance(template, dict) else template or ""
    if not source:
        return ""
    one_day, another = ([_render(tokenizer, source, day) for _ in range(_TRIES)] for day in _DAYS)
    if _ADDRESS.search("".join(one_day)):
        return "prints addresses in memory"
    if len({*one_day}) > 1 or _CHANCE.search(source):
        return "prints random text"
    if one_day[0] != another[0]:
        return "prints the date (strftime_now)"
    return "prints the date (strftime_now) in some conversations" if _CLOCK.search(source) else ""


def reads(template: str, key: str) -> bool:
    """Returns whether a template names that key of a message, in any of the ways in which Jinja reads one."""
    import jinja2

    try:
        lexed = jinja2.Environment(autoescape=True).lex(template)
        tokens = [(kind, text) for _, kind, text in lexed if kind != "whitespace"]
    except jinja2.TemplateSyntaxError:
        return False  # rendering refuses it
    return any(
        (kind == "string" and text[1:-1] == key) or (kind == "name" and text == key and before == ("operator", "."))
        for before, (kind, text) in pairwise([("", ""), *tokens])
    )


def describe_dependence(found: str) -> str:
    """Returns what `find_dependence` found, or that it found nothing."""
    if not found:
        return "the chat template prints no date"
    return f"the chat template {found}: {CHANGES}"


def _render(tokenizer: Any, source: str, today: str) -> str:
    """Returns a few conversations as the template renders them on that day."""
    import jinja2

    # transformers passes no functions to a template, but a macro takes the place of its own.
    template = f"{{%- macro strftime_now(format) -%}}{today}{{%- endmacro -%}}{source}"
    texts = []
    for conversation in _CONVERSATIONS:
        asks = conversation[-1] is _USER
        try:
            text = tokenizer.apply_chat_template(
                conversation, chat_template=template, tokenize=False, add_generation_prompt=asks
            )
        # It may refuse a system message, or a conversation without an answer.
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError):
            text = ""
        texts.append(text)
    return "\n".join(texts)
