"""The ledger of a soak: what every client sent and got, compared with the server's counts.

A client writes a line before it sends a request, and another when it has the answer; a killed client's lines stay. A
request without an answer is in doubt: the client died, or cut the connection, and the server may have handled it.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

UNKNOWN = "unknown"
PARTS = {"total": ("helpful", "length")}
"""The components of each sum, whose sequences are counted with it."""


class Ledger:
    """A client's file. Every line reaches the kernel before the call returns, so SIGKILL loses none."""

    def __init__(self, path: Path) -> None:
        self.open: set[str] = set()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._seen: dict[tuple[str, str], str] = {}

    def sent(self, name: str, model: str, num_sequences: int = 0) -> None:
        """Records that the request of that id is about to be sent to the model."""
        self.open.add(name)
        self._write("sent", name, model, num_sequences)

    def done(self, name: str, outcome: str, ok: int = 0, failed: int = 0) -> None:
        """Records an answer: `ok` or the error's class, and how many sequences were scored and failed."""
        self.open.discard(name)
        self._write("done", name, outcome, ok, failed)

    def doubt(self, name: str) -> None:
        """Records that its answer will not be read."""
        self.open.discard(name)

    def wrong(self, name: str, text: str) -> None:
        """Records something that must not happen."""
        self._write("wrong", name, text.replace("\n", " ")[:500])

    def seen(self, model: str, version: str, variant: str) -> None:
        """Records that an answer of that version had the scores of the variant."""
        if self._seen.get((model, version)) != variant:
            self._seen[model, version] = variant
            self._write("seen", model, version, variant)

    def trains(self, number: int) -> None:
        """Records that the train request of that number is about to be sent, for the first time or again."""
        self._write("trains", number)

    def trained(self, number: int, num_steps: int, step: int) -> None:
        """Records that it is acknowledged: its steps, and all steps."""
        self._write("trained", number, num_steps, step)

    def note(self, what: str) -> None:
        """Counts a fault that was made."""
        self._write("note", what)

    def _write(self, *words: object) -> None:
        os.write(self._file, ("\t".join(map(str, words)) + "\n").encode())


@dataclass
class Account:
    """The sum of all ledgers. Counts are by model."""

    num_sent: int = 0
    known: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    doubts: Counter[str] = field(default_factory=Counter)
    sequences: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Sequences `ok` and `failed`, and in `doubt`."""
    versions: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    begun: set[int] = field(default_factory=set)
    trained: dict[int, int] = field(default_factory=dict)
    """Steps of each train request that was acknowledged, by its number; `begun` are those that were sent."""
    notes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def account(lines: Iterable[str]) -> Account:
    """Returns the sum of the lines; ids are unique over all clients, and a truncated line is skipped."""
    made = Account()
    asked: dict[str, tuple[str, int]] = {}
    answered: set[str] = set()
    for line in lines:
        kind, *words = line.rstrip("\n").split("\t")
        if not line.endswith("\n"):
            continue
        if kind == "sent":
            name, model, count = words
            if name in asked or name in answered:
                made.wrong.append(f"{name}: sent twice")
            asked[name] = (model, int(count))
            made.num_sent += 1
        elif kind == "done":
            name, outcome, ok, failed = words
            if name not in asked:
                made.wrong.append(f"{name}: answered {'twice' if name in answered else 'and never sent'}")
                continue
            answered.add(name)
            model, count = asked.pop(name)
            made.known[model][outcome] += 1
            _count(made, model, int(ok), int(failed), count - int(ok) - int(failed))
        elif kind == "seen":
            made.versions[words[0], words[1]].add(words[2])
        elif kind == "trains":
            made.begun.add(int(words[0]))
        elif kind == "trained":
            if int(words[0]) in made.trained:
                made.wrong.append(f"train {words[0]}: acknowledged twice")
            made.trained[int(words[0])] = int(words[1])
        elif kind == "note":
            made.notes[words[0]] += 1
        else:
            made.wrong.append(": ".join(words))
    for model, count in asked.values():
        made.doubts[model] += 1
        _count(made, model, 0, 0, count)
    return made


def _count(made: Account, model: str, ok: int, failed: int, doubt: int) -> None:
    for part in (model, *PARTS.get(model, ())):
        made.sequences[part].update(ok=ok, failed=failed, doubt=doubt)


def counters(text: str, name: str, *labels: str) -> Counter[tuple[str, ...]]:
    """Returns the samples of one metric in Prometheus' text, by its label values."""
    found: Counter[tuple[str, ...]] = Counter()
    for line in text.splitlines():
        match = re.match(rf"{name}(?:\{{(.*)\}})? (\S+)$", line)
        if match:
            values = dict(re.findall(r'(\w+)="([^"]*)"', match[1] or ""))
            found[tuple(values.get(label, "") for label in labels)] += float(match[2])  # type: ignore[assignment]
    return found


