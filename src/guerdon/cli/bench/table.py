"""A run's summary as a table for whoever reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from guerdon.cli.bench.summary import BUSY_CLIENT, Percentiles, Summary
from guerdon.cli.colours import Style, coloured

_NAMES = {"p99_ms": ("p99", "ms"), "sequences_per_s": ("sequences/s", "")}


def written(summary: Summary, heading: str, load: str, stream: TextIO) -> str:
    """The table, as it is to be written to the stream."""

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
            lines.append(f"  {styled(failure.kind, 'red')} {failure.count:,} times, the first: {failure.first}")
    if summary.checks:
        lines.append("")
        for check in summary.checks:
            name, unit = _NAMES[check.name]
            value = "nothing" if check.value is None else f"{check.value:,.1f}{unit and ' ' + unit}"
            bound = f"{'at most' if check.name == 'p99_ms' else 'at least'} {check.limit:g}{unit and ' ' + unit}"
            word = styled("holds", "green") if check.holds else styled("does not hold", "red")
            lines.append(f"  {name} {bound}: {word}, it is {value}")
    lines += ["", *(f"  {styled('note:', 'yellow')} {note}" for note in notes(summary))]
    return "\n".join(lines).rstrip() + "\n"


def notes(summary: Summary) -> Iterator[str]:
    """What a reader of the numbers should know."""
    if summary.is_late and summary.late is not None:
        pace = "" if summary.sent_per_s is None else f", {summary.sent_per_s:,.1f} a second"
        yield (
            f"this command could not keep up with {summary.rate:g} requests a second: it sent them up to "
            f"{summary.late.max / 1e3:,.2f} s after they were due{pace}. That delay is the client's, and is in the "
            "latencies; ask for less, or run several at once on other machines"
        )
    if summary.client_cores > BUSY_CLIENT:
        yield (
            f"this command kept {summary.client_cores:.2f} cores busy itself: the server may be faster than it could "
            "ask; run several, or larger requests"
        )
    if len(summary.weights_versions) > 1:
        yield f"the answers are of {len(summary.weights_versions)} weights: {', '.join(summary.weights_versions)}"
    if summary.work is not None and not summary.work.model:
        yield "the server's tokens are those of all its models"


def _rows(summary: Summary) -> Iterator[tuple[str, str, str]]:
    """Name, value and remark."""
    failed = summary.requests - summary.answered
    yield "requests", f"{summary.requests:,}", f"{failed:,} failed" if failed else f"in {summary.seconds:.1f} s"
    if summary.sent_per_s is not None:
        yield "sent/s", f"{summary.sent_per_s:,.1f}", f"requests; {summary.rate:,g} were asked for"
    yield "sequences", f"{summary.sequences:,}", f"{summary.failed_sequences:,} failed" * bool(summary.failed_sequences)
    yield "sequences/s", f"{summary.sequences_per_s:,.1f}", ""
    if summary.received_tokens is not None and summary.seconds and summary.sequences:
        per_s, each = summary.received_tokens / summary.seconds, summary.received_tokens / summary.sequences
        yield "tokens/s", f"{per_s:,.0f}", f"{each:,.0f} a sequence"
    if (work := summary.work) is not None:
        yield "received tokens", f"{work.received_tokens:,.0f}", "as the server counts them, all its clients' together"
        share = 100 * work.computed_tokens / work.received_tokens if work.received_tokens else 0
        yield "computed tokens", f"{work.computed_tokens:,.0f}", f"{share:.0f}% of those received"
        if work.batches:
            yield "batches", f"{work.batches:,.0f}", f"{work.batch_sequences / work.batches:.1f} sequences each"


def _cells(times: Percentiles | None) -> str:
    return "" if times is None else "".join(f"{ms:>13,.1f}" for ms in (times.p50, times.p90, times.p99, times.max))
