"""Gives every test default signals for its child processes, and no time limit that a busy machine could exceed.

What is loaded is frozen out of the garbage collection, as in a server: otherwise every collection searches all of it.
"""

from __future__ import annotations

import gc
import signal

import pytest
from hypothesis import HealthCheck, settings

for _number in (signal.SIGINT, signal.SIGTERM):
    # A shell script's `make test &` ignores SIGINT, and exec hands an ignored signal on to all children, which tests
    # then cannot interrupt. A handler is reset to the default by exec; this process goes on ignoring the signal.
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    gc.collect()
    gc.freeze()
