"""The progress of a run, shown on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from guerdon.cli.bench.driving import Answer, Extent


class Bar:
    """The progress bar: of requests where their number is known, else of seconds; none without a terminal."""

    def __init__(self, extent: Extent, hidden: bool) -> None:
        self._of_requests = extent.requests is not None
        self._num_scored = self._num_failed = 0
        total = extent.requests if self._of_requests else extent.seconds
        bar = "{l_bar}{bar}| " + ("{n_fmt}/{total_fmt} requests" if self._of_requests else "{n:.0f}/{total:.0f} s")
        # None: hidden where stderr is no terminal.
        self._bar: Any = tqdm(total=total, disable=True if hidden else None, bar_format=bar + "{postfix}", leave=False)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def also(self, keep: Callable[[Answer], None]) -> Callable[[Answer], None]:
        """What is told of every answer: it is kept, and shown."""

        def told(answer: Answer) -> None:
            keep(answer)
            if not self._bar.disable:
                self._show(answer)

        return told

    def _show(self, answer: Answer) -> None:
        self._num_scored += answer.num_sequences - answer.num_failed
        self._num_failed += answer.num_failed
        failed = f", {self._num_failed:,} failed" if self._num_failed else ""
        rate = self._num_scored / max(answer.done_s, 1e-9)
        self._bar.set_postfix_str(f"{rate:,.1f} sequences/s{failed}", refresh=False)
        self._bar.update(1 if self._of_requests else max(0.0, min(answer.done_s, self._bar.total) - self._bar.n))
