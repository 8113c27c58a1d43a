"""A flood of requests against a server process: each is answered or refused at once, and memory returns."""

import asyncio
import os
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import zoo
from server.helpers import body_of, posted
from tiers import slow_but

ROW = list(range(10, 74))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.checkpoint("llama", tmp_path_factory.mktemp("flood") / "llama")


@pytest.fixture
def server(max_requests: int, model: Path) -> Iterator[tuple[int, psutil.Process]]:
    """The port and the process of `guerdon serve`, which takes so many requests at once."""
    command = [sys.executable, "-m", "guerdon", "serve", str(model), "--port", "0", "--no-grpc"]
    environment = os.environ | {"PYTHONPATH": "src", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--max-requests", str(max_requests)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if "ready at" in line)
        found = re.search(r":(\d+)", ready)
        assert found is not None
        yield int(found[1]), psutil.Process(process.pid)
    finally:
        process.terminate()
        assert process.wait(120) == 0


async def ask(port: int) -> tuple[int, float]:
    """The status of one request, and the seconds that it took, on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started = time.monotonic()
    writer.write(posted(body_of([ROW])))
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status, time.monotonic() - started


async def flood(port: int, count: int) -> list[tuple[int, float]]:
    return await asyncio.gather(*(ask(port) for _ in range(count)))


@pytest.mark.parametrize(("max_requests", "count"), slow_but((), [(4096, 2000), (300, 1000)]))
def test_a_flood_is_answered_or_refused_and_memory_returns(server: tuple[int, psutil.Process], count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * count)), hard))
    port, process = server
    sizes = []
    for _ in range(3):
        answers = asyncio.run(asyncio.wait_for(flood(port, count), 60))
        statuses = Counter(status for status, _ in answers)
        assert set(statuses) <= {200, 503}
        assert statuses[200] >= 300
        assert asyncio.run(ask(port))[0] == 200
        sizes.append(process.memory_info().rss)
    # The first flood fills pools and arenas; none after it may add to them.
    assert sizes[2] <= 1.05 * sizes[0]
