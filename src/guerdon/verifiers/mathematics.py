"""Checks mathematical answers by math-verify: `guerdon serve guerdon.verifiers.mathematics:verify --isolate`.

math-verify limits its own time by SIGALRM, which works on main threads alone; here the child process has a deadline, so
that is off.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Iterator
from typing import Any

from guerdon.errors import StartError, install_command
from guerdon.verifiers.notation import read_answer, read_label
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
