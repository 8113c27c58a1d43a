"""What a critic comes back to after its server ended, with its folder as it was left, or damaged by hand."""

import dataclasses
import errno
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from guerdon.core import ModelInfo
from guerdon.critic_core import Operation, TrainReport, TrainRequest
from guerdon.errors import CheckpointError, InvalidRequest, ServerFault, StartError, StorageFailed, TrainFailed
from guerdon.server import status
from guerdon.settings.config import FREEZING, LearningConfig
from server.arithmetic_critic import FAIL_TOKEN, ArithmeticTrainer, after, request
from server.driving import SAVE, Driver, run

A, B, C, D, E = (request(name, value) for name, value in zip("abcde", (3, 5, 7, 11, 13), strict=True))


def checkpoint(folder: Path, number: int) -> Path:
    (found,) = folder.glob(f"checkpoint-{number:06d}-*")
    return found


def records(folder: Path) -> list[int]:
    return sorted(int(path.name[:12]) for path in (folder / "journal").glob("*.safetensors"))


def damage(folder: Path) -> None:
    (folder / "weight.json").write_bytes(b'{"weight": 0}')


def test_without_a_checkpoint_the_journal_alone_gives_the_state_back(tmp_path: Path) -> None:
    with Driver(tmp_path) as critic:
        reports = [critic.train(asked) for asked in (A, B, C)]
        before = critic.state(), critic.values(1)
    with Driver(tmp_path) as critic:
        assert (critic.state(), critic.values(1)) == before
        assert critic.trainer.trained == ["a", "b", "c"]
        assert str(critic.train(B)) == str(reports[1])  # as texts, since NaN is not equal to itself
        assert critic.train(D).step == 4
        assert critic.trainer.weight == after([A, B, C, D])
        assert critic.trainer.trained == ["a", "b", "c", "d"]


def test_a_checkpoint_and_the_records_behind_it_give_the_state_and_all_answers_back(tmp_path: Path) -> None:
    with Driver(tmp_path) as critic:
        reports = [critic.train(asked) for asked in (A, B)]
        critic.ask(Operation.SAVE, metrics={"reward": 1.5})
        reports.append(critic.train(C))
        before = critic.state()
    with Driver(tmp_path) as critic:
        assert critic.trainer.trained == ["c"]
        assert critic.state() == before and before.num_unsaved == 1
        assert list(map(str, map(critic.train, (A, B, C)))) == list(map(str, reports))
        with pytest.raises(InvalidRequest, match="'a' was used"):
            critic.train(request("a", 1))
        assert critic.trainer.weight == after([A, B, C])


def test_answers_are_kept_as_they_were(tmp_path: Path) -> None:
    bad = request("bad", 1, 2, 3)
    bad.tokens[1, 0] = FAIL_TOKEN
    with Driver(tmp_path, global_batch_size=1) as critic:
        with pytest.raises(TrainFailed) as first:
            critic.train(bad)
        critic.ask(Operation.SAVE)
    with Driver(tmp_path, global_batch_size=1) as critic:
        with pytest.raises(TrainFailed) as again:
            critic.train(bad)
        assert (str(again.value), again.value.num_steps) == (str(first.value), 1)
        assert critic.trainer.trained == []


def test_positions_go_on_behind_a_checkpoint_whose_journal_is_empty_or_gone(tmp_path: Path) -> None:
    run(tmp_path, A, B, SAVE, keep_checkpoints=1)
    shutil.rmtree(tmp_path / "journal")
    for asked in (C, D):
        run(tmp_path, asked, keep_checkpoints=1)
    assert records(tmp_path) == [3, 4]
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A, B, C, D])


def test_with_the_newest_checkpoint_damaged_the_one_before_and_the_journal_give_the_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, A, SAVE, B, SAVE, C, SAVE, D)
    assert records(tmp_path) == [3, 4]
    damage(checkpoint(tmp_path, 3))
    with caplog.at_level(logging.ERROR), Driver(tmp_path) as critic:
        assert "IS DAMAGED: weight.json" in caplog.text
        assert critic.trainer.trained == ["c", "d"]
        assert critic.trainer.weight == after([A, B, C, D]) and critic.trainer.step == 4
        assert [info.step for info in critic.state().checkpoints] == [2]
        critic.ask(Operation.SAVE)
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A, B, C, D])


def test_with_the_only_checkpoint_damaged_the_whole_journal_gives_the_state(tmp_path: Path) -> None:
    run(tmp_path, A, SAVE, B)
    damage(checkpoint(tmp_path, 1))
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A, B])


