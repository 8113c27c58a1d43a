"""What a server notes for its page while it serves: readings of its counters, rewards, and extremes where allowed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from guerdon.config import DashboardConfig
from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.metrics import Metrics
from guerdon.server.catalog import Catalog
from guerdon.server.dashboard import traffic
from guerdon.server.dashboard.extremes import Extremes
from guerdon.server.dashboard.recent import FINE_S, Recent
from guerdon.server.dashboard.scored import Scored

_LEAST_S = 1.0


class Watch:
    """Reads the counters every FINE_S seconds between `start` and `stop`. Belongs to one asyncio loop.

    `depth` gives what waits, by model. Times are seconds since 1970, as the clock stood at the start: they never jump.
    """

    def __init__(
        self,
        config: DashboardConfig,
        metrics: Metrics,
        catalog: Catalog,
        depth: Callable[[], dict[str, tuple[int, int]]],
    ) -> None:
        self.is_on = config.dashboard
        self.scored = Scored()
        self.extremes: dict[str, Extremes] | None = {} if self.is_on and config.dashboard_samples else None
        self._metrics, self._catalog, self._depth = metrics, catalog, depth
        self._reading = traffic.Reading([info.name for info in catalog.infos()])
        self._epoch = time.time() - time.monotonic()
        self.started = self.now()
        self.recent = Recent(len(self._reading.names) * traffic.WIDTH)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def names(self) -> list[str]:
        """The models, in the order of their counters."""
        return self._reading.names

    def now(self) -> float:
        """Seconds since 1970."""
        return self._epoch + time.monotonic()

    def start(self) -> None:
        """Begins to read; on the asyncio loop, which goes on until `stop`."""
        if self.is_on:
            self._loop = asyncio.get_running_loop()
            self.started = self.now()
            self._tick(self._loop)

    def stop(self) -> None:
        """Ends the readings, from any thread."""
        self._loop = None

    def note(self, info: ModelInfo, request: ScoreRequest, reply: ScoreReply) -> None:
        """Takes the rewards of an answered request."""
        if not self.is_on or not request.wants_rewards or "rewards" not in info.outputs:
            return
        now, results, lengths = self.now(), reply.results, reply.lengths
        try:
            rewards = [r.reward for r in results]  # type: ignore[union-attr]
        except AttributeError:  # some of them are errors
            rows = [(r.reward, n) for r, n in zip(results, lengths, strict=True) if isinstance(r, Score)]
            rewards, lengths = [reward for reward, _ in rows], [length for _, length in rows]
        self.scored.note(info.name, now, rewards, lengths)
        if self.extremes is not None:
            self.extremes.setdefault(info.name, Extremes()).note(now, request, reply, info)

    def samples(self) -> list[traffic.Sample]:
        """What of the registry the page shows."""
        return list(self._metrics.sample(*traffic.METRICS))

    def refresh(self) -> list[traffic.Sample]:
        """Reads the counters where the last reading is a moment ago, and tells them."""
        now, samples = self.now(), self.samples()
        if now - self.recent.last >= _LEAST_S:
            self.recent.add(now, self._reading.read(now, samples, self._depth()))
        self.scored.fold()
        return samples

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is loop:
            loop.call_later(FINE_S, self._tick, loop)
            self.refresh()
