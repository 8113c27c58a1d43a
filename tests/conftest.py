"""Gives every test default signals for its child processes, and no time limit that a busy machine could exceed.

What is loaded is frozen out of the garbage collection, as in a server: otherwise every collection searches all of it.
Clients of httpx share the certificate authorities, which each would otherwise load for itself, in 20 ms.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import ssl
from typing import Any

import httpx._transports.default as httpx_transports
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


_make_context = httpx_transports.create_ssl_context


@functools.cache
def _default_context(trust_env: bool, *places: str | None) -> ssl.SSLContext:
    return _make_context(trust_env=trust_env)


def _shared_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    if verify is not True or cert is not None:
        return _make_context(verify, cert, trust_env)
    return _default_context(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


httpx_transports.create_ssl_context = _shared_context
