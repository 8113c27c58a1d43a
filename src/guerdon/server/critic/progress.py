"""How a critic learns, for whoever looks at it meanwhile: what it is now, and what its last train requests measured."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from guerdon.core import CriticState, TrainReport
from guerdon.server.metrics import Metrics

MOST_POINTS = 2000

MEASURES = ("loss", "explained_variance", "clip_fraction", "grad_norm", "learning_rate")


class Progress:
    """Shows one critic's state in its metrics, and keeps that and the last MOST_POINTS reports; from any thread."""

    def __init__(self, name: str, metrics: Metrics) -> None:
        self.state: CriticState | None = None
        self._name, self._metrics = name, metrics
        self._points: deque[tuple[float, ...]] = deque(maxlen=MOST_POINTS)

    def done(self, report: TrainReport) -> None:
        """Counts a train request that was done, and keeps what it measured."""
        self._metrics.add("guerdon_train_tokens", report.num_tokens, self._name)
        self._metrics.add("guerdon_train_steps", report.num_steps, self._name, "done")
        self._metrics.add("guerdon_train_steps", report.num_skipped, self._name, "skipped")
        self._points.append((report.step, time.monotonic(), *(getattr(report, name) for name in MEASURES)))

    def show(self, state: CriticState, measured: Mapping[str, float], has_fault: bool) -> None:
        """Takes over what the critic is now, and what it measured last."""
        self.state = state
        shown = {"step": state.step, "unsaved": state.num_unsaved, "offloaded": state.is_offloaded, "fault": has_fault}
        for name, value in {**measured, **shown}.items():
            self._metrics.set(f"guerdon_critic_{name}", value, self._name)

    def reports(self, epoch: float) -> dict[str, list[float]]:
        """Of each kept report its step, the time when it was done and its MEASURES, by name.

        Times are seconds after `epoch`, which is when the monotonic clock began.
        """
        points = [(step, epoch + at, *measured) for step, at, *measured in self._points.copy()]
        columns = zip(*points, strict=True) if points else [()] * (2 + len(MEASURES))
        return {name: list(column) for name, column in zip(("step", "time", *MEASURES), columns, strict=True)}