def compare(made: Account, metrics: str) -> list[str]:
    """Returns the disagreements of the clients and the server's counters: none if each request was answered once.

    Of each model and outcome the server counts at least what clients were answered, and no more than that and what is
    in doubt.
    """
    wrong = list(made.wrong)
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for (model, outcome), count in counters(metrics, "guerdon_requests_total", "model", "outcome").items():
        counted[model][outcome] += int(count)
    # A gRPC call that is cancelled before its message was read is one to a model that nobody knows.
    doubts = made.doubts | Counter({UNKNOWN: sum(made.doubts.values())})
    for model in sorted(made.known.keys() | doubts.keys() | counted.keys()):
        wrong += _between(f"requests to {model}", made.known[model], counted[model], doubts[model])
    known, all_counted = (sum(map(Counter.total, each.values())) for each in (made.known, counted))
    if all_counted - known > sum(made.doubts.values()):
        wrong.append(f"the server has counted {all_counted} requests, of {made.num_sent} that were sent")
    tally: dict[str, Counter[str]] = defaultdict(Counter)
    for (model, outcome), count in counters(metrics, "guerdon_sequences_total", "model", "outcome").items():
        tally[model][outcome] += int(count)
    for model, sequences in sorted(made.sequences.items()):
        known = Counter({outcome: sequences[outcome] for outcome in ("ok", "failed")})
        if sum(sequences.values()):
            wrong += _between(f"sequences of {model}", known, tally[model], sequences["doubt"])
    for (model, version), variants in sorted(made.versions.items()):
        if len(variants) > 1:
            wrong.append(f"{model}'s version {version} had the scores of {' and of '.join(sorted(variants))}")
    return wrong


def compare_trains(made: Account, metrics: str, step: int) -> list[str]:
    """Returns which train requests were lost or applied twice; `step` is the critic's own."""
    wrong = []
    if made.begun != made.trained.keys():
        wrong.append(f"trains that were never acknowledged: {sorted(made.begun - made.trained.keys())[:10]}")
    applied = counters(metrics, "guerdon_train_requests_total", "outcome")["ok",]
    done = counters(metrics, "guerdon_train_steps_total", "outcome")["done",]
    if applied != len(made.trained):
        wrong.append(f"{len(made.trained)} trains are acknowledged, and {applied:.0f} were applied")
    if not sum(made.trained.values()) == step == done:
        wrong.append(f"the trains have {sum(made.trained.values())} steps, the critic {step}, its metrics {done:.0f}")
    return wrong


def _between(what: str, known: Counter[str], counted: Counter[str], doubt: int) -> list[str]:
    wrong = [
        f"{what}: {outcome}: the clients have {known[outcome]}, the server has counted {counted[outcome]}"
        for outcome in sorted(known)
        if counted[outcome] < known[outcome]
    ]
    more = sum(counted.values()) - sum(known.values())
    if not 0 <= more <= doubt:
        wrong.append(f"{what}: the server has counted {more} more than the clients know, and {doubt} are in doubt")
    return wrong
