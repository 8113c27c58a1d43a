"""Collects the page's data: counters, rewards and, if allowed, extreme samples."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.kinds import all_kinds
from guerdon.server import logs
from guerdon.server.catalog import Catalog
from guerdon.server.metrics import Metrics
from guerdon.server.page import traffic
from guerdon.server.page.extremes import ExtremeSamples
from guerdon.server.page.history import ComponentHistory, RewardHistory
from guerdon.server.page.traffic import FINE_S, CounterHistory, RecentErrors
from guerdon.settings.config import DashboardConfig
from guerdon.wire import schema

log = logging.getLogger(__name__)

_LEAST_S = 1.0
_AT_ONCE = 4096
"""Rewards folded at once, which blocks the loop for about 2 ms."""

_MOST_BYTES = 512 << 20
"""Memory limit for the best and worst samples of all models."""


class PageRecorder:
    """Reads the counters every FINE_S seconds between `start` and `stop`. Belongs to one asyncio loop.

    `depth` returns waiting sequences and tokens by model. Times are monotonic, offset to Unix time at the start, so
    they never jump.
    """

    def __init__(
        self,
        config: DashboardConfig,
        metrics: Metrics,
        catalog: Catalog,
        depth: Callable[[], dict[str, tuple[int, int]]],
    ) -> None:
        self.is_on = config.dashboard
        self.rewards = RewardHistory()
        self.components = ComponentHistory()
        self.entropies = ComponentHistory()
        self.errors = RecentErrors()
        self.extremes: dict[str, ExtremeSamples] | None = {} if self.is_on and config.dashboard_samples else None
        self._metrics, self._catalog, self._depth = metrics, catalog, depth
        self._reading = traffic.CounterReader([info.name for info in catalog.infos()])
        self.epoch = time.time() - time.monotonic()
        """Unix time of the monotonic clock's zero."""
        self.started = self.now()
        self.counters = CounterHistory(len(self._reading.names) * traffic.WIDTH)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_folding = self._has_failed = False

    @property
    def names(self) -> list[str]:
        """Returns the models in the order of their counters."""
        return self._reading.names

    def now(self) -> float:
        """Returns the Unix time."""
        return self.epoch + time.monotonic()

    def start(self) -> None:
        """Starts the readings on the current loop."""
        if self.is_on:
            self._loop = asyncio.get_running_loop()
            self.started = self.now()
            self._tick(self._loop)

    def stop(self) -> None:
        """Stops the readings; from any thread."""
        self._loop = None

    def note(self, info: ModelInfo, request: ScoreRequest, reply: ScoreReply, lengths: list[int] | None = None) -> None:
        """Notes the rewards or log-probs of an answered request; `lengths` in tokens override the reply's.

        Never fails the request: logs the first error.
        """
        if not self.is_on:
            return
        try:
            self._note(info, request, reply, reply.lengths if lengths is None else lengths)
        except Exception as e:
            if not self._has_failed:
                self._has_failed = True
                logs.failure(log, logging.ERROR, "the page lacks rewards of %s", info.name, error=e)

    def _note(self, info: ModelInfo, request: ScoreRequest, reply: ScoreReply, lengths: list[int]) -> None:
        now, all_lengths = self.now(), lengths
        scores: list[Score] = reply.results  # type: ignore[assignment]
        try:
            rewards = [r.reward for r in scores]
        except AttributeError:  # some of them are errors
            self.errors.note(info.name, now, scores)
            rows = [(r, n) for r, n in zip(scores, lengths, strict=True) if isinstance(r, Score)]
            scores, lengths = [score for score, _ in rows], [length for _, length in rows]
            rewards = [score.reward for score in scores]
        for history, what, numbers in all_kinds.of(info).histories(scores):
            getattr(self, history).note_means(info.name, now, what, numbers)
        if not request.wants_rewards or not schema.REWARDS.has(info):
            return
        parts = [(r.attributes, r.reward) for r in scores if r.attributes is not None]
        if schema.ATTRIBUTES.has(info) and parts:
            names = info.names_of(len(parts[0][0]))
            shown = [row[: len(names)] for row, _ in parts]  # names of a sample's own are too many to follow
            self.components.note(info.name, now, names, shown, [reward for _, reward in parts])
        self.rewards.note(info.name, now, rewards, lengths)
        self.rewards.served(info.name, now, reply.weights_version)
        if self._loop is not None and self.rewards.num_pending > _AT_ONCE and not self._is_folding:
            self._is_folding = True
            self._loop.call_soon(self._fold)
        if self.extremes is not None:
            if info.name not in self.extremes:
                self.extremes[info.name] = ExtremeSamples(_MOST_BYTES // len(self.names))
            self.extremes[info.name].note(now, request, reply, info, all_lengths)

    def samples(self) -> list[traffic.Sample]:
        """Reads the page's metrics from the registry; on any thread."""
        return list(self._metrics.sample(*traffic.METRICS))

    def refresh(self, samples: list[traffic.Sample]) -> None:
        """Adds a reading if the last one is old enough, and folds noted rewards."""
        now = self.now()
        if now - self.counters.last >= _LEAST_S:
            self.counters.add(now, self._reading.read(now, samples, self._depth()))
        self.errors.read(now, samples)
        for history in (self.rewards, self.components, self.entropies):
            history.fold()

    def _fold(self) -> None:
        """Folds some noted rewards and schedules the rest, so that requests go on in between."""
        for history in (self.rewards, self.components, self.entropies):
            history.fold(_AT_ONCE)
        self._is_folding = self._loop is not None and self.rewards.num_pending > 0
        if self._is_folding:
            assert self._loop is not None
            self._loop.call_soon(self._fold)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is loop:
            loop.call_later(FINE_S, self._tick, loop)
            self.refresh(self.samples())
