"""The results of a run: percentiles and counts, their table, their picture, and the servers' own counters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from guerdon.cli.console import Style, coloured
from guerdon.client.addresses import Address
from guerdon.client.http_transport import fetch
from guerdon.errors import GuerdonError
from guerdon.plots import BAND, INK, MAIN, SECOND, STYLE, name_lines, pyplot
from load_generator import NOT_SENT, Answer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)(?: -?\d+)?")
_MODEL = re.compile(r'(?:^|,)model="((?:[^"\\]|\\.)*)"')
_READ = {
    "guerdon_received_tokens_total": "received_tokens",
    "guerdon_computed_tokens_total": "computed_tokens",
    "guerdon_batch_sequences_sum": "batch_sequences",
    "guerdon_batch_sequences_count": "batches",
}

Counts = Counter[tuple[str, str]]
"""Counters by model and name."""


@dataclass(frozen=True, slots=True)
class Work:
    """What all servers did during the run, for all their clients; `model` is empty if of all models together.

    With shared prompts, fewer tokens are computed than received.
    """

    model: str
    received_tokens: float
    computed_tokens: float
    batches: float
    batch_sequences: float


def read_counters(servers: Sequence[Address]) -> Counts | None:
    """Returns the sum of all servers' counters; None if one has none or has no HTTP address."""
    total: Counts = Counter()
    for server in servers:
        if server.is_grpc:
            return None
        try:
            found = parse_counters(fetch(server, "/metrics").text)
        except GuerdonError:  # other servers of the protocol may have none
            return None
        if not found:
            return None
        total.update(found)
    return total


def parse_counters(text: str) -> Counts:
    """Parses the counters in Prometheus' text format."""
    counts: Counts = Counter()
    for line in text.splitlines():
        if (match := _LINE.fullmatch(line)) and match[1] in _READ:
            model = _MODEL.search(match[2] or "")
            counts[model[1] if model else "", _READ[match[1]]] += float(match[3])  # type: ignore[assignment]
    return counts


def work_between(before: Counts | None, after: Counts | None, model: str) -> Work | None:
    """Returns the growth of the counters; None if unknown, for example after a restart."""
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


