"""How fast a model's batches are, and whether what waits can be done in time. Pure: no clock, no thread."""

from __future__ import annotations

_NEW = 0.2
"""The weight of the last batch in the mean."""
_SPARE = 0.2
"""The part of the time left that estimates leave free when a request comes, since none of them is exact."""


class Pace:
    """The computed tokens a second of full batches, unknown until there was one.

    Small batches are slower, so that one of them can only show that the pace was measured too low.
    """

    def __init__(self) -> None:
        self.batch_tokens = 0
        """What the last full batch held."""
        self._tokens_per_s = 0.0
        self._running = 0
        self._is_full = False

    def begin(self, num_tokens: int, *, is_full: bool) -> None:
        """Notes that a batch begins, of so many tokens."""
        self._running, self._is_full = num_tokens, is_full

    def end(self, seconds: float) -> None:
        """Notes how long that batch took."""
        rate = self._running / max(seconds, 1e-6)
        if self._is_full:
            self.batch_tokens = self._running
        if self._is_full or 0 < self._tokens_per_s < rate:
            self._tokens_per_s += (rate - self._tokens_per_s) * (_NEW if self._tokens_per_s else 1.0)
        self._running = 0

    def is_late(self, num_tokens: int, seconds_left: float) -> bool:
        """Whether so many tokens certainly take longer."""
        return num_tokens > self._tokens_per_s * seconds_left if self._tokens_per_s else False

    def would_be_late(self, num_tokens: int, seconds_left: float) -> bool:
        """Whether so many tokens, behind the batch that runs, are likely to take longer."""
        return self.is_late(num_tokens + self._running, (1 - _SPARE) * seconds_left)
