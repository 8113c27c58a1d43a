"""An actor's checkpoints on a real disk: whole or not at all, and what a run may be gone on with."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from guerdon.actor.run_checkpoints import RunCheckpoints, RunState, check_settings_unchanged, decisive_settings
from guerdon.durable import seal_again
from guerdon.errors import CheckpointError, StorageFailed
from guerdon.settings.actors import PPORunConfig, ReinforceRunConfig, RewardServer
from processes import by_itself, end_of_child

SETTINGS = {"run.seed": 0, "policy.lora": None, "policy.betas": [0.9, 0.98]}


def state(step: int, critic: str | None = None) -> RunState:
    return RunState("run", step, SETTINGS, {"running_mean": [1.5, 3.0]}, critic)


def writes(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.bin").write_bytes(content) and None


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_is_found_again_as_it_was_saved(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path, keep=2)
    assert checkpoints.newest_whole() is None
    for step in (0, 20, 40):
        checkpoints.save(state(step, f"critic-{step}"), writes(b"weights %d" % step))
    assert names(tmp_path) == ["step-000020", "step-000040"]
    found = RunCheckpoints(tmp_path, keep=2).newest_whole()
    assert found is not None and found.state == state(40, "critic-40")
    assert (found.policy / "model.bin").read_bytes() == b"weights 40"


def test_steps_of_seven_digits_are_newer_than_those_of_six(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path, keep=1)
    for step in (999_999, 1_000_000):
        checkpoints.save(state(step), writes(b"x"))
    found = checkpoints.newest_whole()
    assert found is not None and found.state.step == 1_000_000


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("policy/model.bin", lambda path: path.write_bytes(b"weights 41")),
        ("policy/model.bin", lambda path: path.write_bytes(b"weig")),
        ("policy/model.bin", Path.unlink),
        ("state.json", lambda path: path.write_text(path.read_text().replace('"step": 40', '"step": 41'))),
        ("state.json", Path.unlink),
    ],
)
def test_a_damaged_one_is_put_aside_loudly_and_the_one_before_counts(
    file: str, damage: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = RunCheckpoints(tmp_path, keep=2)
    for step in (20, 40):
        checkpoints.save(state(step), writes(b"weights %d" % step))
    damage(tmp_path / "step-000040" / file)
    with caplog.at_level(logging.ERROR):
        found = RunCheckpoints(tmp_path, keep=2).newest_whole()
    assert found is not None and found.state.step == 20
    assert "step-000040 IS DAMAGED" in caplog.text
    assert names(tmp_path) == ["damaged-step-000040", "step-000020"]
    checkpoints.save(state(40), writes(b"again"))  # its step comes again
    assert "step-000040" in names(tmp_path)


@by_itself
def test_a_crash_amid_a_save_leaves_the_one_before(tmp_path: Path) -> None:
    RunCheckpoints(tmp_path, keep=2).save(state(20), writes(b"weights"))

    def dies(folder: Path) -> None:
        (folder / "model.bin").write_bytes(b"half")
        os.kill(os.getpid(), 9)

    assert end_of_child(lambda: RunCheckpoints(tmp_path, keep=2).save(state(40), dies)) == -9
    assert len(names(tmp_path)) == 2
    found = RunCheckpoints(tmp_path, keep=2).newest_whole()
    assert found is not None and found.state.step == 20
    assert names(tmp_path) == ["step-000020"]


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path, keep=2)
    checkpoints.save(state(20), writes(b"weights"))

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device", str(folder))

    with pytest.raises(StorageFailed, match=r"cannot save .*step-000040: No space left"):
        checkpoints.save(state(40), full)
    assert names(tmp_path) == ["step-000020"]


def test_another_checkpoint_of_the_critics_takes_the_first_ones_place(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path, keep=2)
    checkpoints.save(state(20, "critic-1"), writes(b"weights"))
    found = checkpoints.newest_whole()
    assert found is not None
    assert checkpoints.pair(found, "critic-2").state == state(20, "critic-2")
    again = RunCheckpoints(tmp_path, keep=2).newest_whole()
    assert again is not None and again.state == state(20, "critic-2")
    assert (again.policy / "model.bin").read_bytes() == b"weights"
    assert names(again.folder) == ["policy", "state.json"]


def test_other_settings_are_named(tmp_path: Path) -> None:
    folder = RunCheckpoints(tmp_path, keep=2).save(state(20), writes(b"weights")).folder
    found = RunCheckpoints(tmp_path, keep=2).newest_whole()
    assert found is not None and found.folder == folder
    check_settings_unchanged(found.state, dict(SETTINGS), folder)
    with pytest.raises(CheckpointError, match=r"with policy.betas \[0.9, 0.98\]; now it is \[0.9, 0.99\]"):
        check_settings_unchanged(found.state, SETTINGS | {"policy.betas": [0.9, 0.99]}, folder)
    with pytest.raises(CheckpointError, match=r"with rollouts.top_k None; now it is 5"):
        check_settings_unchanged(found.state, SETTINGS | {"rollouts.top_k": 5}, folder)


def test_a_checkpoint_may_be_damaged_again_and_all_damaged_is_an_error(tmp_path: Path) -> None:
    def damaged(step: int) -> None:
        checkpoints.save(state(step), writes(b"weights"))
        (tmp_path / f"step-{step:06d}/policy/model.bin").unlink()

    checkpoints = RunCheckpoints(tmp_path, keep=2)
    checkpoints.save(state(20), writes(b"weights"))
    for _ in range(3):
        damaged(40)
        found = checkpoints.newest_whole()
        assert found is not None and found.state.step == 20
    assert names(tmp_path) == [*(f"damaged-step-000040{n}" for n in ("", "-2", "-3")), "step-000020"]
    (tmp_path / "step-000020/policy/model.bin").unlink()
    for _ in range(2):  # not even the second time does it begin anew by itself
        with pytest.raises(CheckpointError, match=r"all checkpoints in .* are damaged: .*damaged-step-000020"):
            checkpoints.newest_whole()


def test_one_of_another_version_is_not_damaged(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path, keep=2)
    folder = checkpoints.save(state(20), writes(b"weights")).folder
    seal_again(folder, "state.json", {"state": {"run_id": "run", "steps_done": 20}})
    with pytest.raises(CheckpointError, match="made by another version of guerdon"):
        checkpoints.newest_whole()
    assert names(tmp_path) == ["step-000020"]


def test_what_decides_a_run() -> None:
    config = PPORunConfig()
    then = RunState("run", 1, decisive_settings(config), {})
    check_settings_unchanged(then, decisive_settings(config), Path("x"))
    with pytest.raises(CheckpointError, match="with the command 'guerdon ppo'; now it is 'guerdon reinforce'"):
        check_settings_unchanged(then, decisive_settings(ReinforceRunConfig()), Path("x"))
    for change, path in (
        ({"send": "text"}, "send"),
        ({"suffix": "</s>"}, "suffix"),
        ({"reward_model": RewardServer(name="other")}, "reward_model.name"),
        ({"combine_rm_and_critic_server": False}, "combine_rm_and_critic_server"),
    ):
        other = replace(config, remote_critic_rm=replace(config.remote_critic_rm, **change))
        with pytest.raises(CheckpointError, match=rf"with remote_critic_rm\.{path} "):
            check_settings_unchanged(then, decisive_settings(other), Path("x"))
    elsewhere = replace(config, remote_critic_rm=replace(config.remote_critic_rm, timeout_s=1.0))
    check_settings_unchanged(then, decisive_settings(elsewhere), Path("x"))
