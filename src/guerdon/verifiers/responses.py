"""Extracts from a response the answer after its thinking, and the code blocks of its Markdown."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import MutableMapping
from itertools import islice
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock, fence
from markdown_it.token import Token

from guerdon.thinking import behind_thinking

_PYTHON = re.compile(r"\s*\{?\s*\.?py(thon)?[\d.]*(?![\w-])", re.IGNORECASE)
"""Matches info strings such as `python`, `Python3`, `py title="a.py"` and `{.python}`, and not `python-repl`."""
_WORD = re.compile(r"[^\s`]+")
_MAX_TRIES = 8
"""How many other ends of a block are tried in each direction."""
_MAX_PARSED = 2_000_000
"""Characters of a response that are parsed as Python, about a second's worth; beyond them CommonMark alone counts."""


def answer_of(response: str) -> str:
    """Returns the text after the response's thinking; nothing if it only thinks."""
    return behind_thinking(response) or ""


def find_program(answer: str) -> str | None:
    """Returns the code of the last fenced block that is tagged as Python, else of the last without a tag, else None.

    Blocks are those of CommonMark, and HTML around them does not hide them. If a block is not valid Python, ends that
    CommonMark does not know are tried: a fence at the end of a line of code closes it, one in a docstring does not.
    """
    blocks = [token for token in _MARKDOWN.parse(answer) if token.type == "fence" and token.content.strip()]
    tagged = [block.content for block in blocks if _PYTHON.match(block.info)]
    untagged = [block.content for block in blocks if not block.info.strip()]
    return next(reversed(tagged or untagged), None)


def _fence(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Wraps the rule of markdown-it that consumes a fenced block."""
    if not fence(state, start, end, silent):
        return False
    if not silent:
        _mend(state, start, end, state.tokens[-1])
    return True


def _mend(state: StateBlock, start: int, end: int, block: Token) -> None:
    """Moves the block's end to where its code is valid Python, if it is not so already."""
    may_be_python = not block.info.strip() or _PYTHON.match(block.info)
    if not may_be_python or _is_python(block.content, state.env) or _is_spent(state.env):
        return
    closed, marker, indent = state.line, block.markup, state.sCount[start]
    inside = [i for i in range(start + 1, closed) if marker in _line(state, i)]
    behind = (i for i in range(closed, end) if _line(state, i).rstrip() == marker)
    for line in (*inside[: -_MAX_TRIES - 1 : -1], *islice(behind, _MAX_TRIES)):
        last = state.getLines(line, line + 1, indent, False).rpartition(marker)[0].rstrip(marker[0])
        code = state.getLines(start + 1, line, indent, True) + last
        if _is_python(code, state.env):
            block.content = code
            state.line = line if _opens(state, line, marker) else line + 1
            return
    # Not even then is it Python: perhaps it is not closed, and another block begins in it.
    for line in inside:
        if _opens(state, line, marker):
            block.content, state.line = state.getLines(start + 1, line, indent, True), line
            return


def _line(state: StateBlock, line: int) -> str:
    return state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]]


def _opens(state: StateBlock, line: int, marker: str) -> bool:
    """Whether the line is a fence with one word after it."""
    text = _line(state, line)
    return text.startswith(marker) and bool(_WORD.fullmatch(text.lstrip(marker[0]).strip()))


def _is_spent(env: MutableMapping[str, Any]) -> bool:
    return env.get("parsed", 0) > _MAX_PARSED


def _is_python(code: str, env: MutableMapping[str, Any]) -> bool:
    env["parsed"] = env.get("parsed", 0) + len(code) + 1000
    if _is_spent(env):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the program's own text
        try:
            ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # of the parser, which has limits of its own
            return False
    return bool(code.strip())


_MARKDOWN = MarkdownIt("commonmark").disable(["inline", "text_join", "html_block"])
_MARKDOWN.block.ruler.at("fence", _fence, {"alt": ["paragraph", "reference", "blockquote", "list"]})