@pytest.mark.parametrize("num_behind", [0, 1])
def test_a_state_that_cannot_be_had_stops_the_start_and_is_never_silently_an_older_one(
    tmp_path: Path, num_behind: int
) -> None:
    with Driver(tmp_path, keep_checkpoints=1, keep_best="loss", keep_best_mode="min") as critic:
        critic.train(A)
        critic.ask(Operation.SAVE, metrics={"loss": -1})
        critic.do(B, C, SAVE)
        for asked in (D, E)[:num_behind]:
            critic.train(asked)
        assert [info.step for info in critic.state().checkpoints] == [1, 3]
    damage(checkpoint(tmp_path, 2))
    with pytest.raises(StartError, match="the state at hand is that of record 1") as refused:
        Driver(tmp_path)
    assert "backup" in refused.value.help and "journal" in refused.value.help


def test_with_all_checkpoints_damaged_and_no_journal_nothing_starts_from_scratch(tmp_path: Path) -> None:
    run(tmp_path, A, SAVE)
    shutil.rmtree(tmp_path / "journal")
    damage(checkpoint(tmp_path, 1))
    for _ in range(2):  # also when it was put aside before
        with pytest.raises(StartError, match="all checkpoints are damaged"):
            Driver(tmp_path)


def test_a_journal_of_other_settings_is_not_replayed(tmp_path: Path) -> None:
    run(tmp_path, A, learning_rate=0.5)
    with pytest.raises(StartError, match=r"written with learning_rate 0\.5; now: learning_rate 0\.25") as refused:
        Driver(tmp_path, learning_rate=0.25)
    assert "save a checkpoint" in refused.value.help
    with Driver(tmp_path, learning_rate=0.5, max_batch_tokens=7) as critic:
        critic.ask(Operation.SAVE)
    run(tmp_path, B, learning_rate=0.25)
    with Driver(tmp_path, learning_rate=0.25) as critic:
        assert critic.trainer.weight == after([A, B])


@pytest.mark.parametrize("name", [*(field.name for field in dataclasses.fields(LearningConfig)), *FREEZING])
def test_no_setting_of_learning_is_forgotten(tmp_path: Path, name: str) -> None:
    run(tmp_path, A)
    if name == "activation_checkpointing":  # which computes the same
        Driver(tmp_path, **{name: True}).close()
        return
    with pytest.raises(StartError, match=f"written with {name} .*; now: {name} another"):
        Driver(tmp_path, **{name: "another"})


FAILS_LATER = request("x", 2, 4, 6)
FAILS_LATER.tokens[1, 0] = LATER = 80_000


def fails_now(patch: pytest.MonkeyPatch) -> None:
    """As where memory has become less: what was done before fails at its second global batch."""
    patch.setattr("server.arithmetic_critic.FAIL_TOKEN", LATER)


@pytest.mark.parametrize("behind", [[], [B]])
def test_a_record_that_may_have_been_answered_is_never_given_up(
    tmp_path: Path, behind: list[TrainRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, A, FAILS_LATER, *behind, global_batch_size=1)
    with monkeypatch.context() as patch:
        fails_now(patch)
        for _ in range(2):
            with pytest.raises(
                StartError, match=r"record 2 .*request x\) cannot be done again: global batch 1"
            ) as told:
                Driver(tmp_path, global_batch_size=1)
    assert "acknowledged" in told.value.help
    with Driver(tmp_path, global_batch_size=1) as critic:
        assert critic.trainer.weight == after([A, FAILS_LATER, *behind], 1)


def last_record(folder: Path) -> Path:
    return max((folder / "journal").glob("*.safetensors"))


def test_an_answered_last_record_that_is_cut_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, A, B, C)
    last = last_record(tmp_path)
    last.write_bytes(last.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING), Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A, B]) and critic.trainer.step == 2
    (said,) = (record for record in caplog.records if record.levelno == logging.CRITICAL)
    assert "ALTHOUGH IT WAS ANSWERED" in said.getMessage() and last.name in said.getMessage()


def test_an_answered_last_record_with_wrong_content_stops_the_start(tmp_path: Path) -> None:
    run(tmp_path, A, B)
    last = last_record(tmp_path)
    whole = last.read_bytes()
    last.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for _ in range(2):
        with pytest.raises(StartError, match=f"{last.name} is damaged .*had been answered") as refused:
            Driver(tmp_path)
    assert "backup" in refused.value.help
    last.write_bytes(whole)
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A, B])


