"""The journal on a real disk: cut, damaged, emptied, locked and full."""

import logging
import resource
from pathlib import Path

import numpy as np
import pytest

from guerdon.errors import StartError, StorageFailed
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
    assert (first.position, first.previous, first.num_steps, first.checkpoint) == (position, 0, None, None)
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
    journal.withdraw(b)
    assert journal.position == 1
    fill(journal, "c")
    journal.close()
    assert read(tmp_path) == [(1, "a"), (3, "c")]


def test_a_request_that_broke_off_says_how_much_of_it_stands(tmp_path: Path, journal: Journal) -> None:
    _, b = fill(journal, "a", "b")
    journal.mark_done(b, num_steps=2)
    assert [(r.position, r.num_steps) for r in journal.records(0)] == [(1, None), (2, 2)]
    fill(journal, "c")
    assert [(r.position, r.num_steps, r.previous) for r in journal.records(1)] == [(2, 2, 1), (3, None, 2)]


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


def test_a_folder_that_cannot_be_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="cannot keep a journal"):
        Journal(tmp_path / "file" / "journal")


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
    for bit in [*range(8 * 64), *range(8 * 64, 8 * len(whole), 97)]:
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
