"""A user's scorer that takes its time, served as deploy.patient:score."""

import time
from typing import Any

from guerdon.server.batching.scheduler import Scheduler

SECONDS = 0.5
BREAKS = "breaks"


def score(texts: list[str]) -> list[float]:
    """Each text's length, after a while; after a text with BREAKS the server's thread ends, as by a bug of its own."""
    if any(BREAKS in text for text in texts):
        broken: Any = None
        Scheduler.observe = broken
    time.sleep(SECONDS)
    return [float(len(text)) for text in texts]