def test_nobody_is_answered_before_the_mark_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Driver(tmp_path) as critic:
        critic.train(A)
        trains = critic.trainer.train
        with monkeypatch.context() as patch:

            def train_and_break(*more: Any) -> TrainReport:
                patch.setattr("guerdon.server.critic.store.sync", broken)
                return trains(*more)

            critic.trainer.train = train_and_break  # type: ignore[method-assign]
            for asked in (B, B, A, C):  # once it is done, known, known from before, and new
                with pytest.raises(StorageFailed, match="cannot record how a train request ended"):
                    critic.train(asked)
        critic.trainer.train = trains  # type: ignore[method-assign]
        assert critic.train(B).step == 2 and critic.trainer.trained == ["a", "b"]
        critic.train(C)
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A, B, C])


def test_what_was_done_again_at_a_start_is_not_given_up_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, A, FAILS_LATER, global_batch_size=1)
    unmark_last(tmp_path)
    with Driver(tmp_path, global_batch_size=1) as critic:
        critic.train(FAILS_LATER)  # it is answered now
    fails_now(monkeypatch)
    with pytest.raises(StartError, match="cannot be done again"):
        Driver(tmp_path, global_batch_size=1)


def test_what_was_measured_last_is_measured_after_a_restart(tmp_path: Path) -> None:
    with Driver(tmp_path) as critic:
        critic.do(A, SAVE)
        loss = critic.train(request("far", 100)).loss
    with Driver(tmp_path) as critic:
        assert f'guerdon_critic_loss{{critic="critic"}} {loss}' in critic.service.metrics.render().decode()
        assert critic.ask(Operation.SAVE).metrics["loss"] == loss


def test_a_save_that_is_due_after_a_restart_is_made(tmp_path: Path) -> None:
    run(tmp_path, A, B, C)
    with Driver(tmp_path, save_every=3) as critic:
        assert [info.step for info in critic.state().checkpoints] == [3]


def test_a_model_whose_folder_was_moved_goes_on_and_another_dtype_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, A, dtype="auto")
    with Driver(tmp_path, dtype="float32", revision="main") as critic:  # which auto came to
        critic.train(B)
    for change, told in (
        ({"dtype": "bfloat16"}, "dtype float32; now: dtype bfloat16"),
        ({"weights_version": "2"}, "weights 1; now: weights 2"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(
                "server.arithmetic_critic.ModelInfo", lambda *a, c=change, **more: ModelInfo(*a, **(more | c))
            )
            with pytest.raises(StartError, match=f"written with {told}"):
                Driver(tmp_path)


def test_a_checkpoint_of_other_settings_is_the_callers_error(tmp_path: Path) -> None:
    with Driver(tmp_path) as critic:
        critic.do(A, SAVE)

        def load(*_: Any) -> None:
            raise CheckpointError("it was made with lora 4", "start with lora 4")

        critic.trainer.load = load  # type: ignore[method-assign]
        with pytest.raises(InvalidRequest, match="it was made with lora 4; start with lora 4"):
            critic.ask(Operation.LOAD)
        assert records(tmp_path) == [1]


def unmark_last(folder: Path) -> None:
    """Leaves the journal as a crash does in the middle of its last train request."""
    last = last_record(folder)
    last.rename(last.with_name(f"{last.name[:12]}.safetensors"))


def test_what_was_never_answered_may_fail_at_the_start_as_it_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, A, FAILS_LATER, global_batch_size=1)
    unmark_last(tmp_path)
    fails_now(monkeypatch)
    for _ in range(2):
        with Driver(tmp_path, global_batch_size=1) as critic:
            with pytest.raises(TrainFailed) as failed:
                critic.train(FAILS_LATER)
            assert failed.value.num_steps == 1
            assert critic.trainer.weight == after([A, request("", 2)], 1)


def test_a_replay_that_spoils_the_weights_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, A, FAILS_LATER, global_batch_size=1)
    unmark_last(tmp_path)
    fails_now(monkeypatch)
    trains = ArithmeticTrainer.train

    def train_and_spoil(trainer: ArithmeticTrainer, *more: Any) -> TrainReport:
        try:
            return trains(trainer, *more)
        except TrainFailed:
            trainer.broken = "a step broke off inside the optimiser"
            raise

    with monkeypatch.context() as patch:
        patch.setattr(ArithmeticTrainer, "train", train_and_spoil)
        with Driver(tmp_path, global_batch_size=1) as critic:
            assert not status.is_ready(critic.service)
            assert "inside the optimiser" in status.why_not_ready(critic.service)
            assert 'guerdon_critic_fault{critic="critic"} 1.0' in critic.service.metrics.render().decode()
            with pytest.raises(ServerFault, match="inside the optimiser"):
                critic.train(B)
    with Driver(tmp_path, global_batch_size=1) as critic:
        assert status.is_ready(critic.service) and critic.trainer.weight == after([A, request("", 2)], 1)


