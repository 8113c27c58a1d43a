"""Checks mathematical answers by math-verify: `guerdon serve guerdon.verifiers.mathematics:verify --isolate`.

math-verify limits its own time by SIGALRM, which works on main threads alone; here the child process has a deadline, so
that is off. Most of this file rewrites how people and programs write numbers into what math-verify reads as the same.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

from guerdon.errors import StartError, install_command
from guerdon.verifiers.responses import answer_of

try:
    import math_verify
    import sympy
except ImportError as e:
    raise StartError(f"math-verify cannot be imported: {e}", install_command("math")) from e

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time is not limited


def verify(responses: list[str], labels: list[Any]) -> list[float]:
    """Returns 1.0 if the response's answer equals the label as mathematics, else 0.0.

    A label is a number, or text: LaTeX, with or without `$` or `\\boxed{}`, or a plain expression. A response without
    an answer, or with one that cannot be read or compared, gets 0.0. Raises ValueError for a label that cannot be read.
    """
    rewards = []
    for response, label in zip(responses, labels, strict=True):
        expected = _parse(read_label(label))
        if not expected:
            raise ValueError(f"math-verify finds no answer in the label {label!r}")
        pairs = itertools.chain.from_iterable(
            itertools.product(expected, _parse(text)) for text in read_answer(answer_of(response))
        )
        rewards.append(float(any(_is_same(one, other) for one, other in pairs)))
    return rewards


verify.needs_isolation = True  # type: ignore[attr-defined]


def _parse(text: str) -> list[Any]:
    try:
        return math_verify.parse(text, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:  # of sympy and its parsers, any kind
        return []


def _is_same(expected: Any, found: Any) -> bool:
    try:
        pairs = [(expected, found)]
        if expected.atoms(sympy.Float) or found.atoms(sympy.Float):
            pairs.append((_exact(expected), _exact(found)))
        more = _extra_decimals(expected, found)
        limits = {"float_rounding": 6 + more, "numeric_precision": 15 + more, "timeout_seconds": None}
        return any(math_verify.verify(one, other, **limits, raise_on_error=True) for one, other in pairs)
    except MemoryError:
        raise
    except Exception:  # as above
        return False


def _exact(value: Any) -> Any:
    """Returns the value with fractions for decimals, of which products with powers of ten are exact."""
    return value.xreplace({number: sympy.Rational(str(number)) for number in value.atoms(sympy.Float)})


def _extra_decimals(*values: Any) -> int:
    """Returns the number of decimals, beyond math-verify's six, that give small numbers five significant digits."""
    smallest = 1.0
    for number in itertools.chain.from_iterable(map(_numbers, values)):
        with contextlib.suppress(TypeError, OverflowError):  # a percentage, or nan
            smallest = min(smallest, float(abs(number.evalf(5))) or 1.0)
    return max(0, -2 - math.floor(math.log10(smallest))) if smallest < 1e-3 else 0


def _numbers(value: Any) -> Iterator[Any]:
    """Yields the numbers that a value, such as a set or a matrix, is made of."""
    if isinstance(value, sympy.MatrixBase):
        value = sympy.Tuple(*value)
    if isinstance(value, sympy.Expr) and value.is_number:
        yield value
    elif isinstance(value, sympy.Basic):
        for part in value.args:
            yield from _numbers(part)


# ------------------------------------------------------ numbers as people and programs write them, for math-verify

_ENVIRONMENTS = ("$", "\\boxed", "\\(", "\\[")
"""Marks between which math-verify reads LaTeX; elsewhere it looks for numbers alone."""
_NO_LABELS = ("", "nan", "none", "null", "<na>")
_NO_UNITS = re.compile(
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|rho|sigma|tau|phi|chi|psi|omega|"
    "(arc)?(sin|cos|tan)h?|cot|sec|csc|log|exp|sqrt|gcd|lcm|max|min|mod|det|inf|infinity|percent|percentage|pct|and",
    re.IGNORECASE,
)
"""Matches words after a number that are mathematics."""

