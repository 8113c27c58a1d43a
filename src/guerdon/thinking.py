"""Tells a language model's thinking from its answer, by the tags that models and their servers write."""

from __future__ import annotations

import re

_WORDS = r"(?:\w+:)?(?:think|thinking|thoughts?|reasoning)\s*"
_TAG = re.compile(
    rf"(?P<open><{_WORDS}>|\[THINK\]|◁think▷|<\|START_THINKING\|>|<\|begin_of_thought\|>"
    r"|<\|channel\|>(?:analysis|commentary)|(?:<\|channel>|<unused94>)thought)"
    rf"|(?P<close></{_WORDS}>|\[/THINK\]|◁/think▷|<\|END_THINKING\|>|<\|end_of_thought\|>|<unused95>|<channel\|>)"
    r"|(?P<last><\|channel\|>final(?:<\|message\|>)?)",
    re.IGNORECASE,
)
_QUOTES = "`\"'“”‘’«»「」"


def answer_of(text: str) -> str | None:
    """Returns the text without thinking; None if thinking is still open at its end.

    Tags nest. What stands before a closing tag without its opening one is thinking, too: the opening tag was in the
    prompt. A tag directly within quotation marks or backticks is a word and no tag.
    """
    parts: list[str] = []
    depth = begin = 0
    for tag in _TAG.finditer(text):
        if _is_quoted(text, *tag.span()):
            continue
        if tag["open"]:
            if not depth:
                parts.append(text[begin : tag.start()])
            depth += 1
            continue
        if not depth or tag["last"]:
            parts.clear()
        depth = 0 if tag["last"] else max(0, depth - 1)
        begin = tag.end()
    return None if depth else "\n".join([*parts, text[begin:]])


def _is_quoted(text: str, start: int, end: int) -> bool:
    return start > 0 and text[start - 1] in _QUOTES and text[end : end + 1] in tuple(_QUOTES)