def test_an_unanswered_record_that_breaks_the_trainer_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, A, FAILS_LATER, global_batch_size=1)
    unmark_last(tmp_path)
    monkeypatch.setattr("server.arithmetic_critic.BUG_TOKEN", LATER)
    with pytest.raises(StartError, match="request x, which was never answered, corrupted the critic: a bug") as told:
        Driver(tmp_path, global_batch_size=1)
    assert told.value.help.startswith("start again")
    with Driver(tmp_path, global_batch_size=1) as critic:
        assert critic.trainer.weight == after([A], 1)


def test_going_back_to_a_checkpoint_is_a_branch_with_versions_of_its_own(tmp_path: Path) -> None:
    with Driver(tmp_path) as critic:
        critic.train(A)
        first = critic.ask(Operation.SAVE)
        critic.train(B)
        old = critic.values(1)
        loaded = critic.ask(Operation.LOAD, checkpoint=first.name)
        assert (loaded.number, loaded.step) == (2, 1)
        assert critic.trainer.weight == after([A])
        critic.train(C)
        new = critic.values(1)
        assert new == ([after([A, C])], "1+2.3") and old == ([after([A, B])], "1+2")
        report = critic.train(B)  # it was not done in this state
        assert report.step == 3 and critic.trainer.weight == after([A, C, B])
        assert critic.train(A).step == 1
        with pytest.raises(InvalidRequest, match=f"no checkpoint nobody; there are: {first.name}, {loaded.name}"):
            critic.ask(Operation.LOAD, checkpoint="nobody")
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A, C, B]) and critic.values(1)[1] == "1+3.3"
        assert str(critic.train(B)) == str(report)
        again = critic.ask(Operation.LOAD, checkpoint=first.name)
        assert again.weights_version == "1+1.6"


def test_a_return_is_replayed_if_the_checkpoint_after_it_is_damaged(tmp_path: Path) -> None:
    with Driver(tmp_path) as critic:
        critic.train(A)
        first = critic.ask(Operation.SAVE)
        critic.train(B)
        critic.ask(Operation.LOAD, checkpoint=first.name)
        critic.train(C)
        before = critic.state(), critic.values(1)
    damage(checkpoint(tmp_path, 2))
    with Driver(tmp_path) as critic:
        assert critic.values(1) == before[1] and critic.trainer.weight == after([A, C])
        assert critic.trainer.trained == ["b", "c"]
        assert critic.train(B).step == 3


def test_the_checkpoint_that_a_record_returns_to_is_spared(tmp_path: Path) -> None:
    with Driver(tmp_path, keep_checkpoints=2) as critic:
        critic.train(A)
        first = critic.ask(Operation.SAVE)
        critic.do(B, SAVE, C)
        critic.ask(Operation.LOAD, checkpoint=first.name)  # a third one
        critic.train(D)
        assert [info.number for info in critic.state().checkpoints] == [1, 2, 3]
    damage(checkpoint(tmp_path, 3))
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A, D]) and critic.trainer.trained == ["c", "d"]
        critic.do(E, SAVE, request("f", 1), SAVE)
        assert [info.number for info in critic.state().checkpoints] == [4, 5]


def test_a_damaged_checkpoint_is_not_gone_back_to(tmp_path: Path) -> None:
    with Driver(tmp_path) as critic:
        critic.train(A)
        first = critic.ask(Operation.SAVE)
        critic.train(B)
        second = critic.ask(Operation.SAVE)
        damage(checkpoint(tmp_path, 1))
        damaged = rf"checkpoint {first.name} is damaged: weight\.json .*; load another one, of: {second.name}$"
        with pytest.raises(InvalidRequest, match=damaged):
            critic.ask(Operation.LOAD, checkpoint=first.name)
        assert critic.trainer.weight == after([A, B]) and records(tmp_path) == [2]


def test_a_save_may_be_asked_for_again(tmp_path: Path) -> None:
    with Driver(tmp_path) as critic:
        empty = critic.ask(Operation.SAVE)
        assert (empty.step, empty.number) == (0, 1)
        critic.train(A)
        first = critic.ask(Operation.SAVE)
        assert critic.ask(Operation.SAVE) == first
        assert critic.ask(Operation.SAVE, metrics={"reward": 1}).number == 3
    with Driver(tmp_path) as critic:
        assert critic.ask(Operation.SAVE, metrics={"reward": 1}).number == 3
        damage(checkpoint(tmp_path, 3))
        assert critic.ask(Operation.SAVE, metrics={"reward": 1}).number == 4
        assert [info.number for info in critic.state().checkpoints] == [2, 4]
