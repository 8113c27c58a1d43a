"""Gives every test default signals for its child processes, and no time limit that a busy machine could exceed.

What is loaded is frozen out of the garbage collection, as in a server: otherwise every collection searches all of it.
Clients of httpx share the certificate authorities, which each would otherwise load for itself, in 20 ms. Torch has one
thread: models are tiny, and results are compared bitwise.
"""

import functools
import gc
import os
import signal
import ssl
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx._transports.default as httpx_transports
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from guerdon.server.runtime import RunningServer
    from served import Serve

for _number in (signal.SIGINT, signal.SIGTERM):
    # A shell script's `make test &` ignores SIGINT, and exec hands an ignored signal on to all children, which tests
    # then cannot interrupt. A handler is reset to the default by exec; this process goes on ignoring the signal.
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

LONGEST = [
    "test_critic_killed.py", "server/test_hot_swap.py", "test_judge_served.py", "training/test_policy_exact.py",
    "cli/test_check.py", "docs/test_blocks.py", "actor/test_training_run.py", "docs/test_guide_blocks.py",
    "test_critic_over_http.py", "training/test_policy_trainer.py", "browser/test_page_content.py",
    "test_live_weights.py", "engine/test_engine.py", "engine/test_same_bits.py", "engine/test_forest.py",
    "actor/test_generation.py", "training/test_checkpoint.py", "training/test_exact.py", "training/test_lora.py",
    "test_pairs_served.py", "docs/test_trainer_blocks.py",
]  # fmt: skip
"""The longest files: they run first, lest one of them runs on alone when all others are done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: to search it for garbage again and again takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")

for _part in ("connect", "read", "write", "pool"):  # in place of httpx's 5 s; guerdon itself always gives its own
    setattr(DEFAULT_TIMEOUT_CONFIG, _part, 120.0)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def no_server_spins() -> Iterator[None]:
    """Fails if a server of Python's library goes on in a thread: its socket is closed, so it would never wait."""
    yield
    frames = [sys._current_frames().get(thread.ident or 0) for thread in threading.enumerate()]
    assert not any(frame.f_code.co_name == "serve_forever" for top in frames for frame, _ in traceback.walk_stack(top))


@pytest.fixture(scope="module")
def one_self_check() -> Iterator[None]:
    """For modules that load one model many times."""
    import same_self_checks

    yield from same_self_checks.once()


@pytest.fixture(scope="module")
def serve() -> Iterator["Serve"]:
    from served import running

    with ExitStack() as servers:
        yield lambda *models, **settings: servers.enter_context(running(*models, **settings))


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Iterator["RunningServer"]:
    """`served.sums`, which no test changes."""
    import served

    with served.sums(tmp_path_factory.mktemp("sums")) as server:
        yield server


_make_context = httpx_transports.create_ssl_context


@functools.cache
def _default_context(trust_env: bool, *places: str | None) -> ssl.SSLContext:
    return _make_context(trust_env=trust_env)


def _shared_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    if verify is not True or cert is not None:
        return _make_context(verify, cert, trust_env)
    return _default_context(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


httpx_transports.create_ssl_context = _shared_context
