"""CheckpointFolder on a real disk: whole or not at all, damaged later, kept by count and by a metric."""

import logging
import resource
from pathlib import Path

import pytest

from guerdon.errors import InvalidRequest, StartError
from guerdon.server.critic.checkpoint_folder import CheckpointFolder, DamagedCheckpoint
from processes import by_itself


def save(checkpoints: CheckpointFolder, step: int, content: bytes = b"weights", **metrics: float) -> str:
    aside = checkpoints.begin()
    (aside / "part").mkdir()
    (aside / "part" / "model.bin").write_bytes(content)
    info = checkpoints.commit(
        aside,
        step=step,
        weights_version=f"1+{step}",
        metrics=metrics,
        position=10 * step,
        answers=b"{}",
        estimates=b"tables" if step % 2 else None,
        settings={"lora": None},
    )
    checkpoints.prune(set())
    return info.name


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_found_again_as_it_was_made(tmp_path: Path) -> None:
    assert save(CheckpointFolder(tmp_path, keep=2), 7, loss=0.25) == "checkpoint-000001-step-7"
    found = CheckpointFolder(tmp_path, keep=2).newest_whole()
    assert found is not None
    assert (found.info.number, found.info.step, found.info.weights_version) == (1, 7, "1+7")
    assert (found.info.metrics, found.position, found.answers()) == ({"loss": 0.25}, 70, b"{}")
    assert found.estimates() == b"tables"
    assert (found.folder / "part" / "model.bin").read_bytes() == b"weights"
    save(checkpoints := CheckpointFolder(tmp_path, keep=2), 8)
    assert checkpoints.whole(None).estimates() is None


def test_the_newest_and_the_best_are_kept_and_numbers_go_on(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=2, best="explained_variance")
    for step, variance in enumerate((0.1, 0.9, 0.2, 0.3, 0.4), 1):
        save(checkpoints, step, explained_variance=variance)
    kept = ["checkpoint-000002-step-2", "checkpoint-000004-step-4", "checkpoint-000005-step-5"]
    assert names(tmp_path) == kept == [info.name for info in checkpoints.infos()]
    assert checkpoints.oldest_position() == 40  # of the newest two: the best one is not gone on from
    again = CheckpointFolder(tmp_path, keep=1, best="explained_variance", mode="min")
    assert save(again, 6) == "checkpoint-000006-step-6"
    assert names(tmp_path) == ["checkpoint-000004-step-4", "checkpoint-000006-step-6"]


def test_the_journal_reaches_back_to_the_model_until_there_are_enough(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    assert checkpoints.oldest_position() == 0
    save(checkpoints, 1)
    assert checkpoints.oldest_position() == 0
    save(checkpoints, 2)
    assert checkpoints.oldest_position() == 10


def test_a_checkpoint_that_is_gone_back_to_is_spared(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    spared = save(checkpoints, 1)
    aside = checkpoints.begin()
    facts = {
        "step": 2,
        "weights_version": "1",
        "metrics": {},
        "position": 20,
        "answers": b"",
        "estimates": None,
        "settings": {},
    }
    checkpoints.commit(aside, **facts)  # type: ignore[arg-type]
    checkpoints.prune({spared})
    assert names(tmp_path) == [spared, "checkpoint-000002-step-2"]


def cut(folder: Path) -> None:
    (folder / "part" / "model.bin").write_bytes(b"weig")


def change(folder: Path) -> None:
    (folder / "part" / "model.bin").write_bytes(b"wEights")


def lose(folder: Path) -> None:
    (folder / "part" / "model.bin").unlink()


def replace_by_folder(folder: Path) -> None:
    lose(folder)
    (folder / "part" / "model.bin").mkdir()


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def cut_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])


def change_position(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"position": 20', b'"position": 21'))


@pytest.mark.parametrize("damage", [cut, change, lose, replace_by_folder, lose_manifest, cut_manifest, change_position])
def test_a_damaged_newest_one_is_put_aside_loudly_and_the_one_before_taken(
    tmp_path: Path, damage, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    save(checkpoints, 1)
    newest = save(checkpoints, 2)
    damage(tmp_path / newest)
    with caplog.at_level(logging.ERROR):
        again = CheckpointFolder(tmp_path, keep=2)
        found = again.newest_whole()
    assert found is not None and found.info.step == 1
    assert again.has_damaged and "IS DAMAGED" in caplog.text and newest in caplog.text
    assert names(tmp_path) == ["checkpoint-000001-step-1", f"damaged-{newest}"]
    assert save(CheckpointFolder(tmp_path, keep=2), 3) == "checkpoint-000003-step-3"  # its number is not used again


def test_one_that_is_asked_for_is_verified(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    with pytest.raises(InvalidRequest, match="there are: none yet"):
        checkpoints.whole(None)
    first, second = save(checkpoints, 1), save(checkpoints, 2)
    assert checkpoints.whole(None).info.name == second
    assert checkpoints.whole(first).position == 10
    with pytest.raises(InvalidRequest, match=f"no checkpoint nobody; there are: {first}, {second}"):
        checkpoints.whole("nobody")
    change(tmp_path / first)
    with pytest.raises(DamagedCheckpoint, match=r"model\.bin has other bytes"):
        checkpoints.whole(first)


def test_what_a_crash_left_unfinished_is_removed_at_start(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    save(checkpoints, 1)
    aside = checkpoints.begin()
    (aside / "model.bin").write_bytes(b"half")
    again = CheckpointFolder(tmp_path, keep=2)
    assert names(tmp_path) == ["checkpoint-000001-step-1"]
    assert again.begin().name == aside.name


def test_a_folder_that_cannot_be_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="cannot keep checkpoints"):
        CheckpointFolder(tmp_path / "file" / "folder", keep=1)


@by_itself
def test_a_manifest_that_the_disk_cannot_take_leaves_the_older_ones(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    save(checkpoints, 1)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    aside = checkpoints.begin()
    with pytest.raises(OSError, match="File too large"):
        save(checkpoints, 2)
    checkpoints.discard(aside)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    save(checkpoints, 2)
    assert names(tmp_path) == ["checkpoint-000001-step-1", "checkpoint-000002-step-2"]
