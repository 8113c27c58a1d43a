"""NeMo-RL's environment as the actor that Ray makes of it, called as asynchronous rollouts call it.

Skipped without ray: `make ray` installs it.
"""

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from guerdon.adapters import nemo_rl
from guerdon.core import ScoreReply, ScoreRequest
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from processes import environment
from server.echo_service import EchoService

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_SAMPLES = 16
LOG = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "the reason"}]


class Meeting(EchoService):
    """The echo service, which answers nobody before NUM_SAMPLES requests are there."""

    def __init__(self) -> None:
        super().__init__()
        self._num_requests = 0
        self._all_are_there = asyncio.Event()

    async def score(self, name: str, request: ScoreRequest, client: str = "", **more: Any) -> ScoreReply:
        self._num_requests += 1
        if self._num_requests == NUM_SAMPLES:
            self._all_are_there.set()
        await self._all_are_there.wait()
        return await super().score(name, request, client, **more)


@pytest.fixture
def cluster() -> Iterator[None]:
    """Ray on this machine; at the end none of its processes is left."""
    home = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # the paths of Ray's sockets must be short
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join((environment()["PYTHONPATH"], str(Path(__file__).parents[1]))))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray puts one into the home folder
        before = set(psutil.Process().children(recursive=True))
        try:
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=home)
            yield
        finally:
            started = set(psutil.Process().children(recursive=True)) - before
            ray.shutdown()
            _, left = psutil.wait_procs(started, timeout=120)
            for process in left:
                process.kill()
            shutil.rmtree(home, ignore_errors=True)


def test_steps_of_one_sample_each_are_asked_at_once_and_a_lost_actor_is_made_again(cluster: None) -> None:
    with RunningServer(Meeting(), ServerConfig(port=0, grpc_port=None), grace_s=0.1) as server:
        made: Any = nemo_rl.RewardEnvironmentActor.remote({"url": server.http_url, "timeout_s": 60.0})
        steps = [made.step.remote([LOG], [None]) for _ in range(NUM_SAMPLES)]
        rewards = [returned.rewards.tolist() for returned in ray.get(steps, timeout=200)]
        assert rewards == [[float(len(str(LOG)))]] * NUM_SAMPLES
        ray.kill(made, no_restart=False)
        assert ray.get(made.step.remote([LOG], [None]), timeout=120).rewards.tolist() == rewards[0]
