"""Reads a number from a judge's answer, or says why there is none. Pure."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from guerdon.server.chat_judge.json_objects import NoObject, ObjectFinder
from guerdon.server.chat_judge.whole_verdicts import goes_on, is_taken_back
from guerdon.settings.chat_judges import ParseConfig
from guerdon.thinking import answer_of
from guerdon.wire.chat_completions import ChatAnswer

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?", re.ASCII)
_SHOWN = 120
_AROUND = 20
"""Characters before and after a verdict that are shown with it."""


class Unreadable(Exception):
    """An answer without a verdict; the text says why, and shows the answer's end."""


class AnswerParser:
    """Finds the verdict in an answer, and returns its value."""

    def __init__(self, config: ParseConfig) -> None:
        self._config = config
        self._regex = None if config.regex is None else re.compile(config.regex)
        self._finder = None if config.json is None else ObjectFinder(config.json)
        values = config.values
        self._values = None if values is None else {text.strip().casefold(): value for text, value in values.items()}

    def read(self, answer: ChatAnswer) -> float:
        """Returns the value of an answer; raises Unreadable if it has none, was cut, or refuses."""
        if answer.outcome == "refused":
            why = f": {_end(answer.refusal)}" if answer.refusal else f" (finish_reason {answer.finish})"
            raise Unreadable(f"the judge refused{why}")
        try:
            if answer.outcome == "cut":
                raise Unreadable("the answer was cut at its longest length; raise max_tokens")
            if answer.outcome == "unusable":
                raise Unreadable(answer.fault or f"the answer did not end by itself (finish_reason {answer.finish})")
            return self._value(self._verdict(answer.text))
        except Unreadable as e:
            raise Unreadable(f"{e}; the answer ends with {_end(answer.text)}") from None

    def _verdict(self, text: str) -> Any:
        """Returns the verdict's text in the answer without its thinking."""
        answer = text if self._finder is not None and self._finder.is_whole(text) else answer_of(text)
        if answer is None:
            raise Unreadable("its thinking is not closed")
        if self._finder is not None:
            try:
                return self._finder.value(answer)
            except NoObject as e:
                raise Unreadable(str(e)) from None
        return answer if self._regex is None else self._match(self._regex, answer)

    def _match(self, regex: re.Pattern[str], text: str) -> str:
        found = None
        for found in regex.finditer(text):  # noqa: B007 - the last counts
            pass
        if found is None or found[1] is None:
            raise Unreadable(f"the regular expression {regex.pattern!r} matches nothing")
        start, end = found.span(1)
        verdict = found[1].strip()
        start += found[1].find(verdict)
        end = start + len(verdict)
        if verdict and goes_on(text, start, end, None if self._values else self._config.highest):
            around = text[max(0, start - _AROUND) : end + _AROUND]
            raise Unreadable(
                f"the verdict {_end(verdict)} is a part of more, {around!r}; ask for it alone, or match all of it"
            )
        others = None if self._values is None else [value for value in self._values if value != verdict.casefold()]
        if verdict and is_taken_back(text, end, others):
            behind = text[end : end + 2 * _AROUND]
            raise Unreadable(f"the verdict {_end(verdict)} is taken back by what follows, {behind!r}; ask for it alone")
        return verdict

    def _value(self, verdict: Any) -> float:
        if isinstance(verdict, int | float) and not isinstance(verdict, bool) and self._values is None:
            return self._bounded(verdict)
        if not isinstance(verdict, str | bool | int | float):
            raise Unreadable(f"the verdict is a {type(verdict).__name__}")
        text = (verdict if isinstance(verdict, str) else json.dumps(verdict)).strip()
        if self._values is not None:
            if (value := self._values.get(text.casefold())) is None:
                raise Unreadable(f"the verdict {_end(text)} is none of {', '.join(self._config.values or ())}")
            return value
        if not _NUMBER.fullmatch(text):
            raise Unreadable(f"the verdict {_end(text)} is no number")
        return self._bounded(float(text))

    def _bounded(self, number: float) -> float:
        lowest, highest = self._config.lowest, self._config.highest
        try:
            number = float(number)
        except OverflowError:  # a long integer
            number = math.inf
        if not math.isfinite(number):
            raise Unreadable("the verdict is no finite number")
        if (lowest is not None and number < lowest) or (highest is not None and number > highest):
            bounds = f"{'any' if lowest is None else f'{lowest:g}'} to {'any' if highest is None else f'{highest:g}'}"
            raise Unreadable(f"the verdict {number:g} is out of its bounds, {bounds}")
        return number


def _end(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else "..." + text[-_SHOWN:])