BUSY_CLIENT = 0.9
"""Above this share of a core the client itself may be the bottleneck."""
_LATE_SHARE, _LATE_MS = 0.1, 10.0
"""The client's delay is reported above this share of the latency and this many milliseconds."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of answered requests, in milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles | None:
        if not seconds:
            return None
        return cls(*(1e3 * np.percentile(seconds, [50, 90, 99, 100])).tolist())


@dataclass(frozen=True, slots=True)
class Failure:
    """A kind of error: its count, over requests and samples, and its first message."""

    kind: str
    count: int
    first: str


@dataclass(frozen=True, slots=True)
class Check:
    """A bound given by --fail-p99-ms or --fail-below, and whether it holds."""

    name: str
    limit: float
    value: float | None
    holds: bool


@dataclass(slots=True)
class Summary:
    """The results of a run; `seconds` last until the last answer, sequences and tokens are those with a score.

    `received_tokens` are known for token ids, or from the servers' counters (`work`). `queue` and `compute` are the
    server's own times, None if it does not report them. `client_cores` is the number of cores that this client used.

    With --rate, `rate` is the requested one and `sent_per_s` the achieved one, in requests per second; `late` is the
    delay of sending, which the latency includes. All are None without a rate; `sent_per_s` also for one request.
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
        """Returns scored sequences per second."""
        return self.sequences / self.seconds if self.seconds else 0.0

    @property
    def is_late(self) -> bool:
        """Whether the client's delay is a notable part of the latency."""
        if self.late is None or self.late.p99 < _LATE_MS:
            return False
        return self.latency is None or self.late.p99 > _LATE_SHARE * self.latency.p99

    @property
    def has_failed(self) -> bool:
        """Whether a request or a sample failed, no request was answered, or a bound does not hold."""
        return bool(self.failures) or not self.answered or not all(check.holds for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Returns the results as JSON has them; unknown numbers are null."""
        results = asdict(self)
        del results["rate"]  # part of the load
        results["sequences_per_s"] = self.sequences_per_s
        results["received_tokens_per_s"] = None if self.received_tokens is None else self.received_tokens / self.seconds
        for name in ("latency", "late", "queue", "compute"):
            results[f"{name}_ms"] = results.pop(name)
        if self.work is not None and self.work.received_tokens:
            results["work"]["computed_share"] = self.work.computed_tokens / self.work.received_tokens
        return results


def summarise(answers: Sequence[Answer], work: Work | None, client_cores: float, rate: float | None = None) -> Summary:
    """Summarises a run; `rate` is None for a closed loop."""
    answered = [answer for answer in answers if answer.num_failed < answer.num_sequences]
    seconds = max((answer.done_s for answer in answers), default=0.0)
    # A server that reports no times yields zeros; a real compute time is never 0.
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
    """Returns moments per second; None if they span no time."""
    took_s = max(moments, default=0.0) - min(moments, default=0.0)
    return (len(moments) - 1) / took_s if took_s else None


def check_bounds(summary: Summary, most_p99_ms: float | None, least_per_s: float | None) -> list[Check]:
    """Checks the given bounds; none holds if nothing was answered."""
    checks = []
    if most_p99_ms is not None:
        p99 = None if summary.latency is None else summary.latency.p99
        checks.append(Check("p99_ms", most_p99_ms, p99, p99 is not None and p99 <= most_p99_ms))
    if least_per_s is not None:
        rate = summary.sequences_per_s
        checks.append(Check("sequences_per_s", least_per_s, rate, rate >= least_per_s))
    return checks


_NAMES = {"p99_ms": ("p99", "ms"), "sequences_per_s": ("sequences/s", "")}


def table(summary: Summary, heading: str, load: str, stream: TextIO) -> str:
    """Formats the summary for the stream, with colours if it shows them."""

    def styled(text: str, style: Style) -> str:
        return coloured(text, style, stream)

    lines = [styled(heading, "bold"), styled(load, "faint"), ""]
    for name, value, note in _rows(summary):
        lines.append(f"  {name:<18}{value:>13}   {styled(note, 'faint')}".rstrip())
    times = [
        ("latency", summary.latency), ("  client's delay", summary.late), ("  server's queue", summary.queue),
        ("  server's compute", summary.compute),
    ]  # fmt: skip
    lines += ["", f"  {'milliseconds':<18}" + "".join(f"{name:>13}" for name in ("p50", "p90", "p99", "max"))]
    lines += [f"  {name:<18}{_cells(found)}" for name, found in times if found is not None]
    if summary.failures:
        lines.append("")
        for failure in summary.failures:
            lines.append(f"  {styled(failure.kind, 'red')} {failure.count:,} times, first: {failure.first}")
    if summary.checks:
        lines.append("")
        for check in summary.checks:
            name, unit = _NAMES[check.name]
            value = "nothing" if check.value is None else f"{check.value:,.1f}{unit and ' ' + unit}"
            bound = f"{'at most' if check.name == 'p99_ms' else 'at least'} {check.limit:g}{unit and ' ' + unit}"
            word = styled("holds", "green") if check.holds else styled("does not hold", "red")
            lines.append(f"  {name} {bound}: {word}, is {value}")
    lines += ["", *(f"  {styled('note:', 'yellow')} {note}" for note in notes(summary))]
    return "\n".join(lines).rstrip() + "\n"


def notes(summary: Summary) -> Iterator[str]:
    """Yields caveats about the numbers."""
    if summary.is_late and summary.late is not None:
        pace = "" if summary.sent_per_s is None else f", {summary.sent_per_s:,.1f} per second"
        yield (
            f"this client could not keep up with {summary.rate:g} requests per second: it sent them up to "
            f"{summary.late.max / 1e3:,.2f} s late{pace}. The latencies include that delay of the client; lower the "
            "rate, or run several clients on other machines"
        )
    if summary.client_cores > BUSY_CLIENT:
        yield (
            f"this client itself used {summary.client_cores:.2f} cores: the server may be faster than the client; run "
            "several clients, or larger requests"
        )
    if len(summary.weights_versions) > 1:
        versions = ", ".join(summary.weights_versions)
        yield f"the answers come from {len(summary.weights_versions)} versions of the weights: {versions}"
    if summary.work is not None and not summary.work.model:
        yield "the server's token counts are those of all its models"


def _rows(summary: Summary) -> Iterator[tuple[str, str, str]]:
    """Yields name, value and remark."""
    failed = summary.requests - summary.answered
    yield "requests", f"{summary.requests:,}", f"{failed:,} failed" if failed else f"in {summary.seconds:.1f} s"
    if summary.sent_per_s is not None:
        yield "sent/s", f"{summary.sent_per_s:,.1f}", f"requests; {summary.rate:,g} requested"
    yield "sequences", f"{summary.sequences:,}", f"{summary.failed_sequences:,} failed" * bool(summary.failed_sequences)
    yield "sequences/s", f"{summary.sequences_per_s:,.1f}", ""
    if summary.received_tokens is not None and summary.seconds and summary.sequences:
        per_s, each = summary.received_tokens / summary.seconds, summary.received_tokens / summary.sequences
        yield "tokens/s", f"{per_s:,.0f}", f"{each:,.0f} per sequence"
    if (work := summary.work) is not None:
        yield "received tokens", f"{work.received_tokens:,.0f}", "counted by the server, for all its clients"
        share = 100 * work.computed_tokens / work.received_tokens if work.received_tokens else 0
        yield "computed tokens", f"{work.computed_tokens:,.0f}", f"{share:.0f}% of received"
        if work.batches:
            yield "batches", f"{work.batches:,.0f}", f"{work.batch_sequences / work.batches:.1f} sequences each"


def _cells(times: Percentiles | None) -> str:
    return "" if times is None else "".join(f"{ms:>13,.1f}" for ms in (times.p50, times.p90, times.p99, times.max))


LATE, FAILED = "#e09f3e", SECOND


def plot(answers: Sequence[Answer], summary: Summary, path: Path, heading: str, load: str) -> None:
    """Writes a PNG of latency and throughput."""
    plt = pyplot()
    with plt.rc_context(STYLE | {"axes.titlepad": 28}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), gridspec_kw={"width_ratios": [1, 1.35]})
        figure.subplots_adjust(left=0.06, right=0.98, bottom=0.12, top=0.73, wspace=0.17)
        figure.text(0.012, 0.935, heading, fontsize=13, fontweight="bold")
        figure.text(0.012, 0.885, load, fontsize=9.5, color="#5c677d")
        _draw_latency(left, answers, summary.latency)
        _draw_throughput(right, answers, summary)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _draw_latency(axes: Axes, answers: Sequence[Answer], latency: Percentiles | None) -> None:
    """Draws a histogram of latencies on a logarithmic axis, with percentiles."""
    times = np.array([1e3 * answer.seconds for answer in answers if answer.num_failed < answer.num_sequences])
    axes.set(title="Request latency", xlabel="milliseconds", ylabel="requests")
    if latency is None or not len(times):
        axes.text(0.5, 0.5, "no request was answered", ha="center", va="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return
    low, high = max(times.min(), 1e-3), max(times.max(), times.min() * 1.5, 2e-3)
    bins = np.geomspace(low * 0.97, high * 1.03, int(np.clip(np.sqrt(len(times)) * 2, 10, 48)))
    counts, _, _ = axes.hist(times, bins=bins.tolist(), color=BAND, edgecolor=MAIN, linewidth=0.8)
    axes.set_xscale("log")
    _tick_plainly(axes, bins[0], bins[-1])
    axes.set_ylim(0, 1.08 * float(np.max(counts)))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    for name, colour in (("p50", MAIN), ("p90", LATE), ("p99", FAILED)):
        ms = getattr(latency, name)
        axes.axvline(ms, color=colour, lw=1.6, label=f"{name}  {_readable(ms)}")
    name_lines(axes)


def _draw_throughput(axes: Axes, answers: Sequence[Answer], summary: Summary) -> None:
    """Draws sequences per second over time, with failed ones on top, and the mean."""
    axes.set(title="Throughput", xlabel="seconds since the first request", ylabel="sequences per second")
    if not answers or not summary.seconds:
        return
    # Fewer answers than bins would draw gaps where there are none.
    num_bins = int(np.clip(len(answers) / 8, 1, 60))
    edges = np.linspace(0, summary.seconds, num_bins + 1)
    width = edges[1]
    done = [min(answer.done_s, summary.seconds) for answer in answers]
    scored = [answer.num_sequences - answer.num_failed for answer in answers]
    failed = [answer.num_failed for answer in answers]
    rate, lost = (np.histogram(done, edges.tolist(), weights=n)[0] / width for n in (scored, failed))
    axes.stairs(rate, edges, fill=True, color=BAND)
    axes.stairs(rate, edges, color=MAIN, lw=1.6, label="scored")
    if any(failed):
        axes.stairs(rate + lost, edges, baseline=rate, fill=True, color=FAILED, alpha=0.75, label="failed")
    mean = summary.sequences_per_s
    axes.axhline(mean, color=INK, lw=1, ls=(0, (4, 3)), label=f"mean {mean:,.1f}")
    axes.set_ylim(0, 1.08 * float(np.max(rate + lost)) or 1)
    axes.set_xlim(0, summary.seconds)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    name_lines(axes)


def _tick_plainly(axes: Axes, low: float, high: float) -> None:
    """Sets a few plain tick labels: a logarithmic axis shorter than a decade has hardly any by default."""
    from matplotlib.ticker import NullFormatter, NullLocator

    marks = [m * 10.0**e for e in range(-4, 8) for m in (1, 1.5, 2, 3, 5, 7) if low <= m * 10.0**e <= high]
    if len(marks) < 2:
        marks = [low, (low * high) ** 0.5, high]
    step = -(-len(marks) // 6)
    marks = marks[::step]
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(marks, [f"{mark:,.3g}" if mark < 1000 else f"{mark:,.0f}" for mark in marks])


def _readable(ms: float) -> str:
    return f"{ms / 1e3:,.1f} s" if ms >= 10_000 else f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
