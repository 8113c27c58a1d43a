"""Functions that are served by several ranks, and what one of them does otherwise."""

import os
import signal
import time
from pathlib import Path

if os.environ.get("RANK") == os.environ.get("FAILING_RANK", "none"):
    raise RuntimeError("this rank has no such function")
if os.environ.get("RANK") == os.environ.get("DYING_RANK", "none"):
    time.sleep(2)  # the others wait for it by then
    os.kill(os.getpid(), signal.SIGKILL)
if "SLOW_IMPORT" in os.environ:
    Path(os.environ["SLOW_FILE"]).touch()
    time.sleep(float(os.environ["SLOW_IMPORT"]))

SLOW = "slowly"
"""A text with this word takes `SECONDS` on each rank that gets it."""
SECONDS = float(os.environ.get("SLOW_SECONDS", "1.5"))


def length(texts: list[str]) -> list[float]:
    """The texts' lengths; tells by a file that a slow one is under way, where SLOW_FILE names one."""
    if any(SLOW in text for text in texts):
        if "SLOW_FILE" in os.environ:
            Path(os.environ["SLOW_FILE"]).touch()
        time.sleep(SECONDS)
    return [float(len(text)) for text in texts]
