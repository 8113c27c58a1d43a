"""Runs the rounds of bench.py: every available form scores the same cells, in turn."""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

import load
from forms import FORMS, PADDED_TO_MAXIMUM, Form
from in_process import ENGINE, IN_PROCESS, ONE_BY_ONE, InProcess, Worker
from neighbour import neighbour
from servers import Server, is_here
from workload import Cell, Group

MARGIN = 1.4
"""A form that is this many times slower than the best of its kind in the first round is not measured again."""


class PeerFailed(Exception):
    """A peer did not answer with scores; it is skipped from then on, and named."""


@dataclass(frozen=True)
class Entrant:
    """A form with its running process; `run` returns seconds, scores by sequence number, and latencies."""

    name: str
    pads: bool
    is_ours: bool
    run: Callable[[list[Group]], tuple[float, dict[int, float], list[float]]]
    by_prompt: bool = False


def measure(
    cells: list[Cell], names: list[str], environments: Path, folder: Path, *, rounds: int, end: float, busy: bool
) -> dict:
    """Measures the named forms over all cells, `rounds` times or until another round would end after `end`.

    If `busy`, a process that never waits runs beside each form. Forms that do not start, or fail, are skipped from then
    on and listed under "missing".
    """
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        entrants = _entrants([f for f in FORMS if f.name in names], environments, folder, missing, stack)
        entrants += _workers([f for f in IN_PROCESS if f.name in names], environments, folder, missing, stack)
        found = [_about(cell) for cell in cells]
        scores: list[dict[str, dict[int, float]]] = [defaultdict(dict) for _ in cells]
        for number in range(rounds):
            began = time.monotonic()
            for cell, row, told in zip(cells, found, scores, strict=True):
                there = [e for e in entrants if takes_part(e, cell.responses, row["forms"])]
                turn = number % len(there)
                bar = tqdm(there[turn:] + there[:turn], file=sys.stderr, leave=False)
                bar.set_description(f"round {number + 1}: {cell.load}, {cell.responses} responses")
                for entrant in bar:
                    try:
                        with neighbour() if busy else nullcontext():
                            seconds, got, latencies = entrant.run(cell.groups)
                    except PeerFailed as e:
                        missing[entrant.name] = f"{cell.load}, {cell.responses} responses: {e}"
                        entrants.remove(entrant)
                        continue
                    told[entrant.name] |= got
                    _add(row["forms"], entrant, len(got), seconds, latencies)
            if time.monotonic() + (time.monotonic() - began) * (0.7 if number == 0 else 1.0) > end:
                break
    for row, told in zip(found, scores, strict=True):
        _compare(row["forms"], told)
    return {"cells": found, "missing": missing}


def takes_part(entrant: Entrant, responses: int, found: dict[str, dict]) -> bool:
    """Returns whether the next round measures a form in this cell, judged by the earlier rounds.

    With one response, one request per prompt is one request per sequence, and is measured once. The reference,
    transformers one by one, is measured in every round.
    """
    if responses == 1 and entrant.by_prompt:
        return False
    if entrant.is_ours or entrant.name == ONE_BY_ONE.name or entrant.name not in found:
        return True
    rates = {name: statistics.median(row["seq_s"]) for name, row in found.items() if not row["ours"]}
    kind = [rate for name, rate in rates.items() if found[name]["pads"] or not entrant.pads]
    return rates[entrant.name] * MARGIN >= max(kind)


def _entrants(
    forms: list[Form], environments: Path, folder: Path, missing: dict[str, str], stack: ExitStack
) -> list[Entrant]:
    """Starts the forms' servers together, warms them up, and stops them with SIGSTOP."""
    missing |= {f.name: "no environment" for f in forms if not is_here(f.server, environments)}
    forms = [f for f in forms if f.name not in missing]
    servers: dict[str, Server] = {}
    for form in forms:
        if form.server not in servers:
            servers[form.server] = Server(form.server, environments, folder, null=False)
            stack.callback(servers[form.server].stop)
    ready = []
    warm = np.arange(3, 515)
    for form in tqdm(forms, desc="starting the servers", file=sys.stderr, leave=False):
        try:
            servers[form.server].resume()
            servers[form.server].wait(form.write([warm[:32]], ["a few words"]))
            load.run(servers[form.server].port, [form.write([warm] * 4, ["a few words " * 99] * 4)], 1, count=2)
            servers[form.server].pause()
        except RuntimeError as e:
            missing[form.name] = str(e)
            servers[form.server].stop()
            continue
        ready.append(form)
    return [_served(form, servers[form.server]) for form in ready]


