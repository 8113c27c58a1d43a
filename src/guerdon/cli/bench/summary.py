"""What a run came to, in numbers that go into the table, the JSON file and the exit status alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from guerdon.cli.bench.counters import Work
from guerdon.cli.bench.driving import NOT_SENT, Answer

BUSY_CLIENT = 0.9
"""The share of a core from which on the client itself may be what was measured."""
_LATE_SHARE, _LATE_MS = 0.1, 10.0
"""The share of the latency from which on the client's own delay is told, and the delay below which it never is."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of answered requests, in milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles | None:
        """None of nothing."""
        if not seconds:
            return None
        return cls(*(1e3 * np.percentile(seconds, [50, 90, 99, 100])).tolist())


@dataclass(frozen=True, slots=True)
class Failure:
    """How often one kind of error ended a request, or a sample of it, and what the first said."""

    kind: str
    count: int
    first: str


@dataclass(frozen=True, slots=True)
class Check:
    """A bound that the run was given, and whether it holds."""

    name: str
    limit: float
    value: float | None
    holds: bool


@dataclass(slots=True)
class Summary:
    """One run: `seconds` until the last answer; sequences and tokens are those that have a score.

    `received_tokens` are known where the load is of token ids or the servers have counters (`work`). The times
    `queue` and `compute` are the server's own, None where it does not tell them. `client_cores` is how many cores this
    command kept busy.

    Of a load with a rate, `rate` is the one asked for and `sent_per_s` that at which this command came to send, in
    requests a second; `late` is how long after they were due it sent them, which is in the latency. None without a
    rate; `sent_per_s` also of fewer than two requests.
    """

    seconds: float
    requests: int
    answered: int
    sequences: int
    failed_sequences: int
    received_tokens: float | None
    latency: Percentiles | None
    late: Percentiles | None
    queue: Percentiles | None
    compute: Percentiles | None
    failures: list[Failure]
    weights_versions: list[str]
    work: Work | None
    client_cores: float
    rate: float | None = None
    sent_per_s: float | None = None
    checks: list[Check] = field(default_factory=list)

    @property
    def sequences_per_s(self) -> float:
        """Scored sequences a second."""
        return self.sequences / self.seconds if self.seconds else 0.0

    @property
    def is_late(self) -> bool:
        """Whether the client's own delay is so large that the latency is not the server's alone."""
        if self.late is None or self.late.p99 < _LATE_MS:
            return False
        return self.latency is None or self.late.p99 > _LATE_SHARE * self.latency.p99

    @property
    def has_failed(self) -> bool:
        """Whether a request or a sample failed, nothing was answered, or a bound does not hold."""
        return bool(self.failures) or not self.answered or not all(check.holds for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """The same as JSON has it; a number that is not known is null."""
        told = asdict(self)
        del told["rate"]  # it is one of the load
        told["sequences_per_s"] = self.sequences_per_s
        told["received_tokens_per_s"] = None if self.received_tokens is None else self.received_tokens / self.seconds
        for name in ("latency", "late", "queue", "compute"):
            told[f"{name}_ms"] = told.pop(name)
        if self.work is not None and self.work.received_tokens:
            told["work"]["computed_share"] = self.work.computed_tokens / self.work.received_tokens
        return told


def summarised(answers: Sequence[Answer], work: Work | None, client_cores: float, rate: float | None = None) -> Summary:
    """The summary of a run's answers, to requests that were sent at a rate or, without one, at places."""
    answered = [answer for answer in answers if answer.num_failed < answer.num_sequences]
    seconds = max((answer.done_s for answer in answers), default=0.0)
    # One that names no times gives zeros for both; one that does never computes in no time at all.
    tells_times = any(answer.compute_s for answer in answered)
    counts = Counter(answer.error for answer in answers if answer.error)
    firsts = {answer.error: answer.text for answer in reversed(answers)}
    own_tokens = [answer.num_tokens for answer in answered]
    received = None if None in own_tokens or not answered else float(sum(n or 0 for n in own_tokens))
    if received is None and work is not None:
        received = work.received_tokens
    sent = [] if rate is None else [answer for answer in answers if answer.error != NOT_SENT]
    return Summary(
        seconds=seconds,
        requests=len(answers),
        answered=len(answered),
        sequences=sum(answer.num_sequences - answer.num_failed for answer in answers),
        failed_sequences=sum(answer.num_failed for answer in answers),
        received_tokens=received,
        latency=Percentiles.of([answer.seconds for answer in answered]),
        late=Percentiles.of([answer.late_s for answer in sent]),
        queue=Percentiles.of([answer.queue_s for answer in answered]) if tells_times else None,
        compute=Percentiles.of([answer.compute_s for answer in answered]) if tells_times else None,
        failures=[Failure(kind, count, firsts[kind]) for kind, count in counts.most_common()],
        weights_versions=sorted({answer.weights_version for answer in answered} - {""}),
        work=work,
        client_cores=client_cores,
        rate=rate,
        sent_per_s=_rate([answer.sent_s + answer.late_s for answer in sent]),
    )


def _rate(moments: Sequence[float]) -> float | None:
    """How many a second, from the first to the last; None where that is no time."""
    took_s = max(moments, default=0.0) - min(moments, default=0.0)
    return (len(moments) - 1) / took_s if took_s else None


def bounded(summary: Summary, most_p99_ms: float | None, least_per_s: float | None) -> list[Check]:
    """The bounds that were given, and whether each holds; nothing answered holds none."""
    checks = []
    if most_p99_ms is not None:
        p99 = None if summary.latency is None else summary.latency.p99
        checks.append(Check("p99_ms", most_p99_ms, p99, p99 is not None and p99 <= most_p99_ms))
    if least_per_s is not None:
        rate = summary.sequences_per_s
        checks.append(Check("sequences_per_s", least_per_s, rate, rate >= least_per_s))
    return checks
