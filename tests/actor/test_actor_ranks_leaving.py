"""`torchrun ... -m guerdon reinforce`: ranks that are asked to stop, and ranks that die."""

import dataclasses
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from actor.rollouts import serving
from actor.runs import metrics_of, parts
from guerdon.actor import reinforce
from guerdon.settings.actors import ReinforceRunConfig, RemoteRewardConfig, RewardServer
from guerdon.settings.config import ModelConfig, ParallelConfig
from launched import Launch, launching

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = {"rollouts_per_prompt": 8, "max_new_tokens": 200, "min_new_tokens": 200}
"""Generating takes nearly all of a step, in several rounds."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(ModelConfig(model="actor.reward_functions:even", name="even")) as server:
        yield server.http_url


def config_of(folder: Path, url: str, out: Path, steps: int) -> ReinforceRunConfig:
    made = ReinforceRunConfig(
        **parts(folder, out, steps=steps, rollouts=LONG, total_steps=100),
        parallel=ParallelConfig(rank_timeout_s=10.0),
        remote_rm=RemoteRewardConfig(RewardServer(name="even", urls=[url]), timeout_s=30.0),
    )
    made.data.num_validation = 0
    return made


def written(config: ReinforceRunConfig, path: Path) -> Path:
    path.write_text(yaml.safe_dump(dataclasses.asdict(config)))
    return path


def wait_for_step(out: Path, step: int, launch: Launch) -> None:
    """Returns amid the rollouts of a step behind that one, as a rule."""
    until = time.monotonic() + 200
    while not ((out / "metrics.jsonl").is_file() and len(metrics_of(out)) >= step):
        assert time.monotonic() < until and launch.torchrun.poll() is None, launch.output()
        time.sleep(0.1)


@pytest.mark.parametrize("asked", ["all", "a follower"])
def test_ranks_that_are_asked_to_stop_save_and_leave(folder: Path, url: str, tmp_path: Path, asked: str) -> None:
    out = tmp_path / "out"
    config = config_of(folder, url, out, steps=1000)
    with launching("guerdon", 2, "reinforce", written(config, tmp_path / "run.yaml")) as launch:
        wait_for_step(out, 2, launch)
        if asked == "all":
            launch.torchrun.send_signal(signal.SIGTERM)  # which it passes on
        else:
            launch.rank(1).send_signal(signal.SIGTERM)
        launch.torchrun.wait(120)
        output = launch.output()
        launch.wait_ended()
    assert "SIGTERM: stopped after step" in output and "lost" not in output, output
    if asked == "a follower":
        assert "exitcode  : 143" in output, output  # rank 0's, and the only one that is not 0
    step = len(metrics_of(out))
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{step:06d}"]

    config.run.steps = step + 1
    assert reinforce.train(config).step == step + 1


def test_a_rank_that_dies_ends_the_others_and_the_run_resumes_after_a_restart(
    folder: Path, url: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    config = config_of(folder, url, out, steps=8)
    config.run.save_every = 1
    options = ("--standalone", "--max-restarts", "1")
    run = written(config, tmp_path / "run.yaml")
    with launching("guerdon", 2, "reinforce", run, options=options) as launch:
        wait_for_step(out, 3, launch)
        launch.rank(1).kill()
        code = launch.torchrun.wait(120)
        output = launch.output()
    assert code == 0, output
    assert "rank 1 (" in output and f"resumes from the newest checkpoint in {out}" in output, output
    assert "resuming from" in output, output
    assert [row["step"] for row in metrics_of(out)] == [*range(1, 9)]
