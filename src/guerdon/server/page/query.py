"""Parses the query of the page's URLs: window, reference and model. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from guerdon.errors import InvalidRequest
from guerdon.server.page.timed_buckets import COARSE_S, FINE_S, FINE_WINDOW_S

LEAST_S, MOST_S = 60.0, 86_400.0
_DEFAULT_S = 600.0
_SLACK_S = 60.0
"""The kept start begins this much earlier."""


@dataclass(frozen=True)
class PageQuery:
    """The last `window_s` seconds; `reference` is `previous`, `start`, or a start and end in Unix time.

    Times are rounded to whole buckets, so that snapshots can be shared. `model`, if not empty, restricts series and
    rewards to one model, and `beside` adds another. `until` ends the window in the past, in Unix time.
    """

    window_s: float
    reference: str | tuple[float, float]
    model: str = ""
    beside: str = ""
    until: float | None = None

    def compared(self, start: float, started: float) -> tuple[float, float]:
        """Returns start and end of the reference for a window from `start`; the server started at `started`.

        The reference ends before the window, unless its times were given.
        """
        if isinstance(self.reference, tuple):
            return self.reference
        if self.reference == "start":
            return started - _SLACK_S, min(started + self.window_s, start)
        return start - self.window_s, start


def parse_query(query: Mapping[str, str], *known: str) -> PageQuery:
    """Parses a query with the known keys; raises InvalidRequest."""
    for name in query:
        if name not in known:
            raise InvalidRequest(f"the URL has the unknown key {name!r}; this path takes {', '.join(known)}")
    reference: str | tuple[float, float] = query.get("reference", "previous")
    if reference not in ("previous", "start"):
        reference = _span(str(reference))
    window_s, until = _number(query.get("window", str(_DEFAULT_S))), None
    if not LEAST_S <= window_s <= MOST_S:
        raise InvalidRequest(f"the URL has window={query['window']}; give seconds from {LEAST_S:g} to {MOST_S:g}")
    window_s = _rounded(window_s, FINE_S if window_s <= FINE_WINDOW_S else COARSE_S)
    if "until" in query:
        until = _number(query["until"])
        if not 0 < until < math.inf:
            raise InvalidRequest(f"the URL has until={query['until']}; give seconds since 1970, such as 1767229200")
        until = _rounded(until, FINE_S)
    return PageQuery(window_s, reference, query.get("model", ""), query.get("beside", ""), until)


def _span(text: str) -> tuple[float, float]:
    begins, _, ends = text.partition("-")
    start, end = _number(begins), _number(ends)
    if not 0 <= start < end < math.inf:
        raise InvalidRequest(
            f"the URL has reference={text}; give previous, start, or FROM-TO in seconds since 1970, such as "
            "1767225600-1767229200"
        )
    return _rounded(start, FINE_S), _rounded(end, FINE_S)  # all requests share these bounds


def _rounded(seconds: float, step_s: float) -> float:
    return math.ceil(seconds / step_s) * step_s


def _number(text: str) -> float:
    """Returns the number, NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
