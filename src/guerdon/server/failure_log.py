"""Logs samples without a score: at most one line a minute for each model, with counts and kinds and never a text."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence

from guerdon.errors import GuerdonError

log = logging.getLogger(__name__)

EVERY_S = 60.0


class FailureLog:
    """Counts the samples of every model since its last line. Belongs to one thread."""

    def __init__(self) -> None:
        self._kinds: dict[str, Counter[str]] = {}
        self._num_samples: Counter[str] = Counter()
        self._logged: dict[str, float] = {}

    def note(self, model: str, results: Sequence[object]) -> None:
        """Counts an answered request's samples; logs if some failed and the model's last line is a minute old."""
        self._num_samples[model] += len(results)
        kinds = self._kinds.setdefault(model, Counter())
        kinds.update(type(one).__name__ for one in results if isinstance(one, GuerdonError))
        now = time.monotonic()
        if not kinds or now - self._logged.get(model, -EVERY_S) < EVERY_S:
            return
        counts = ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common())
        log.warning(
            "%s: %s of %s samples have no score (%s); the error of each, which its client gets, says why",
            model, f"{kinds.total():,}", f"{self._num_samples[model]:,}", counts,
        )  # fmt: skip
        self._logged[model] = now
        self._num_samples[model] = 0
        kinds.clear()
