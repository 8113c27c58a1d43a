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
_UNOPENED = re.compile(r"</(?:\w+:)?think\s*>|[^<]|<[|u]|<channel", re.IGNORECASE)
"""Matches the ends of thinking that count without a beginning: words that no answer has as tags of its own."""
_QUOTES = "`\"'“”‘’«»「」"


def answer_of(text: str) -> str | None:
    """Returns the text without thinking; None if thinking is still open at its end.

    Tags nest. Text before a closing tag without an opening one is thinking, too: the opening tag was in the prompt. A
    tag directly within quotation marks or backticks is a word and no tag.
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


def behind_thinking(text: str) -> str | None:
    """Returns the text after the thinking that it begins with; None if that has no end.

    Tags further on are the answer's own. The opening tag may have been in the prompt.
    """
    head, final, answer = text.rpartition("assistantfinal")
    if final and head.lstrip().startswith("analysis"):  # gpt-oss without its special tokens
        return answer
    depth, opens, end = 0, False, None
    for tag in _TAG.finditer(text):
        if _is_quoted(text, *tag.span()):
            continue
        if tag["last"]:
            return text[tag.end() :]
        if tag["open"]:
            opens = opens or not (depth or text[: tag.start()].removeprefix("<|start|>assistant").strip())
            depth += 1
        elif opens or _UNOPENED.match(tag[0]):
            depth, end = depth - 1, tag.end()
            if depth <= 0:
                break
    return (None if opens else text) if end is None else text[end:]


def _is_quoted(text: str, start: int, end: int) -> bool:
    behind = text[end : end + 3]
    return start > 0 and text[start - 1] in _QUOTES and behind[:1] in tuple(_QUOTES) and behind != "```"
