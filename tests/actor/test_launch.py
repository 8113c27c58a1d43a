"""An actor's start and end on many ranks, without the others."""

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from guerdon.actor import launch
from guerdon.distributed.group import Group
from guerdon.distributed.pulse import EXIT_STATUS, Pulse
from guerdon.distributed.ranks import Member, Ranks
from guerdon.errors import RanksLost, RewardsFailed
from guerdon.settings.actors import DataConfig, ReinforceRunConfig, RemoteRewardConfig, RewardModelServer, RunConfig
from guerdon.settings.config import ParallelConfig


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
    monkeypatch.setattr(launch, "start", lambda *_: Ranks(size=2, timeout_s=1.0, members=members))
    monkeypatch.setattr(launch, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(Pulse, "start", lambda _: None)
    monkeypatch.setattr(Group, "end", end)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    config = ReinforceRunConfig(
        parallel=ParallelConfig(),
        data=DataConfig(prompts=str(tmp_path / "prompts.jsonl"), num_validation=0),
        run=RunConfig(steps=1, output_dir="/out"),
        remote_rm=RemoteRewardConfig(RewardModelServer(name="even", urls=["http://localhost:1"])),
    )
    with pytest.raises(SystemExit):
        launch.run(config, fail)
    assert exits == [EXIT_STATUS] * 2, exits  # the pulse's own, which ends the process, and what stands behind it
    told = [record for record in caplog.records if record.exc_info]
    assert [str(record.exc_info[1]) for record in told if record.exc_info] == ["all rewards are gone"]
    assert "the newest checkpoint in /out" in caplog.messages[-1]
