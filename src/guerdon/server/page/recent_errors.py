"""Counts errors over time by kind, without texts: failed requests, and samples without a score. Pure: no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from guerdon import errors
from guerdon.server.page.timed_buckets import TakenBuckets, TimedBuckets
from guerdon.server.page.traffic import FINE, Sample

Kind = tuple[str, str]
"""The failed unit, `request` or `sample`, and the error's class."""


class RecentErrors:
    """The errors of every model over the last day."""

    def __init__(self) -> None:
        self._kept: dict[str, TimedBuckets[Counter[Kind]]] = {}
        self._latest: dict[str, dict[Kind, float]] = {}
        self._counted: dict[tuple[str, str], float] = {}

    def read(self, time: float, samples: Iterable[Sample]) -> None:
        """Adds the failed requests since the last reading; `samples` are the registry's."""
        for name, labels, value in samples:
            if name != "guerdon_requests_total" or labels["outcome"] in FINE:
                continue
            model, outcome = labels["model"], labels["outcome"]
            if grown := round(value - self._counted.get((model, outcome), 0.0)):
                self._counted[model, outcome] = value
                self._add(model, time, ("request", outcome), grown)

    def note(self, model: str, time: float, results: Iterable[object]) -> None:
        """Adds the samples of an answered request that have an error instead of a score."""
        kinds = Counter(type(one).__name__ for one in results if isinstance(one, errors.GuerdonError))
        for kind, count in kinds.items():
            self._add(model, time, ("sample", kind), count)

    def _add(self, model: str, time: float, kind: Kind, count: int) -> None:
        self._kept.setdefault(model, TimedBuckets()).add(time, Counter({kind: count}))
        self._latest.setdefault(model, {})[kind] = time

    def taken(self, names: Iterable[str], start: float, now: float) -> list[TakenErrors]:
        """Returns the errors of these models since then."""
        return [
            TakenErrors(self._kept[name].taken(start, now), self._latest[name].copy())
            for name in names
            if name in self._kept
        ]


class TakenErrors:
    """A copy of one model's errors, readable on any thread."""

    def __init__(self, sums: TakenBuckets[Counter[Kind]], latest: dict[Kind, float]) -> None:
        self._sums, self._latest = sums, latest

    def tell(self, start: float, step_s: float, count: int) -> list[dict[str, Any]]:
        """Returns each kind's number in each of `count` periods, and when it came last; the most frequent first."""
        columns = self._sums.columns(start, step_s, count)
        told = []
        for kind in {kind for column in columns if column for kind in column}:
            counts = [column[kind] if column else 0 for column in columns]
            of, name = kind
            cls: type[errors.GuerdonError] = getattr(errors, name)
            told.append(
                {
                    "of": of,
                    "kind": name,
                    "what": (cls.__doc__ or "").partition("\n")[0],
                    "http": cls.http,
                    "count": sum(counts),
                    "counts": counts,
                    "last": self._latest[kind],
                }
            )
        return sorted(told, key=lambda one: (-one["count"], one["of"], one["kind"]))