def _served(form: Form, server: Server) -> Entrant:
    def run(groups: list[Group]) -> tuple[float, dict[int, float], list[float]]:
        asked = list(form.requests(groups))
        server.resume()
        server.forget()
        result = load.run(server.port, [body for body, _ in asked], form.in_flight, count=len(asked))
        server.pause()
        wrong = [(a.status, a.body[:200]) for a in result.answers if a.status != 200]
        wrong += [(0, b"no answer")] * (len(asked) - len(result.answers))
        if wrong:
            kind = RuntimeError if form.server == "guerdon" else PeerFailed
            raise kind(f"{len(wrong)} of {len(asked)} requests failed, the first: {wrong[0]}")
        scores = {n: s for a in result.answers for n, s in zip(asked[a.index][1], form.read(a), strict=True)}
        return result.seconds, scores, [a.seconds for a in result.answers]

    by_prompt = form.by_prompt and form.name != PADDED_TO_MAXIMUM
    return Entrant(form.name, form.pads, form.server == "guerdon", run, by_prompt)


def _workers(
    forms: list[InProcess], environments: Path, folder: Path, missing: dict[str, str], stack: ExitStack
) -> list[Entrant]:
    """Starts a process for each library, one after another."""
    missing |= {f.name: "no environment" for f in forms if not f.python(environments).exists()}
    forms = [f for f in forms if f.name not in missing]
    pythons = {form.library: form.python(environments) for form in forms}
    workers: dict[str, Worker] = {}
    for library in tqdm(pythons, desc="loading the model in process", file=sys.stderr, leave=False):
        try:
            workers[library] = Worker(pythons[library], library, folder)
        except RuntimeError as e:
            missing |= {f.name: str(e) for f in forms if f.library == library}
            continue
        stack.callback(workers[library].stop)
    return [_scored(form, workers[form.library]) for form in forms if form.library in workers]


def _scored(form: InProcess, worker: Worker) -> Entrant:
    def run(groups: list[Group]) -> tuple[float, dict[int, float], list[float]]:
        try:
            seconds, scores = worker.run(form.way, groups)
        except RuntimeError as e:
            raise PeerFailed(str(e)) from e
        numbers = [g.first + i for g in groups for i in range(len(g.rows))]
        return seconds, dict(zip(numbers, scores, strict=True)), []

    return Entrant(form.name, form.pads, form == ENGINE, run)


def _about(cell: Cell) -> dict:
    rows = cell.rows
    groups = cell.groups
    return {
        "load": cell.load,
        "responses": cell.responses,
        "prompts": len(groups),
        "sequences": len(rows),
        "tokens": sum(map(len, rows)),
        "prompt_tokens": int(statistics.median(group.prompt_tokens for group in groups)),
        "median_tokens": int(statistics.median(map(len, rows))),
        "forms": {},
    }


def _add(forms: dict, entrant: Entrant, num_sequences: int, seconds: float, latencies: list[float]) -> None:
    row = forms.setdefault(
        entrant.name,
        {"pads": entrant.pads, "ours": entrant.is_ours, "seq_s": [], "seconds": [], "p50_ms": [], "p99_ms": []},
    )
    row["seq_s"].append(num_sequences / seconds)
    row["seconds"].append(seconds)
    if latencies:
        row["p50_ms"].append(1e3 * float(np.percentile(latencies, 50)))
        row["p99_ms"].append(1e3 * float(np.percentile(latencies, 99)))


def _compare(forms: dict, scores: dict[str, dict[int, float]]) -> None:
    """Adds the largest difference from transformers, one sequence at a time, over the sequences both scored."""
    reference = scores.get(ONE_BY_ONE.name, {})
    for name, row in forms.items():
        both = scores[name].keys() & reference.keys()
        if both and name != ONE_BY_ONE.name:
            row["max_diff"] = max(abs(scores[name][n] - reference[n]) for n in both)
