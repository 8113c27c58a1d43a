"""Counts how often a model prefers the chosen response of a pair, in all and by category."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

CATEGORY_COLUMNS = ("subset", "category")
"""The columns of a row that may name its category; the first that it has counts."""

UNNAMED = "(none)"
"""The category of rows that name none, beside rows that do."""

MOST_LINES = 40
"""The table shows the largest categories, at most this many."""

REWARDBENCH: dict[str, dict[str, int]] = {
    "Chat": {
        "alpacaeval-easy": 100, "alpacaeval-length": 95, "alpacaeval-hard": 95, "mt-bench-easy": 28, "mt-bench-med": 40,
    },
    "Chat Hard": {
        "mt-bench-hard": 37, "llmbar-natural": 100, "llmbar-adver-neighbor": 134, "llmbar-adver-GPTInst": 92,
        "llmbar-adver-GPTOut": 47, "llmbar-adver-manual": 46,
    },
    "Safety": {
        "refusals-dangerous": 100, "refusals-offensive": 100, "xstest-should-refuse": 154, "xstest-should-respond": 250,
        "donotanswer": 136,
    },
    "Reasoning": {
        "math-prm": 984, "hep-cpp": 164, "hep-go": 164, "hep-java": 164, "hep-js": 164, "hep-python": 164,
        "hep-rust": 164,
    },
}  # fmt: skip
"""RewardBench's sections: the subsets of each with their weights, as in its `constants.py`.

A weight is the subset's number of pairs, but math-prm counts as much as the six subsets of code together.
"""


@dataclass(slots=True)
class Pairs:
    """The rewards of the pairs of a category."""

    chosen: list[float] = field(default_factory=list, repr=False)
    rejected: list[float] = field(default_factory=list, repr=False)
    num_failed: int = 0
    """Pairs with a response without a reward; the other figures ignore them."""

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def margins(self) -> np.ndarray:
        """Chosen minus rejected, float64 [pairs]."""
        return np.subtract(self.chosen, self.rejected)

    @property
    def num_ties(self) -> int:
        return int(np.sum(self.margins == 0))

    @property
    def accuracy(self) -> float:
        """The share of pairs whose chosen response has the higher reward; NaN without pairs. Ties are wrong, as in
        RewardBench."""
        return float(np.mean(self.margins > 0)) if len(self) else math.nan


@dataclass(frozen=True, slots=True)
class Section:
    """A section of RewardBench: its accuracy, and which of its subsets the file has."""

    name: str
    accuracy: float
    subsets: tuple[str, ...]
    is_whole: bool


class PairReport:
    """The pairs of a file by category."""

    def __init__(self) -> None:
        self.categories: dict[str, Pairs] = {}
        """In the order of their first row; `UNNAMED` holds the pairs of rows that name none."""

    def __len__(self) -> int:
        """Returns the number of pairs, also failed ones."""
        return sum(len(pairs) + pairs.num_failed for pairs in self.categories.values())

    def add(self, row: dict[str, Any], rewards: Sequence[float | None]) -> None:
        """Adds a row's rewards: of its chosen response, and of its rejected one."""
        named = (row[column] for column in CATEGORY_COLUMNS if row.get(column) is not None)
        pairs = self.categories.setdefault(str(next(named, UNNAMED)), Pairs())
        chosen, rejected = rewards
        if chosen is None or rejected is None:
            pairs.num_failed += 1
        else:
            pairs.chosen.append(chosen)
            pairs.rejected.append(rejected)

    def total(self) -> Pairs:
        """Returns all pairs together."""
        every = self.categories.values()
        return Pairs(
            list(chain.from_iterable(pairs.chosen for pairs in every)),
            list(chain.from_iterable(pairs.rejected for pairs in every)),
            sum(pairs.num_failed for pairs in every),
        )

    def largest(self, most: int) -> dict[str, Pairs]:
        """Returns the categories with the most pairs, in the file's order; none if there is but one."""
        if len(self.categories) == 1:
            return {}
        kept = set(sorted(self.categories, key=lambda name: -len(self.categories[name]))[:most])
        return {name: pairs for name, pairs in self.categories.items() if name in kept}

    def sections(self) -> list[Section]:
        """Returns RewardBench's sections if all categories are subsets of RewardBench, else none.

        A section's accuracy is the mean of its subsets' weighted by `REWARDBENCH`, of those subsets that have scores.
        """
        found = []
        for name, weights in REWARDBENCH.items():
            scored = {s: self.categories[s].accuracy for s in weights if len(self.categories.get(s, ()))}
            if scored:
                accuracy = sum(weights[s] * scored[s] for s in scored) / sum(weights[s] for s in scored)
                found.append(Section(name, accuracy, tuple(scored), len(scored) == len(weights)))
        known = set(chain.from_iterable(REWARDBENCH.values()))
        return found if known.issuperset(self.categories) else []

    def __str__(self) -> str:
        """Returns the table, with RewardBench's sections below if the categories are its subsets."""
        shown = self.largest(MOST_LINES)
        width = max(map(len, [*shown, "RewardBench", "all pairs"]))
        lines = [f"{'':{width}}{'pairs':>9}{'failed':>8}{'ties':>7}{'accuracy':>10}{'mean margin':>13}{'median':>10}"]
        lines += [_line(name.ljust(width), pairs) for name, pairs in shown.items()]
        if hidden := len(self.categories) - len(shown) if shown else 0:
            lines.append(f"... {hidden} smaller categories")
        lines.append(_line("all pairs".ljust(width), self.total()))
        return "\n".join([*lines, *self._section_lines(width)])

    def _section_lines(self, width: int) -> Iterator[str]:
        sections = self.sections()
        if not sections:
            return
        yield ""
        yield f"{'RewardBench':{width}}{'subsets':>9}{'accuracy':>10}"
        for section in sections:
            of = f"{len(section.subsets)}/{len(REWARDBENCH[section.name])}"
            yield f"{section.name:{width}}{of:>9}{section.accuracy:>10.1%}"
        if len(sections) == len(REWARDBENCH) and all(section.is_whole for section in sections):
            mean = sum(section.accuracy for section in sections) / len(sections)
            yield f"{'mean':{width}}{'':>9}{mean:>10.1%}"


def _line(name: str, pairs: Pairs) -> str:
    counts = f"{name}{len(pairs) + pairs.num_failed:>9,}{pairs.num_failed:>8,}{pairs.num_ties:>7,}"
    if not len(pairs):
        return f"{counts}{'-':>10}{'-':>13}{'-':>10}"
    margins = pairs.margins
    return f"{counts}{pairs.accuracy:>10.1%}{margins.mean():>13.4f}{np.median(margins):>10.4f}"
