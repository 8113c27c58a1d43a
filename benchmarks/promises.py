"""Checks the promises about an overloaded server against the results of overload.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable

LEAST_SHARE, MOST_WAITS, AT_ONCE_S = 0.9, 2.0, 0.1
"""The promises: of the peak's rate, in times that a full queue takes, and within what a refusal comes as a rule."""


def broken_of(rounds: list[dict[str, dict[str, float]]]) -> list[str]:
    """Returns the broken promises, by medians over the rounds; one is that every request was answered."""

    def middle(name: str, figure: Callable[[dict[str, dict[str, float]], str], float]) -> float:
        return statistics.median(figure(told, name) for told in rounds)

    broken = []
    for name in ("overload", "fair"):
        share = middle(name, lambda told, name: told[name]["per_s"] / told["peak"]["per_s"])
        wait = middle(name, lambda told, name: told[name]["p99_s"] / told[name]["limit_s"])
        refused_s = middle(name, lambda told, name: told[name]["refused_p50_s"])
        if not share >= LEAST_SHARE:
            broken.append(f"{name}: {share:.0%} of the peak is answered, less than {LEAST_SHARE:.0%}")
        if not wait < MOST_WAITS:
            broken.append(
                f"{name}: the accepted wait {wait:.2f} times a full queue (p99), not less than {MOST_WAITS:g}"
            )
        if not refused_s < AT_ONCE_S:
            broken.append(f"{name}: a refusal takes {refused_s:.3f} s (median), not less than {AT_ONCE_S:g}")
        if lost := sum(told[name]["others"] for told in rounds):
            broken.append(f"{name}: {lost:.0f} requests had another answer than scores or 503, or none")
    served = middle("fair small", lambda told, name: told[name]["per_s"] / told[name]["sent_per_s"])
    if not served >= LEAST_SHARE:
        broken.append(f"the client beside the flood had {served:.0%} of its requests answered")
    return broken
