"""The journal and the checkpoints on a real disk: cut, damaged, emptied, locked and full."""

import logging
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from guerdon.errors import InvalidRequest, StartError, StorageFailed
from guerdon.server.critic.checkpoint_folder import CheckpointFolder, DamagedCheckpoint
from guerdon.server.critic.records import digest_of
from guerdon.server.critic.store import Journal
from processes import by_itself, end_of_child
from server.arithmetic_critic import request

SETTINGS = {"learning_rate": 0.1, "betas": [0.9, 0.98], "lora": None}


@pytest.fixture
def journal(tmp_path: Path):
    journal = Journal(tmp_path)
    yield journal
    journal.close()


def fill(journal: Journal, *ids: str) -> list[int]:
    asked = [request(name, 1, 2, 3) for name in ids]
    return [journal.append(SETTINGS, a, digest_of(a)) for a in asked]


def read(folder: Path, after: int = 0) -> list[tuple[int, str | None]]:
    journal = Journal(folder)
    try:
        return [(r.position, r.request.id if r.request else r.checkpoint) for r in journal.records(after)]
    finally:
        journal.close()


def test_a_record_comes_back_as_it_was_written(tmp_path: Path, journal: Journal) -> None:
    asked = request("a", 1.5, float("nan"), 3, length=7)
    asked.mask[1] = 0
    asked.updates = 4
    position = journal.append(SETTINGS, asked, digest_of(asked))
    journal.append(SETTINGS, "checkpoint-000001-step-3")
    journal.close()
    again = Journal(tmp_path)
    first, second = again.records(0)
    assert (first.position, first.previous, first.num_batches, first.checkpoint) == (position, 0, None, None)
    assert first.settings == SETTINGS and first.digest == digest_of(asked)
    assert first.request is not None and first.request.id == "a"
    assert first.request.updates == 4
    for name in ("tokens", "returns", "prev_values", "mask"):
        np.testing.assert_array_equal(getattr(first.request, name), getattr(asked, name))
        assert getattr(first.request, name).dtype == getattr(asked, name).dtype
    assert first.request.parents is None and first.request.lengths is None
    assert (second.request, second.checkpoint, second.previous) == (None, "checkpoint-000001-step-3", position)
    assert again.checkpoints() == {"checkpoint-000001-step-3"}


def test_a_record_of_trees_keeps_their_shape(tmp_path: Path, journal: Journal) -> None:
    asked = request("a", 1, 2, 3)
    flat = digest_of(asked)
    asked.parents, asked.lengths = np.array([-1, 0, 0]), np.array([2, 1, 2])
    other = digest_of(asked)
    asked.parents = np.array([-1, 0, 1])
    assert len({flat, other, digest_of(asked)}) == 3
    journal.append(SETTINGS, asked, digest_of(asked))
    journal.close()
    (record,) = Journal(tmp_path).records(0)
    assert record.request is not None and record.request.parents is not None and record.request.lengths is not None
    assert (record.request.parents.tolist(), record.request.lengths.tolist()) == ([-1, 0, 1], [2, 1, 2])


def test_the_digest_is_of_the_content_and_not_of_the_id() -> None:
    assert digest_of(request("a", 1, 2)) == digest_of(request("b", 1, 2))
    twice = request("a", 1, 2)
    twice.updates = 2
    for other in (request("a", 1, 3), request("a", 1, 2, length=4), request("a", 1, 2, first_token=9), twice):
        assert digest_of(other) != digest_of(request("a", 1, 2))


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1], ids=["nothing", "part of length", "length", "head", "all but 1"])
def test_a_cut_last_record_is_left_out_loudly_and_the_whole_ones_stay(
    tmp_path: Path, keep: int, caplog: pytest.LogCaptureFixture
) -> None:
    with_three = Journal(tmp_path)
    fill(with_three, "a", "b", "c")
    with_three.close()
    last = max(tmp_path.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:keep])
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path) == [(1, "a"), (2, "b")]
    assert "IT IS LEFT OUT" in caplog.text
    again = Journal(tmp_path)
    assert list(again.records(2)) == [] and again.position == 2
    assert fill(again, "d") == [3]
    again.close()


@pytest.mark.parametrize("place", [0, 20, 150, -1])
def test_a_single_changed_byte_is_seen(tmp_path: Path, place: int) -> None:
    journal = Journal(tmp_path)
    fill(journal, "a", "b")
    journal.close()
    last = max(tmp_path.glob("*.safetensors"))
    data = bytearray(last.read_bytes())
    data[place] ^= 1
    last.write_bytes(data)
    assert read(tmp_path) == [(1, "a")]


def test_a_damaged_record_before_whole_ones_stops_the_start(tmp_path: Path, journal: Journal) -> None:
    fill(journal, "a", "b", "c")
    (tmp_path / "000000000002.safetensors").write_bytes(b"nonsense")
    with pytest.raises(StartError, match="000000000002") as refused:
        list(journal.records(0))
    assert "backup" in refused.value.help
    assert [r.position for r in journal.records(2)] == [3]  # what a checkpoint holds need not be whole


def test_a_missing_record_is_noticed(tmp_path: Path, journal: Journal) -> None:
    fill(journal, "a", "b", "c")
    journal.close()
    (tmp_path / "000000000002.safetensors").unlink()
    again = Journal(tmp_path)
    with pytest.raises(
        StartError, match=r"000000000003.*done after record 2, but the state at hand is that of record 1"
    ):
        list(again.records(0))
    with pytest.raises(StartError):  # the checkpoint is older than what the journal goes on from
        list(again.records(1))


