"""Checks the promises and goals of guerdon's speed against the results of bench.py."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import growth
import rates

OF_PADDED = {"short": 2.5, "long": 6.0}
OF_FASTEST, OF_FASTEST_ALONE = 1.8, 1.1
"""The promises, in times: at 8 responses of the best padded peer, by load, and of the fastest form of any peer, and at
1 response of the fastest form. The rivals below are none of these peers: of them the same bounds are goals."""
RIVALS = ("vLLM", "OpenVINO", "ONNX Runtime")
"""The peers that compute with kernels of their own."""
OF_VLLM = {
    "small": {("short", 1): 1.3, ("short", 8): 1.6, ("long", 8): 1.8},
    "smollm2": {("short", 1): 1.2, ("short", 8): 1.4, ("long", 8): 1.6},
}
"""The goals, in times of vLLM's fastest form, by the model's shape, load and responses; 1.0 in all other cells,
and in all beside a busy process, of which nothing is promised."""


@dataclass(frozen=True)
class Claim:
    """A promise or a goal, the measured value, and its bound: a minimum, or with `at_most` a maximum.

    A promise decides the exit status of bench.py. A goal is what guerdon should reach, and may not reach yet.
    """

    text: str
    found: float
    bound: float
    at_most: bool = False
    percent: bool = False
    is_goal: bool = False

    @property
    def holds(self) -> bool:
        """Whether the measured value keeps the promise, or reaches the goal."""
        return self.found <= self.bound if self.at_most else self.found >= self.bound

    def __str__(self) -> str:
        found, bound = (
            (f"{self.found:.1%}", f"{self.bound:.0%}")
            if self.percent
            else (f"{self.found:.2f} times", f"{self.bound:g}")
        )
        way = "at most" if self.at_most else "at least"
        if self.is_goal:
            return f"{self.text}: {found}, the goal is {way} {bound}: {'' if self.holds else 'not '}reached"
        return f"{self.text}: {found}, promised {way} {bound}: {'held' if self.holds else 'NOT held'}"


def rate(row: dict) -> float:
    """Returns the median over the rounds, in sequences/s."""
    return statistics.median(row["seq_s"])


def best(
    cell: dict, *, ours: bool = False, pads: bool | None = None, served: bool = False, rival: str | None = None
) -> tuple[str, float]:
    """Returns the fastest form of a cell and its rate, among guerdon's or the peers'.

    `pads` takes only forms that pad, or only others; `served` only servers; `rival` only that rival's forms, or with ""
    only those of no rival.
    """
    found = {
        name: rate(row)
        for name, row in cell["forms"].items()
        if row["ours"] == ours
        and pads in (None, row["pads"])
        and rival in (None, rival_of(name))
        and not (served and name.startswith("in process"))
    }
    name = max(found, key=found.__getitem__)
    return name, found[name]


def rival_of(name: str) -> str:
    """Returns which rival a form measures; "" for all other forms."""
    return next((rival for rival in RIVALS if name.removeprefix("in process: ").startswith(rival)), "")


def claims_of(results: dict) -> list[Claim]:
    """Returns the promises and goals that the results have measurements of."""
    told = []
    peers = results.get("peers", {})
    busy = peers.get("busy", False)
    for cell in peers.get("cells", []):
        _, mine = best(cell, ours=True, served=True)
        padded, its = best(cell, pads=True)
        fastest, most = best(cell, rival="")
        where = f"{cell['load']} prompts, {cell['responses']} response{'s' * (cell['responses'] > 1)}"
        of_fastest = f"{where}, of the fastest form of any other peer ({fastest})"
        if cell["responses"] == 8 and cell["load"] in OF_PADDED and not busy:
            told.append(Claim(f"{where}, of the best padded peer ({padded})", mine / its, OF_PADDED[cell["load"]]))
            told.append(Claim(of_fastest, mine / most, OF_FASTEST))
        elif cell["responses"] == 1 and not busy:
            told.append(Claim(of_fastest, mine / most, OF_FASTEST_ALONE))
        for rival in sorted({*map(rival_of, cell["forms"])} - {""}):
            form, its = best(cell, rival=rival)
            told.append(Claim(f"{where}, of {rival} ({form})", mine / its, _goal(rival, cell, peers), is_goal=True))
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


def _goal(rival: str, cell: dict, peers: dict) -> float:
    """Returns how many times as many sequences as the rival guerdon's servers should score in the cell."""
    if peers.get("busy", False):
        return 1.0
    if rival == "vLLM":
        return OF_VLLM[peers["shape"]].get((cell["load"], cell["responses"]), 1.0)
    return {1: OF_FASTEST_ALONE, 8: OF_FASTEST}.get(cell["responses"], 1.0)


def are_kept(claims: list[Claim]) -> bool:
    """Returns whether all promises hold; goals are none."""
    return all(claim.holds or claim.is_goal for claim in claims)


def verdict(claims: list[Claim]) -> str:
    """Returns one line per promise and goal, whether all promises hold, and how many goals are reached."""
    if not claims:
        return "Nothing that is promised was measured."
    promises, goals = ([c for c in claims if c.is_goal == kind] for kind in (False, True))
    broken = sum(not claim.holds for claim in promises)
    told = [f"{broken} of {len(promises)} promises NOT held." if broken else f"All {len(promises)} promises held."]
    if goals:
        told.append(f"{sum(claim.holds for claim in goals)} of {len(goals)} goals reached.")
    return "\n".join([*(f"- {claim}" for claim in [*promises, *goals]), "", " ".join(told)])
