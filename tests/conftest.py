"""Gives every test default signals for its child processes, and no time limit that a busy machine could exceed."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

for _number in (signal.SIGINT, signal.SIGTERM):
    # A shell script's `make test &` ignores SIGINT, and exec hands an ignored signal on to all children, which tests
    # then cannot interrupt. A handler is reset to the default by exec; this process goes on ignoring the signal.
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")