def test_what_was_withdrawn_is_gone_and_makes_no_gap(tmp_path: Path, journal: Journal) -> None:
    _, b = fill(journal, "a", "b")
    journal.remove(b)
    assert journal.position == 1
    fill(journal, "c")
    journal.close()
    assert read(tmp_path) == [(1, "a"), (3, "c")]


def test_a_request_that_broke_off_says_how_much_of_it_stands(tmp_path: Path, journal: Journal) -> None:
    _, b = fill(journal, "a", "b")
    journal.mark_done(b, num_batches=2)
    assert [(r.position, r.num_batches) for r in journal.records(0)] == [(1, None), (2, 2)]
    fill(journal, "c")
    assert [(r.position, r.num_batches, r.previous) for r in journal.records(1)] == [(2, 2, 1), (3, None, 2)]


def test_what_checkpoints_hold_is_forgotten_but_for_the_last(tmp_path: Path, journal: Journal) -> None:
    fill(journal, "a", "b", "c")
    journal.forget(2)
    assert [p.name for p in sorted(tmp_path.glob("*.safetensors"))] == ["000000000003.safetensors"]
    journal.forget(3)
    assert journal.position == 3 and journal.count(0) == 1
    journal.close()
    again = Journal(tmp_path)
    with pytest.raises(StartError):  # so an older checkpoint is not taken for the newest state
        list(again.records(1))
    assert fill(again, "d") == [4]


def test_numbers_go_on_behind_a_checkpoint_also_when_the_journal_is_gone(journal: Journal) -> None:
    journal.start_after(41)
    assert journal.position == 41
    assert fill(journal, "a") == [42]
    assert [r.previous for r in journal.records(41)] == [41]


def test_leftovers_of_a_crash_are_removed_and_never_read(tmp_path: Path) -> None:
    (tmp_path / ".aside-000000000001.safetensors").write_bytes(b"half a rec")
    assert read(tmp_path) == []
    assert not list(tmp_path.glob(".aside*"))


@by_itself
def test_two_servers_cannot_have_one_folder(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(StartError, match="another server") as refused:
        Journal(tmp_path)
    assert "checkpoint_dir" in refused.value.help
    assert end_of_child(lambda: Journal(tmp_path)) == 1
    journal.close()
    Journal(tmp_path).close()


@pytest.mark.parametrize(
    ("keep", "message"),
    [(Journal, "cannot keep a journal"), (partial(CheckpointFolder, keep=1), "cannot keep checkpoints")],
)
def test_a_folder_that_cannot_be_is_refused_at_start(keep: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=message):
        keep(tmp_path / "file" / "folder")


@by_itself
def test_a_record_that_the_disk_cannot_take_leaves_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    fill(journal, "a")
    size = max(p.stat().st_size for p in tmp_path.glob("*.safetensors"))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
    large = request("large", *range(100))
    with pytest.raises(StorageFailed) as refused:
        journal.append(SETTINGS, large, digest_of(large))
    names = sorted(p.name for p in tmp_path.iterdir())
    fill(journal, "b")
    journal.close()
    told = str(refused.value)
    assert "the journal cannot take it" in told and "File too large" in told and "nothing was changed" in told
    assert names == ["000000000001.safetensors", "lock"]
    assert read(tmp_path) == [(1, "a"), (3, "b")]


def test_a_return_may_have_been_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path)
    fill(journal, "a")
    journal.append(SETTINGS, "checkpoint-000001-step-3")
    journal.close()
    last = max(tmp_path.glob("*.safetensors"))
    whole = last.read_bytes()
    last.write_bytes(whole.replace(b"step-3", b"step-4"))
    with pytest.raises(StartError, match="had been answered"):
        read(tmp_path)
    last.write_bytes(whole[:-10])
    assert read(tmp_path) == [(1, "a")]
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]


def done(folder: Path, *ids: str) -> Path:
    """A journal whose requests were answered, closed; the path of its last record."""
    journal = Journal(folder)
    for position in fill(journal, *ids):
        journal.mark_done(position)
    journal.close()
    return max(folder.glob("*.safetensors"))


def test_no_flipped_bit_of_an_answered_record_is_taken_for_a_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    last = done(tmp_path, "a", "b")
    whole = last.read_bytes()
    # Each bit of the header's length, and then one of each byte or so, not always the same.
    for bit in [*range(8 * 8), *range(8 * 8, 8 * 64, 7), *range(8 * 64, 8 * len(whole), 97)]:
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        last.write_bytes(flipped)
        with pytest.raises(StartError, match="had been answered"):
            read(tmp_path)
        assert last.exists() and not caplog.records, bit


def test_every_cut_of_an_answered_record_is_left_out_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    last = done(tmp_path, "a", "b")
    whole = last.read_bytes()
    for size in [*range(60), *range(60, len(whole), 13), len(whole) - 1]:
        caplog.clear()
        last.write_bytes(whole[:size])
        assert len(read(tmp_path)) == 1, size
        assert [record.levelname for record in caplog.records] == ["CRITICAL"], size


def save(checkpoints: CheckpointFolder, step: int, content: bytes = b"weights", **metrics: float) -> str:
    aside = checkpoints.begin()
    (aside / "part").mkdir()
    (aside / "part" / "model.bin").write_bytes(content)
    info = checkpoints.commit(
        aside, step=step, weights_version=f"1+{step}", metrics=metrics, position=10 * step, answers=b"{}",
        estimates=b"tables" if step % 2 else None, settings={"lora": None},
    )  # fmt: skip
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
