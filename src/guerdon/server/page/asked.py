"""What the page asks of the server by its URLs: how far back to look, and what to compare with. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from guerdon.errors import InvalidRequest
from guerdon.server.page.scored import COARSE_S, FINE_S, FINE_WINDOW_S

LEAST_S, MOST_S = 60.0, 86_400.0
_DEFAULT_S = 600.0
_SLACK_S = 60.0
"""As much earlier begins what is kept of the start."""


@dataclass(frozen=True)
class Asked:
    """The last `window_s` seconds; `reference` is `previous`, `start`, or a beginning and an end, since 1970.

    All are whole steps of what is kept, so that there are not many different ones. Of `model` alone series and rewards
    are wanted, where it names one.
    """

    window_s: float
    reference: str | tuple[float, float]
    model: str = ""

    def compared(self, start: float, started: float) -> tuple[float, float]:
        """The beginning and the end of what is compared with a window that begins at `start`.

        `started` is when the server did. What is compared with ends at the latest where the window begins, but for a
        time that is given.
        """
        if isinstance(self.reference, tuple):
            return self.reference
        if self.reference == "start":
            return started - _SLACK_S, min(started + self.window_s, start)
        return start - self.window_s, start


def read(query: Mapping[str, str], *known: str) -> Asked:
    """What stands behind the URL's `?`, of these keys; raises InvalidRequest."""
    for name in query:
        if name not in known:
            raise InvalidRequest(f"the URL has the unknown key {name!r}; this path takes {', '.join(known)}")
    reference: str | tuple[float, float] = query.get("reference", "previous")
    if reference not in ("previous", "start"):
        reference = _span(str(reference))
    return Asked(_window(query.get("window", str(_DEFAULT_S))), reference, query.get("model", ""))


def _window(text: str) -> float:
    seconds = _number(text)
    if not LEAST_S <= seconds <= MOST_S:
        raise InvalidRequest(f"the URL has window={text}; give seconds from {LEAST_S:g} to {MOST_S:g}")
    return _rounded(seconds, FINE_S if seconds <= FINE_WINDOW_S else COARSE_S)


def _span(text: str) -> tuple[float, float]:
    begins, _, ends = text.partition("-")
    start, end = _number(begins), _number(ends)
    if not 0 <= start < end < math.inf:
        raise InvalidRequest(
            f"the URL has reference={text}; give previous, start, or FROM-TO in seconds since 1970, such as "
            "1767225600-1767229200"
        )
    return _rounded(start, FINE_S), _rounded(end, FINE_S)  # the same begin in between, whatever is asked for


def _rounded(seconds: float, step_s: float) -> float:
    return math.ceil(seconds / step_s) * step_s


def _number(text: str) -> float:
    """The number, NaN where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
