"""Tells whether the number or word that a regular expression found in a text is only a part of a longer one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

_GAP, _DASH, _TIMES = r"[ \t\u00a0\u2009\u202f]", r"\-−‐‑–—﹣－~", r"+×·^±"
_BEFORE_NUMBER = re.compile(
    rf"""(?: _ | \d [.,:'’٫٬…] | \d \*{{1,2}} | \d [eE] [-+]?  # of 1_0, 7.5, 2**3 and 1e-1 only the end was found
       | \d {_GAP}? [/⁄{_DASH}{_TIMES}] {_GAP}?               # 7/10, 4 - 7
       | \d {_GAP}+ (?:or|to|(?:out{_GAP})?of) {_GAP}+        # 7 out of 10
       | (?<![\w.]) \.                                        # .5
       | (?<![^\W\d_]) [{_DASH}] | [<≤≥≈] {_GAP}?              # -7, and not Score-7; < 7
    )$""",
    re.VERBOSE | re.IGNORECASE,
)
_AFTER_NUMBER = re.compile(
    rf"""[a-z_] | \\?[.,:'’٫٬…]+ \d | \s* [.٫] \d | \*{{1,2}} [.,]? \d | {_GAP}? [‰‱]  # 1e1, 7k, 1_0, 7.5, 7,5, 7..10
       | {_GAP}? (?:[{_DASH}{_TIMES}:|→*/⁄] | -> | \+/-) {_GAP}? \d                # 7-10, 7 × 10, 7 : 10, 7 -> 5
       | {_GAP}? (?:[½⅓⅔¼¾⅕⅛] | &\w+;)                                          # 7 ½
       | {_GAP}? [\u2009\u202f] {_GAP}? \d | {_GAP} \d{{3}} (?!\d) | {_GAP} \d+ [/⁄] \d  # 1 000, 7 1/2
       | {_GAP}+ (?:or|to|through|thru|until|plus|minus|times|x|over|and|&|e-?) {_GAP}* [\d½]
       | {_GAP}+ (?:(?:and|&){_GAP}(?:an?{_GAP})?)? (?:half|halves|quarters?|thirds?|tenths?) \b
       | {_GAP}+ (?:point|dot|percent|per{_GAP}cent|hundred|thousand|million|dozen|divided{_GAP}by) \b
       | {_GAP}* (?:/|out{_GAP}of|of) {_GAP}* (?:one|two|three|four|five|six|seven|eight|nine|ten|twenty|hundred) \b
       | {_GAP}+ (?:\w+{_GAP}+)? (?:of|on{_GAP}an?{_GAP}scale) \b [^.\n]{{0,24}} \d     # 7 stars of 5
    """,
    re.VERBOSE | re.IGNORECASE,
)
_SCALE = re.compile(
    rf"[*`)\]}}\"'$]{{,3}}{_GAP}*\(?(?:[%％٪]|(?:[/⁄]|(?:out{_GAP})?of{_GAP}(?:a{_GAP}possible{_GAP})?){_GAP}*(\d+(?:\.\d+)?))",
    re.IGNORECASE,
)
"""What may follow a number of a scale; marks around the number may end before it."""
_BEFORE_WORD = re.compile(
    r"(?:[^\W_]|[^\W_][-_'’/]|(?:\b(?:not|no|never|hardly|neither|nor)|n['’]t)\s+(?:\w+\s+){0,2})$", re.IGNORECASE
)
_AFTER_WORD = re.compile(r"[^\W_]|[-_'’/][^\W_]|\s+or\s+\w", re.IGNORECASE)
_END = r"[\s*_`\"')\]}]*"
_CONTRAST = rf"{_END}[,;:(–—-]*\s*(?:but|however|yet|though|although|except|or|and\s+yet)\b"
_RETRACTION = (
    rf"{_END}[,;:(.!…–—-]*\s*(?:no(?:pe)?(?=\s*[,.:;!–—-])|wait|actually|rather|correction|sorry|hmm+|instead|i\s+mean|make\s+(?:that|it)|"
    r"on\s+second\s+thought|scratch\s+that)\b"
)
"""What takes a verdict back may begin the next sentence; there, what contrasts is about another thing."""
_TAKEN_BACK = re.compile(
    rf"(?:{_CONTRAST}|{_RETRACTION})[^.!?\n]{{0,40}}?(?<![\w.])\d+(?:[.,/]\d+)?\s*(?:[.,;!?)*/]|$|\n|out\s+of|of\s+\d)",
    re.IGNORECASE,
)
"""Matches another number after a number, which nothing is counted by."""
_CONTEXT = 24
"""Characters of the text that are looked at before a verdict."""


def is_taken_back(text: str, end: int, others: Iterable[str] | None = None) -> bool:
    """Whether the sentence after a verdict, which ends at `end`, names another, such as `good, but bad`.

    Others are `others`; without them, numbers.
    """
    if others is None:
        return _TAKEN_BACK.match(text, end) is not None
    words = "|".join(re.escape(other) for other in others if other)
    behind = rf"[^.!?\n]{{0,80}}?(?<!\w)(?:{words})(?!\w)"
    return (
        bool(words)
        and re.compile(rf"(?:{_CONTRAST}|{_RETRACTION}){behind}", re.IGNORECASE).match(text, end) is not None
    )


def goes_on(text: str, start: int, end: int, highest: float | None = None) -> bool:
    """Whether the verdict in `text[start:end]` is a part of a longer number or word, or of a range, sum or fraction.

    A number of a scale, such as 7/10, 7 out of 10 or 70%, is whole if the scale ends at `highest`.
    """
    before = text[max(0, start - _CONTEXT) : start]
    first, last = text[start : start + 1], text[end - 1 : end]
    if first.isnumeric() or first in (".", "+", "-"):
        is_thousands = first.isnumeric() and re.fullmatch(r"\d{3}", text[start:end]) is not None
        if (
            before[-1:].isnumeric()
            or _BEFORE_NUMBER.search(before)
            or (first in ("+", "-") and re.search(rf"\w{_GAP}?$", before))
            or (is_thousands and re.search(rf"\d{_GAP}$", before))
        ):
            return True
    elif first.isalpha() and _BEFORE_WORD.search(before):
        return True
    if last.isnumeric() or last == ".":
        return _number_goes_on(text, end, highest)
    return last.isalpha() and _AFTER_WORD.match(text, end) is not None


def _number_goes_on(text: str, end: int, highest: float | None) -> bool:
    if scale := _SCALE.match(text, end):
        most = 100.0 if scale[1] is None else float(scale[1])
        end = scale.end()
        if most != highest or (scale[1] is not None and _SCALE.match(text, end)):
            return True
    return text[end : end + 1].isnumeric() or _AFTER_NUMBER.match(text, end) is not None
