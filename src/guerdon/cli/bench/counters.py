"""What servers count themselves, read from their /metrics before and after."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from guerdon.client.addresses import Address
from guerdon.client.plain import ask
from guerdon.errors import GuerdonError

_LINE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)(?: -?\d+)?")
_MODEL = re.compile(r'(?:^|,)model="((?:[^"\\]|\\.)*)"')
_READ = {
    "guerdon_received_tokens_total": "received_tokens",
    "guerdon_computed_tokens_total": "computed_tokens",
    "guerdon_batch_sequences_sum": "batch_sequences",
    "guerdon_batch_sequences_count": "batches",
}

Counts = Counter[tuple[str, str]]
"""By model and by what is counted."""


@dataclass(frozen=True, slots=True)
class Work:
    """What all servers together have done in the time between, whoever asked them; of one model, or (`model` empty)
    of all.

    Where prompts are shared, fewer tokens are computed than received.
    """

    model: str
    received_tokens: float
    computed_tokens: float
    batches: float
    batch_sequences: float


def read(servers: Sequence[Address]) -> Counts | None:
    """All servers' counters together; None where one has none, or is not to be asked over HTTP."""
    total: Counts = Counter()
    for server in servers:
        if server.is_grpc:
            return None
        try:
            found = parsed(ask(server, "/metrics").text)
        except GuerdonError:  # servers of the protocol need not have any
            return None
        if not found:
            return None
        total.update(found)
    return total


def parsed(text: str) -> Counts:
    """The counters of interest in Prometheus' text format."""
    counts: Counts = Counter()
    for line in text.splitlines():
        if (match := _LINE.fullmatch(line)) and match[1] in _READ:
            model = _MODEL.search(match[2] or "")
            counts[model[1] if model else "", _READ[match[1]]] += float(match[3])  # type: ignore[assignment]
    return counts


def work(before: Counts | None, after: Counts | None, model: str) -> Work | None:
    """What was done between; None where it is not known, as where a server was started again."""
    if before is None or after is None:
        return None
    grown = {key: after[key] - before[key] for key in after}
    if any(count < 0 for count in grown.values()) or not before.keys() <= after.keys():
        return None

    def of(what: str, models: set[str]) -> float:
        return float(sum(count for (name, kind), count in grown.items() if kind == what and name in models))

    # A sum of models computes nothing itself.
    is_itself = of("computed_tokens", {model}) > 0
    models = {model} if is_itself else {name for name, _ in grown}
    done = {what: of(what, models) for what in _READ.values()}
    return Work(model if is_itself else "", **done) if done["computed_tokens"] else None
