"""An actor's start and end: many ranks, signals, time limits, and the status that it ends with."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from guerdon.actor import training_run
from guerdon.actor.preemption import Preemption
from guerdon.distributed.group import Group
from guerdon.distributed.pulse import EXIT_STATUS, Pulse
from guerdon.distributed.ranks import Member, Ranks
from guerdon.errors import ConfigError, RanksLost, RewardsFailed
from guerdon.settings.actors import (
    DataConfig,
    ReinforceRunConfig,
    RemoteRewardConfig,
    RewardServer,
    RunConfig,
    parse_time_limit,
)
from guerdon.settings.config import ParallelConfig
from processes import environment

RUN = """
import time
from guerdon.actor.preemption import Preemption
stop = Preemption(None)
stop.listen()
print("listening", flush=True)
while stop.reason(0.0) is None:
    time.sleep(0.01)
print(stop.reason(0.0), stop.exit_status(), flush=True)
time.sleep({longer})
"""


@pytest.mark.parametrize(
    ("limit", "seconds"), [("00:00:00:07", 7.0), ("01:02:03:04", 93_784.0), ("90", 5400.0), ("0.5", 30.0), (None, None)]
)
def test_time_limits(limit: str | None, seconds: float | None) -> None:
    assert parse_time_limit(limit) == seconds


@pytest.mark.parametrize("limit", ["1:00:00", "soon", "-5", "1h", ""])
def test_malformed_time_limits(limit: str) -> None:
    with pytest.raises(ConfigError, match=r"run.time_limit is"):
        Preemption(limit)


def test_it_leaves_before_the_time_is_up() -> None:
    stop = Preemption("00:00:01:40")
    assert stop.reason(0.0) is None and stop.reason(90.0) is None
    assert stop.reason(99.5) == "time limit"  # a second is kept in reserve
    assert stop.exit_status() == 75
    assert Preemption(None).reason(1e9) is None


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_asks(number: signal.Signals, status: int) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    stop = Preemption("1")
    stop.listen()
    try:
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        assert stop.reason(0.0) == number.name and stop.exit_status() == status
    finally:
        stop.close()
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


def test_one_of_several_ranks_is_not_killed_while_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stop = Preemption("1")
    stop.listen()
    stop.close()
    found = [signal.signal(number, handler) for number, handler in before.items()]
    assert found == [signal.SIG_IGN, signal.SIG_IGN]


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_kills(second: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN.format(longer=60)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    assert process.stdout and process.stdout.readline() == "listening\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "SIGINT 130\n"
    process.send_signal(second)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -second and "saving and stopping" in errors


def test_other_threads_leave_the_signals_alone() -> None:
    import threading

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=Preemption(None).listen)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_rank_lost_at_the_end_hides_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    exits: list[int] = []

    def leave(status: int) -> None:
        exits.append(status)
        if threading.current_thread() is threading.main_thread():
            raise SystemExit(status)

    def fail(*_: Any) -> Any:
        raise RewardsFailed("all rewards are gone")

    def end(_: Group) -> None:
        raise RanksLost("another rank was lost")

    members = (Member(0, "here", 1), Member(1, "there", 2))
    monkeypatch.setattr(training_run, "start", lambda *_: Ranks(size=2, timeout_s=1.0, members=members))
    monkeypatch.setattr(training_run, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(Pulse, "start", lambda _: None)
    monkeypatch.setattr(Group, "end", end)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    config = ReinforceRunConfig(
        parallel=ParallelConfig(),
        data=DataConfig(prompts=str(tmp_path / "prompts.jsonl"), num_validation=0),
        run=RunConfig(steps=1, output_dir="/out"),
        remote_rm=RemoteRewardConfig(RewardServer(name="even", urls=["http://localhost:1"])),
    )
    with pytest.raises(SystemExit):
        training_run.train_on_ranks(config, fail)
    assert exits == [EXIT_STATUS] * 2, exits  # the pulse's own, which ends the process, and what stands behind it
    told = [record for record in caplog.records if record.exc_info]
    assert [str(record.exc_info[1]) for record in told if record.exc_info] == ["all rewards are gone"]
    assert "the newest checkpoint in /out" in caplog.messages[-1]
