"""The adapters of reward functions in forked processes, and pickled."""

import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from adapters.forms import FORMS, ask
from processes import by_itself, end_of_child


@pytest.fixture
def url() -> Iterator[str]:
    # The test's own process imports this module, and needs no server.
    from guerdon.server.runtime import RunningServer
    from guerdon.settings.config import ServerConfig
    from server.echo_service import EchoService

    with RunningServer(EchoService(), ServerConfig(port=0, grpc_port=None)) as server:
        yield server.http_url


@by_itself
def test_they_work_after_a_fork_and_when_pickled_after_use(url: str) -> None:
    def works(name: str, function: Any, text: str) -> None:
        assert ask(name, function, text) == float(len(text))

    for name, make in FORMS.items():
        function = make(url)
        fresh = pickle.dumps(function)
        works(name, function, "123")
        assert end_of_child(partial(works, name, function, "1234")) == 0, name
        for pickled in (fresh, pickle.dumps(function)):
            works(name, pickle.loads(pickled), "12")  # noqa: S301
            assert end_of_child(lambda it=(name, pickled): works(it[0], pickle.loads(it[1]), "12")) == 0, name  # noqa: S301
        works(name, function, "123")
