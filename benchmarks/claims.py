"""Checks the promises about guerdon's speed against the results of bench.py."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import growth
import rates

OF_PADDED, OF_FASTEST, OF_PADDED_LONG, OF_FASTEST_ALONE = 3.0, 1.8, 6.0, 1.1
"""The promises, in times: at 8 responses of the best padded peer and the fastest form of any peer, with prompts of
1,000 tokens of the best padded peer, and at 1 response of the fastest of all."""


@dataclass(frozen=True)
class Claim:
    """A promise, the measured value, and its bound: a minimum, or with `at_most` a maximum."""

    text: str
    found: float
    bound: float
    at_most: bool = False
    percent: bool = False

    @property
    def holds(self) -> bool:
        """Whether the measured value keeps the promise."""
        return self.found <= self.bound if self.at_most else self.found >= self.bound

    def __str__(self) -> str:
        told = (
            f"{self.found:.1%}, promised {self.bound:.0%}"
            if self.percent
            else f"{self.found:.2f} times, " + (f"promised {self.bound:g}")
        )
        way = "at most" if self.at_most else "at least"
        return f"{self.text}: {told.replace('promised', f'promised {way}')}: {'held' if self.holds else 'NOT held'}"


def rate(row: dict) -> float:
    """Returns the median over the rounds, in sequences/s."""
    return statistics.median(row["seq_s"])


def best(cell: dict, *, ours: bool = False, pads: bool | None = None, served: bool = False) -> tuple[str, float]:
    """Returns the fastest form of a cell and its rate, among guerdon's or the peers', padded or not, servers or not."""
    found = {
        name: rate(row)
        for name, row in cell["forms"].items()
        if row["ours"] == ours and pads in (None, row["pads"]) and not (served and name.startswith("in process"))
    }
    name = max(found, key=found.__getitem__)
    return name, found[name]


def claims_of(results: dict) -> list[Claim]:
    """Returns the promises that the results have measurements of."""
    told = []
    for cell in results.get("peers", {}).get("cells", []):
        _, mine = best(cell, ours=True, served=True)
        padded, its = best(cell, pads=True)
        fastest, most = best(cell)
        where = f"{cell['load']} prompts, {cell['responses']} response{'s' * (cell['responses'] > 1)}"
        match cell["load"], cell["responses"]:
            case "short", 8:
                told.append(Claim(f"{where}, of the best padded peer ({padded})", mine / its, OF_PADDED))
                told.append(Claim(f"{where}, of the fastest form of any peer ({fastest})", mine / most, OF_FASTEST))
            case "long", 8:
                told.append(Claim(f"{where}, of the best padded peer ({padded})", mine / its, OF_PADDED_LONG))
                told.append(Claim(f"{where}, of the fastest form of any peer ({fastest})", mine / most, OF_FASTEST))
            case _, 1:
                told.append(Claim(f"{where}, of the fastest of all ({fastest})", mine / most, OF_FASTEST_ALONE))
    if "rates" in results:
        row = results["rates"]["models"][0]
        share = statistics.median(rates.shares_of(row))
        text = f"the packed forward ({row['shape']}, {row['dtype']}), of the rate of its matrix products"
        told.append(Claim(text, share, rates.LEAST[results["rates"]["device"]], percent=True))
    if "growth" in results:
        off = max(map(abs, growth.deviations(results["growth"])["tokens"]))
        text = "the cost of 1 to 32 responses a prompt, off c·(P + N·R) with the best c"
        told.append(Claim(text, off, growth.MOST_OFF, at_most=True, percent=True))
    return told


def verdict(claims: list[Claim]) -> str:
    """Returns one line per promise, and whether all hold."""
    if not claims:
        return "Nothing that is promised was measured."
    broken = sum(not claim.holds for claim in claims)
    lines = [f"- {claim}" for claim in claims]
    return "\n".join([*lines, "", f"{broken} NOT held." if broken else "All of it held."])
