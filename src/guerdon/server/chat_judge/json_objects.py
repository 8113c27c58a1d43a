"""Finds the JSON object that has a judge's verdict, and never an inner one of an object that cannot be read. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

_BRACKET = re.compile(r"[{}]|\[(?=\s*(?:[\"{\[\d-]|true|false|null))")
"""What may begin an object or a list of values, and a brace that ends nothing; other brackets are the text's own."""
_OPENING = re.compile(r'\{\s*["{}]|\[')
"""How JSON begins; braces of formulas and code do not."""
_HOLDS_OBJECTS = re.compile(r"\[\s*\{")
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_MOST_BROKEN = 1000
"""JSON that cannot be read, of one answer; each costs time in proportion to the answer's length."""
_TWICE = object()


class NoObject(Exception):
    """There is no such object, or it is ambiguous; the text says why."""


class ObjectFinder:
    """Finds the last top-level object of a text with the `key`."""

    def __init__(self, key: str) -> None:
        self._key, self._mention = key, re.compile(rf"(?<!\w){re.escape(key)}[\"']?\s*:")
        # Judges write line breaks into strings as they are.
        self._decoder = json.JSONDecoder(object_pairs_hook=self._make, strict=False)

    def is_whole(self, text: str) -> bool:
        """Whether the text is one JSON object and nothing else."""
        text = text.strip()
        try:
            made, end = self._decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return False
        return isinstance(made, dict) and end == len(text)

    def value(self, text: str) -> Any:
        """Returns the key's value in that object.

        Raises NoObject if there is none, if the key appears after it in a list, in an inner object or in a malformed
        one, if the object has the key twice, if braces do not match, or if anything is nested too deep.
        """
        found, is_hidden, at, num_broken = None, False, 0, 0
        while (bracket := _BRACKET.search(text, at)) is not None:
            start, made = bracket.start(), None
            if bracket[0] == "}":
                raise NoObject("its braces do not match")
            try:
                if _OPENING.match(text, start):
                    made, at = self._decoder.raw_decode(text, start)
            except RecursionError:
                raise NoObject("its JSON is nested too deep") from None
            except ValueError:
                num_broken += 1
                if num_broken > _MOST_BROKEN:
                    raise NoObject("too much of it looks like JSON and is none") from None
            if made is None and bracket[0] == "[" and not _HOLDS_OBJECTS.match(text, start):
                at = start + 1  # a bracket of the text
                continue
            if made is None:
                at = _end_of_group(text, start)
            if isinstance(made, dict) and self._key in made:
                found, is_hidden = made, False
            elif self._mention.search(_ESCAPE.sub(lambda found: chr(int(found[1], 16)), text[start:at])):
                is_hidden = True
        if is_hidden:
            raise NoObject(f"the last {self._key!r} is in malformed JSON, in an inner object, or in a list")
        if found is None:
            raise NoObject(f"there is no JSON object with the key {self._key!r}")
        if found[self._key] is _TWICE:
            raise NoObject(f"its JSON object has the key {self._key!r} twice")
        return found[self._key]

    def _make(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if sum(key == self._key for key, _ in pairs) > 1:
            made[self._key] = _TWICE
        return made


def _end_of_group(text: str, start: int) -> int:
    """Returns where the bracket is closed, whatever is in strings; the text's end if it is not."""
    kinds = "[{}]" if text[start] == "{" else r"[\[\]]"
    depth = 0
    for bracket in re.compile(kinds).finditer(text, start):
        depth += 1 if bracket[0] == text[start] else -1
        if not depth:
            return bracket.end()
    return len(text)
