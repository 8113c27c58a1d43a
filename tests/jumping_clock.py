"""Programs for whom the time of day is never the same: with every look it has jumped by days, forth or back.

python jumping_clock.py serve FOLDER PORT          a critic by arithmetic, until SIGTERM
python jumping_clock.py ask URL FIRST NUMBER FILE  trains NUMBER times from FIRST on, scores, and prints the step; given
                                                   FILE, a deadline passes during a last training, which lasts until
                                                   FILE exists: the server's is FOLDER/go
"""

import itertools
import sys
import time
from pathlib import Path

DAY_S = 86_400.0
_JUMPS = itertools.cycle((0.0, 3 * DAY_S, -5 * DAY_S, 400 * DAY_S, -40 * DAY_S, 0.25, -7200.0))
_NOW = time.time

time.time = lambda: _NOW() + next(_JUMPS)
time.time_ns = lambda: int(time.time() * 1e9)


class Appears:
    """As much of an event as a trainer uses; a file that appears sets it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def wait(self, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while not self._file.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return self._file.exists()


def serve(folder: str, port: str) -> None:
    from guerdon.server import runtime
    from guerdon.settings.config import ServerConfig
    from server.arithmetic_critic import ArithmeticService

    config = ServerConfig(port=int(port), grpc_port=None, idle_timeout_s=30, header_timeout_s=10)
    service = ArithmeticService(folder, with_rewards=True, server=config, save_every=2)
    service.trainer.go = Appears(Path(folder, "go"))  # type: ignore[assignment]
    runtime.run(service, config)


def ask(url: str, first: str, number: str, go: str = "") -> None:
    import numpy as np

    from guerdon import CriticClient, RetryPolicy, RewardClient
    from guerdon.errors import DeadlineExceeded
    from server.arithmetic_critic import WAIT_TOKEN, request

    policy = RetryPolicy(timeout_s=60, tries=3)
    with CriticClient(url, policy=policy) as critic, RewardClient(url, model="critic_infer", policy=policy) as scorer:
        critic.wait_ready(timeout_s=120)
        for i in range(int(first), int(first) + int(number)):
            asked = request(f"r{i}", 3 + i)
            rows = [getattr(asked, name) for name in ("tokens", "returns", "prev_values", "mask")]
            report = critic.train(*rows, train_id=asked.id).result(120)
            rewards = scorer.score(tokens=[[i, 1]], timeout_s=20).rewards
            assert rewards.tolist() == [i + 1.0], rewards
        if go:
            slow = request("slow", 1.0, first_token=WAIT_TOKEN)
            training = critic.train(slow.tokens, *(np.zeros_like(slow.returns),) * 2, slow.mask)
            time.sleep(0.5)
            started = time.monotonic()
            try:
                scorer.score(tokens=[[1]], timeout_s=0.4)
                raise AssertionError("the scores did not wait for the training")
            except DeadlineExceeded:
                assert 0.3 < time.monotonic() - started < 3600, "neither at once nor in days"
            Path(go).touch()
            training.result(120)
        print(report.step, critic.state().step, critic.save().name)


if __name__ == "__main__":
    {"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:])
