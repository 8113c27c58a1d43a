"""Reads a number from a judge's answer, or says why there is none. Pure."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from guerdon.settings.chat_judges import ParseConfig
from guerdon.thinking import answer_of
from guerdon.wire.chat_completions import ChatAnswer

_BRACKET = re.compile(r"[{}]|\[(?=\s*(?:[\"{\[\d-]|true|false|null))")
"""What may begin an object or a list of values, and a brace that ends nothing; other brackets are the text's own."""
_OPENING = re.compile(r'\{\s*["{}]|\[')
"""How JSON begins; braces of formulas and code do not."""
_HOLDS_OBJECTS = re.compile(r"\[\s*\{")
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_MOST_BROKEN = 1000
"""JSON that cannot be read, of one answer; each costs time in proportion to the answer's length."""
_TWICE = "given twice"


class NoObject(Exception):
    """There is no such object, or it is ambiguous; the text says why."""


class ObjectFinder:
    """Finds the last top-level object of a text with the `key`."""

    def __init__(self, key: str) -> None:
        self.key, self._mention = key, re.compile(rf"(?<!\w){re.escape(key)}[\"']?\s*:")
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
        """Returns the key's value in that object, as `find` finds it; raises NoObject."""
        return self.find(text)[0][self.key]

    def find(self, text: str) -> tuple[dict[str, Any], int]:
        """Returns that object and where it ends.

        Raises NoObject if there is none, if the key appears after it in a list, in an inner object or in a malformed
        one, if the object has the key twice, if braces do not match, or if anything is nested too deep.
        """
        found, end, is_hidden, at, num_broken = None, 0, False, 0, 0
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
            if isinstance(made, dict) and self.key in made:
                found, end, is_hidden = made, at, False
            elif self._mention.search(_ESCAPE.sub(lambda found: chr(int(found[1], 16)), text[start:at])):
                is_hidden = True
        if is_hidden:
            raise NoObject(f"the last {self.key!r} is in malformed JSON, in an inner object, or in a list")
        if found is None:
            raise NoObject(f"there is no JSON object with the key {self.key!r}")
        if found[self.key] is _TWICE:
            raise NoObject(f"its JSON object has the key {self.key!r} twice")
        return found, end

    @staticmethod
    def _make(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            made |= {key: _TWICE for key, count in Counter(key for key, _ in pairs).items() if count > 1}
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
_SPELT = "one|two|three|four|five|six|seven|eight|nine|ten|twenty|hundred"
_AFTER_NUMBER = re.compile(
    rf"""[a-z_+\u200b\u2060\ufeff] | -ish | \\?[.,:'’٫٬…]+ \d | \s* [.٫] \d | \*{{1,2}} [.,]? \d  # 1e1, 7k, 7+, 7.5
       | {_GAP}? [‰‱] | {_GAP}? (?:[½⅓⅔¼¾⅕⅛] | &\w+;)                                # 7 ½
       | {_GAP}? (?:[{_DASH}{_TIMES}:|→*/⁄] | -> | =+>? | \+/-) {_GAP}? \d             # 7-10, 7 × 10, 7 : 10, 7 -> 5
       | {_GAP}? [\u2009\u202f] {_GAP}? \d | {_GAP} \d{{3}} (?!\d) | {_GAP} \d+ [/⁄] \d  # 1 000, 7 1/2
       | ,? {_GAP}+ (?:or|to|through|thru|until|then|plus|minus|less|times|x|over|e-?) {_GAP}* (?:[\d½]|(?:{_SPELT})\b)
       | {_GAP}+ (?:and|&) {_GAP}* [\d½]
       | {_GAP}+ (?:(?:and|&){_GAP}(?:an?{_GAP})?)? (?:half|halves|quarters?|thirds?|tenths?) \b
       | {_GAP}+ (?:point|dot|percent|per{_GAP}cent|hundred|thousand|million|dozen|divided{_GAP}by) \b
       | {_GAP}* (?:/|out{_GAP}of|of) {_GAP}* (?:{_SPELT}) \b
    """,
    re.VERBOSE | re.IGNORECASE,
)
_SCALE = re.compile(
    rf"""[*`)\]}}\"'$]{{,3}} {_GAP}*+ (?: \(? [%％٪] | (?: \(? [/⁄] {_GAP}*                  # 70%, 7/10
       | (?:(?<!\d) (?!because) [^\W\d_]+\b {_GAP}*+)? [(\[,;]? {_GAP}*+                   # 7 stars, 7 (
         (?:(?:out{_GAP}+)?of|from|max(?:imum)?|scale|on{_GAP}+an?) \b [^.!?\n\d]{{0,24}} )  # out of, on a scale of
       (?:\d+ (?:\.\d+)? {_GAP}* (?:[{_DASH}]|to) {_GAP}*)? (\d+ (?:\.\d+)?) )               # 10, 1 to 10""",
    re.VERBOSE | re.IGNORECASE,
)
"""What may follow a number of a scale; marks around the number may end before it."""
_BEFORE_WORD = re.compile(
    r"(?:[^\W_]|[^\W][-_'’/]|(?:\b(?:not|no|never|hardly|neither|nor)|n['’]t)\s+(?:\w+\s+){0,2})$", re.IGNORECASE
)
_AFTER_WORD = re.compile(r"[^\W_]|[-_'’/][^\W_]|\s+or\s+\w", re.IGNORECASE)
_CONTEXT = 24
"""Characters of the text that are looked at before a verdict."""

# Possessive, because many blanks that several parts of a pattern may match would take quadratic time.
_END, _END_IN_LINE = r"[\s*_`\"')\]}/#>]*+", r"[^\S\n]*+[*_`\"')\]}]*+[^\S\n]*+"
_CONTRAST = rf"{_END}[,;:(–—-]*\s*(?:but|however|yet|though|although|except|or|and\s+yet)\b"
_RETRACTION = (
    rf"{_END}[,;:(.!…–—-]*\s*(?:no(?:pe)?(?=\s*[,.:;!–—-])|(?:no\s+)?wait|actually|rather|correction|sorry|hmm+|instead|"
    r"i\s+mean|make\s+(?:that|it)|on\s+(?:second\s+thought|reflection)|scratch\s+that|just\s+kidding|changed|revised|"
    r"corrected|final(?:\s+(?:score|verdict|rating|grade))?(?=\W*[:=]))\b"
)
"""What takes a verdict back may begin the next sentence; there, what contrasts is about another thing."""
_OPEN = re.compile(
    rf"{_END_IN_LINE}(?:\(?\?|~~|[,:]?[^\S\n]*(?:(?:only\s+)?if|unless|provided|assuming)\b"
    r"|(?:would|could|might|was|were|is\s+too)\b)",
    re.IGNORECASE,
)
"""Matches what leaves a verdict open: a question, strokes, or a condition, as in a prompt that the answer repeats."""
_LINK = rf"{_END_IN_LINE}(?:[|/\\&+~≈<>=→⇒⟶➜]|-+>|\bvs?\b\.?|\bversus\b)[^\w.!?\n]{{0,3}}"
_LIST = rf"{_END_IN_LINE}(?:[,;:(–—-]|\band\b)[^\w.!?\n]{{0,3}}"
_CASE = r"(?:if|unless|when|otherwise|else|depending|in|at|on|for|by|overall|alike|both)\b"
"""What leads from a verdict to another: always; or unless a phrase begins with the other, "good, bad style aside", to
which the words of a case do not belong."""
_OTHER_NUMBER = re.compile(
    rf"(?:{_CONTRAST}|{_RETRACTION})[^.!?\n]{{0,40}}?(?<![\w.])\d+(?:[.,/]\d+)?\s*(?:[.,;!?)*/]|$|\n|out\s+of|of\s+\d)"
    rf"|{_LIST}\d+(?:[.,/]\d+)?[.,;!?)*]*{_GAP}*(?:$|\n|(?:if|unless|otherwise|else)\b)",
    re.IGNORECASE,
)
"""Matches another number after a number, which nothing is counted by."""


def find_doubt(text: str, end: int, others: Iterable[str] | None = None) -> str | None:
    """Returns why the verdict that ends at `end` is none, by what follows it, such as `good, but bad`; None if it is.

    Others are `others`, of which single letters are matched in their case; without them, numbers.
    """
    if others is None:
        other = _OTHER_NUMBER
    else:
        each = [re.escape(one) if len(one) > 1 else f"(?-i:{re.escape(one)})" for one in others if one]
        words = "|".join(each) or "(?!)"
        other = re.compile(
            rf"(?:{_CONTRAST}|{_RETRACTION})[^.!?\n]{{0,80}}?(?<!\w)(?:{words})(?!\w)"
            rf"|{_LINK}(?:{words})(?!\w)|{_LIST}(?:{words}){_END_IN_LINE}(?:[^\w\s'’/-]|$|\n|(?<=\s){_CASE})",
            re.IGNORECASE,
        )
    if other.match(text, end):
        return "is taken back by what follows"
    return "is questioned, has a condition or is struck out" if _OPEN.match(text, end) else None


def find_end(text: str, start: int, end: int, highest: float | None = None) -> int | None:
    """Returns where the verdict `text[start:end]` ends with its scale, such as 7/10, 7 out of 10 or 70%.

    None if it is a part of a longer number or word, or of a range, sum or fraction, or if the scale does not end at
    `highest`.
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
            return None
    elif first.isalpha() and _BEFORE_WORD.search(before):
        return None
    if last.isnumeric() or last == ".":
        if scale := _SCALE.match(text, end):
            if (100.0 if scale[1] is None else float(scale[1])) != highest:
                return None
            end = scale.end()
        return None if text[end : end + 1].isnumeric() or _AFTER_NUMBER.match(text, end) else end
    return None if last.isalpha() and _AFTER_WORD.match(text, end) else end


_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?", re.ASCII)
_SHOWN = 120
_AROUND = 20
"""Characters before and after a verdict that are shown with it."""


class Unreadable(Exception):
    """An answer without a verdict; the text says why, and shows the answer's end."""


_DOUBLE_BRACKETS = re.compile(r"\[\[([^\[\]\n]*)\]\]")
_BRACKETS = {
    "a": 1.0, "b": 0.0, "c": 0.5, "tie": 0.5,
    "a>>b": 1.0, "a>b": 0.75, "a=b": 0.5, "b>a": 0.25, "b>>a": 0.0,
}  # fmt: skip
"""What a verdict in double brackets is worth to the first response; in the second line as Arena-Hard has them."""
_CHOICE = re.compile(r"[\W_]*(?:or|and|vs)[\W_]*", re.IGNORECASE)
"""What stands between two verdicts that are only offered."""
_NEGATED = re.compile(
    r"(?:\b(?:(?:can)?not|never|neither|nor|hardly)|n['’]t)\s+(?:\w+\s+){0,2}[*_`\"'(]*$", re.IGNORECASE
)
"""What denies a verdict before it."""
_SCORES, _RANKING = {"score_1": (1, 5), "score_2": (1, 5), "ranking": (1, 6)}, "ranking"
"""Bounds of the three numbers of NVIDIA's GenRM: a ranking of 1 means that the first response is much better."""


def _read_genrm(text: str) -> float:
    """Returns the verdict for the first response, from 0 to 1, by the ranking.

    The scores have to agree with it: a ranking alone may be a slip, and nothing here is guessed.
    """
    found: Any
    try:
        found, end = ObjectFinder(_RANKING).find(text)
    except NoObject as e:
        try:
            found, end = ObjectFinder("overall").find(text)  # beside judgements by rubric
        except NoObject:
            raise Unreadable(str(e)) from None
        if _RANKING in text[end:]:
            raise Unreadable(str(e)) from None
        found = found["overall"]
    if doubt := find_doubt(text, end):
        raise Unreadable(f"its verdict {doubt}")
    numbers: dict[str, float] = {}
    for name, (least, most) in _SCORES.items():
        given = found.get(name) if isinstance(found, dict) else None
        is_text = isinstance(given, str) and _NUMBER.fullmatch(given.strip()) is not None
        if isinstance(given, bool) or not (is_text or isinstance(given, int | float)):
            raise Unreadable(f"its {name} is {_end(str(given))}, and no number")
        number: float = float(given) if isinstance(given, str) else given  # type: ignore[assignment]
        if not least <= number <= most:
            raise Unreadable(f"its {name} is {given!s:.40}, and may be {least} to {most}")
        numbers[name] = number
    verdict = (6 - numbers[_RANKING]) / 5
    if (numbers["score_1"] - numbers["score_2"]) * (verdict - 0.5) < 0:
        raise Unreadable(f"its scores prefer one response and its ranking {numbers[_RANKING]:g} the other")
    return verdict


class AnswerParser:
    """Finds the verdict in an answer, and returns its value."""

    def __init__(self, config: ParseConfig) -> None:
        self._config = config
        self._regex = None if config.regex is None else re.compile(config.regex)
        self._finder = None if config.json is None else ObjectFinder(config.json)
        values = config.values
        self._values = None if values is None else {text.strip().casefold(): value for text, value in values.items()}

    def _preset(self, text: str) -> float:
        """Returns the verdict for the first response, from 0 to 1, in a project's form."""
        answer = answer_of(text)
        if answer is None:
            raise Unreadable("its thinking is not closed")
        if self._config.preset == "genrm":
            return _read_genrm(answer)
        if self._config.preset == "rm_r1":
            before, opened, last_one = answer.rpartition("<answer>")
            inside, closed, behind = last_one.partition("</answer>")
            if not opened or not closed:
                raise Unreadable("it has no <answer>" if not opened else "its last <answer> is not closed")
            if not re.fullmatch(r"\s*\[\[[AB]\]\]\s*", inside):
                raise Unreadable(f"between <answer> and </answer> is {_end(inside)}, and not [[A]] or [[B]] alone")
            if re.search(r"\w", behind.partition("\n")[0]):
                raise Unreadable(f"its line goes on after </answer>: {_end(behind)}")
            if _DOUBLE_BRACKETS.search(behind):
                raise Unreadable("it has another verdict in double brackets after the last <answer>")
            answer = before + inside + behind
        found = [*_DOUBLE_BRACKETS.finditer(answer)]
        if not found:
            raise Unreadable("it has no verdict in double brackets, such as [[A]]")
        last = found[-1]
        line = answer.count("\n", 0, last.start())
        near = {one[1].strip().casefold() for one in found if answer.count("\n", 0, one.start()) == line}
        if len(near & _BRACKETS.keys()) > 1:
            raise Unreadable("it has another verdict in double brackets beside the last one")
        if (value := _BRACKETS.get(last[1].strip().casefold())) is None:
            raise Unreadable(f"the verdict {_end(last[0])} is none of {', '.join(_BRACKETS).upper()}")
        others = [one for one in ("A", "B", "tie") if one.casefold() not in near]
        _check_kept(answer, last.start(), last.end(), last[0], others)
        return value

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
            if self._config.preset:
                return self._preset(answer.text)
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
                found, end = self._finder.find(answer)
            except NoObject as e:
                raise Unreadable(str(e)) from None
            verdict = found[self._finder.key]
            _check_kept(answer, end, end, str(verdict), self._others(str(verdict)))
            return verdict
        return answer if self._regex is None else self._match(self._regex, answer)

    def _match(self, regex: re.Pattern[str], text: str) -> str:
        earlier, found = None, None
        for match in regex.finditer(text):  # the last counts
            earlier, found = found, match
        if found is None or found[1] is None:
            raise Unreadable(f"the regular expression {regex.pattern!r} matches nothing")
        start, end = found.span(1)
        verdict = found[1].strip()
        start += found[1].find(verdict)
        end = start + len(verdict)
        whole = find_end(text, start, end, None if self._values else self._config.highest)
        if verdict and whole is None:
            around = text[max(0, start - _AROUND) : end + _AROUND]
            raise Unreadable(
                f"the verdict {_end(verdict)} is a part of more, {around!r}; ask for it alone, or match all of it"
            )
        if earlier is not None and earlier[1] != found[1] and _CHOICE.fullmatch(text, earlier.end(), found.start()):
            raise Unreadable(f"it leaves the choice between {_end(earlier[1])} and {_end(verdict)}")
        if verdict:
            _check_kept(text, found.start(), whole or end, verdict, self._others(verdict))
        return verdict

    def _others(self, verdict: str) -> list[str] | None:
        """Returns the words of other values than the verdict's, in capitals if it has them; None if it is a number."""
        if self._values is None:
            return None
        value = self._values.get(verdict.casefold())
        others = [word for word, worth in self._values.items() if worth != value]
        return [word.upper() for word in others] if verdict.isupper() else others

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


def _check_kept(text: str, start: int, end: int, verdict: str, others: list[str] | None) -> None:
    """Raises Unreadable if the text around a verdict denies it, takes it back or leaves it open."""
    line = text[max(0, start - _CONTEXT) : start].rpartition("\n")[2]
    doubt = "is denied" if _NEGATED.search(line) else find_doubt(text, end, others)
    if doubt:
        shown = text[max(0, start - _AROUND) : end + 2 * _AROUND]
        raise Unreadable(f"the verdict {_end(verdict)} {doubt}: {shown!r}; ask for it alone")


def _end(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else "..." + text[-_SHOWN:])