_SYMBOLS = str.maketrans(
    {"\u2212": "-", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2044": "/", "\u221e": "\\infty"}
    | {"\u00b0": "^{\\circ}"}
    | {"\u00bd": " 1/2", "\u2153": " 1/3", "\u2154": " 2/3", "\u00bc": " 1/4", "\u00be": " 3/4"}
    | dict(zip("０１２３４５６７８９", "0123456789", strict=True))
    | dict.fromkeys("€£¥₹₩")
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(
    r"(?<![\w.,/^])(\d[\d,]*(?:\.\d+)?)(\$?(?:\s|\\[,;: ]|[~-])*(?:\\(?:text|mathrm)\{\s*)?)"
    rf"({'|'.join(_SCALES)})s?\b",
    re.IGNORECASE,
)
"""Matches a number, a separator, and a word that multiplies it."""


def _mixed(found: re.Match[str]) -> str:
    whole, numerator, denominator = found.groups()
    return f"({whole}+{numerator}/{denominator})" if int(numerator) < int(denominator) else found[0]


def _in_base(found: re.Match[str]) -> str:
    """Returns the value of digits with a base, which math-verify drops."""
    try:
        return str(int(found[1], int(found[3])))
    except ValueError:  # no such base, or other digits
        return found[0]


def _repeating(found: re.Match[str]) -> str:
    whole, once, again = found.groups()
    last = int(whole + once or 0)
    return f"({Fraction(int(whole + once + again) - last, 10 ** len(once) * (10 ** len(again) - 1))})"


_REWRITTEN: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\b(?:(?:US|AU|CA|NZ|HK|SG)\s?(?=\\?\$\s?[\d.]|\\\$)|[ACRS](?=\\\$))"), ""),  # of a country
    (re.compile(r"(?<!\\)\\\$"), ""),  # the sign of dollars
    (re.compile(r"(?:USD|EUR|GBP|JPY|CNY|INR|Rs\.?)\s*(?=\d)"), ""),
    # Letters alone are symbols with an index, such as F_{20}; only with the base 16 several of them are digits.
    (
        re.compile(r"(?<![\w.,])(?=[A-F]*\d|[A-F]{2,}_\{?\s*16)([0-9A-F]+)_(\{\s*)?([1-9]\d?)(?(2)\s*\}|(?!\d))"),
        _in_base,
    ),
    (_SCALED, lambda found: f"{Decimal(found[1].replace(',', '')) * _SCALES[found[3].lower()]:f}{found[2]}"),
    (re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+"), lambda found: f"^({found[0].translate(_RAISED)})"),
    (re.compile(r"\u221a\s*(\d+|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"\^\s*-\s*(\d+|[A-Za-z])"), r"^(-\1)"),  # in LaTeX, 10^-5 is 10^{-}5
    (re.compile(r"(?<=\d)(?:\\[,;:! ]|[~\u00a0\u2009\u202f])(?=\d{3}(?!\d))"), ""),  # spaces between thousands
    (re.compile(r"(?<!\d)(\d*+)\.(\d*+)\\(?:overline|bar|dot)\{(\d+)\}"), _repeating),
    (re.compile(r"(?<![\d.,/])(\d+)\s+(\d+)/(\d+)(?![\d/]|[.,]\d)"), _mixed),
    (re.compile(r"\\(?:text|math|bold)(?:rm|bf|it|normal|symbol)?\s*\{\s*([-+]?[\d.,]*\d)\s*\}"), r"\1"),
    (re.compile(r"(?<=\))\.(?=\s|$)"), ","),  # the end of a sentence, which math-verify takes for a part of the number
]
_BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_MAX_BOXES = 16
_ANSWERS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_WORDS = re.compile(r"(?<!\\)\b[A-Za-z]{2,}\s+(?:[A-Za-z]{2,}|\d)")
"""Matches two words, or one before a number."""
_BETWEEN_BOXES = re.compile(r"(?:[\s$,;]|\\[()\[\],;:! ]|\\q?quad|\\text\{|\}|and|or)*")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_UNIT = r"\b[A-Za-z]{3,}|US(?= )|[cdkm]m|[km]g|m[lL]|km/h|m/s|m(?=\^)|ft|in|yd|mi|lb|oz|hr|sq|cu|\^\{\\circ\} ?[CF]"
_WITH_UNIT = re.compile(rf"([-+]?[\d.,/(+]*[\d)])\s*(({_UNIT})(?:[A-Za-z ./]|\^\(?-?\d\)?)*)")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(?:\d++(?:\.\d*+)?|\.\d++)[eE][-+]?\d{1,3}(?![\w^{]|\.\d)")
_OF_EULER = re.compile(r"(?!1e)\d+e[-+][1-9]")
"""Matches what in LaTeX may be a multiple of Euler's number, plus or minus a digit."""


def read_label(label: Any) -> str:
    """Returns the label, which may be alone in a list, as text for math-verify; raises ValueError if it is none."""
    if isinstance(one := label.tolist() if hasattr(label, "tolist") else label, list | tuple):  # of a table's cell
        if len(one) != 1:
            raise ValueError(f"the label is a list of {len(one)}; send one answer")
        return read_label(one[0])
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise ValueError(f"the label is {type(label).__name__}; send a number, or text with the right answer")
    if isinstance(label, float) and math.isfinite(label):
        return f"\\boxed{{{_spell(repr(label))}}}"
    text = str(label).rpartition("####")[2].strip()  # GSM8K's labels end with it and the number
    if text.lower() in _NO_LABELS:
        raise ValueError(f"the label is {label!r}, which is no answer")
    text = _rewrite(text)
    if text.count("$") == 1:
        text = text.replace("$", "")
    if _has_latex(text):
        return _SCIENTIFIC.sub(_spell_unless_of_euler, text)
    return f"\\boxed{{{_tidy(_SCIENTIFIC.sub(_spell_match, text))}}}"


def read_answer(answer: str) -> Iterator[str]:
    """Yields the texts for math-verify that a response's answer may mean; more than one if its LaTeX is ambiguous."""
    text = _rewrite(_from_last_box(_from_last_tag(answer)))
    yield (spelt := _SCIENTIFIC.sub(_spell_match, text))
    if (other := _SCIENTIFIC.sub(_spell_unless_of_euler, text)) != spelt:
        yield other
    if "\\" in spelt and not _has_latex(spelt):
        yield f"\\boxed{{{_tidy(spelt)}}}"


def _rewrite(text: str) -> str:
    text = text.translate(_SYMBOLS)
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    return _BOX.sub(lambda found: f"\\boxed{{{_tidy(found[1])}}}", text)


def _from_last_tag(text: str) -> str:
    """Returns the content of the last `<answer>`, else the whole text; a lone expression is boxed."""
    found = _ANSWERS.findall(text)
    if not found or not found[-1].strip():
        return text
    answer: str = found[-1].strip()
    is_bare = not (_has_latex(answer) or "\n" in answer or _WORDS.search(answer))
    return f"\\boxed{{{answer}}}" if is_bare else answer


def _from_last_box(text: str) -> str:
    """Returns the text from its last box on, or from the first of the last boxes if they make one answer."""
    starts = [found.start() for found in re.finditer(r"\\boxed\b", text)][-_MAX_BOXES:]
    for before, start in zip(starts[-2::-1], starts[:0:-1], strict=True):
        end = _end_of_group(text, before)
        if end < start and not _BETWEEN_BOXES.fullmatch(text, end, start):
            return text[start:]
    return text


def _end_of_group(text: str, start: int) -> int:
    """Returns where the braces that open after `start` are closed."""
    depth = 0
    for found in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if found[0] == "{" else -1
        if depth <= 0:
            return found.end()
    return len(text)


def _tidy(expression: str) -> str:
    """Returns a whole answer without spaces between thousands, with its unit as text, and without the final period."""
    text = expression.strip().rstrip(".")
    if _THOUSANDS.fullmatch(text):
        return text.replace(" ", "")
    found = _WITH_UNIT.fullmatch(text)
    return f"{found[1]}\\text{{ {found[2]}}}" if found and not _NO_UNITS.fullmatch(found[3]) else text


def _has_latex(text: str) -> bool:
    return any(mark in text for mark in _ENVIRONMENTS)


def _spell(number: str) -> str:
    """Returns a number without exponent: math-verify reads 1e-07 as e - 07."""
    return format(Decimal(number), "f")


def _spell_match(found: re.Match[str]) -> str:
    return _spell(found[0])


def _spell_unless_of_euler(found: re.Match[str]) -> str:
    return found[0] if _OF_EULER.match(found[0]) else _spell(found[0])
