"""docs/walk.md against real requests: the functions that it lists are those on the stack, and not too many."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import served
from guerdon import CriticClient, RewardClient
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import CriticConfig
from walks import Station, Trace, profiling

PAGE = Path(__file__).parents[1] / "docs/walk.md"

HEAD = ("front/connections.py", "HttpConnection.on_headers_complete")
DECODED = ("wire/kserve.py", "read")
SCORE = {  # the last moment is the destination, and not counted
    "head": HEAD,
    "decoded": DECODED,
    "queued": ("batching/scheduler.py", "Scheduler.add"),
    "forward": ("engine/forward.py", "Forward.run"),
}
TRAIN = {
    "head": HEAD,
    "decoded": DECODED,
    "queued": ("batching/loop.py", "Loop.order"),
    "journalled": ("critic/store.py", "Journal.append"),
    "stepped": ("training/optimiser.py", "Optimiser.apply"),
    "acknowledged": ("critic/store.py", "Journal.mark_done"),
}
CALL = {
    "handed over": ("client/faces.py", "LoopThread.start"),
    "sent": ("httpcore/_async/connection.py", "AsyncHTTPConnection.handle_async_request"),
}
ROWS = [np.array([5, 6, 7, 8, 9]), np.array([5, 6, 10])]


def listed(heading: str) -> list[Station]:
    """Returns the functions that the page lists under that heading, in order."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^ *\d+ +(\S+\.py) +(\S+)", section, re.M)


def of_the_server(walk: list[Station]) -> list[Station]:
    """Leaves out the client, which runs in this process too, and the function that runs the event loop."""
    return [(file, name) for file, name in walk if not file.startswith("client/") and name != "RunningServer._run"]


Use = Callable[[Trace | None], None]


@pytest.fixture(scope="module")
def use() -> Iterator[Use]:
    with profiling() as use:
        yield use


@pytest.fixture(scope="module")
def server(use: Use, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with served.plain(tmp_path_factory.mktemp("walk")) as server:
        yield server


def traced(use: Use, moments: dict[str, Station], request: Callable[[], object]) -> Trace:
    """Traces the third of three requests: what is loaded or measured once is not part of the walk."""
    request()
    request()
    trace = Trace(moments)
    use(trace)
    try:
        request()
    finally:
        use(None)
    return trace


def test_a_score_over_http(use: Use, server: RunningServer) -> None:
    with RewardClient(server.http_url) as client:
        trace = traced(use, SCORE, lambda: client.score(tokens=ROWS))
    *walk, forward = of_the_server(trace.walk())
    assert walk == listed("A score over HTTP") and forward == SCORE["forward"]
    assert len(walk) <= 14 and len({file for file, _ in walk}) <= 9


def test_a_train_request(use: Use, tmp_path: Path) -> None:
    targets = [[np.full(len(row) - 1, value) for row in ROWS] for value in (1.0, 0.0, 1.0)]
    config = CriticConfig(model=str(served.reward_model(tmp_path / "rm")), checkpoint_dir=str(tmp_path / "checkpoints"))
    with (
        served.running(grpc_port=0, critic=config) as server,
        CriticClient(server.http_url) as critic,
    ):
        trace = traced(use, TRAIN, lambda: critic.train(ROWS, *targets).result())
    walk = of_the_server(trace.walk())
    assert walk == listed("A train request")
    assert len(walk) <= 22 and len({file for file, _ in walk}) <= 12


def test_a_clients_call(use: Use, server: RunningServer) -> None:
    with RewardClient(server.http_url) as client:
        trace = traced(use, CALL, lambda: client.submit(tokens=ROWS).result())
    walk = trace.walk()
    assert walk == listed("A client's call")
    assert len(walk) <= 8 and len({file for file, _ in walk}) <= 5
