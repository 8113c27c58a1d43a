"""How a critic came to its weights: the journal, the checkpoints and the answers, and the way back after a crash.

A checkpoint says up to which record of the journal it has everything. So the state before a crash is the newest whole
checkpoint with the records behind it done again, and it does not matter between which two writes the crash came.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from guerdon.core import CheckpointInfo, Command, ModelInfo, Signal, TrainReport, TrainRequest
from guerdon.durable import storing
from guerdon.errors import InvalidRequest, RanksLost, StartError, StorageFailed, TrainFailed
from guerdon.server.critic.answers import Answer, Answers
from guerdon.server.critic.checkpoints import Checkpoint, Checkpoints, DamagedCheckpoint
from guerdon.server.critic.journal import Journal, Record
from guerdon.settings.config import LEARNING, CriticConfig

log = logging.getLogger(__name__)

# What decides, beside the requests and the weights at the beginning, which weights come out of them.
_SETTINGS = (*LEARNING, "attribute_weights", "mean", "std", "global_batch_size", "loss_clip_val")

_MEASURED = ("loss", "clip_fraction", "explained_variance", "grad_norm", "learning_rate")

Lead = Callable[[Command], Any]


class History:
    """What was done to one critic; without `config.checkpoint_dir` it keeps the answers alone.

    `info` is the model as it was loaded. `num_unsaved` counts the train requests since the newest checkpoint;
    `measured` is what the last one measured. The constructor takes the folder for itself; raises StartError where it
    cannot be had.
    """

    def __init__(self, config: CriticConfig, info: ModelInfo) -> None:
        self.answers = Answers()
        self.num_unsaved = 0
        self.measured: dict[str, float] = {}
        self.is_durable = config.checkpoint_dir is not None
        self._noting = threading.Lock()
        self._begun: int | None = None
        self._loss: RanksLost | None = None
        self._name = config.name
        # Not the model's folder, which may be moved, nor the dtype that was asked for, which may be `auto`.
        self._info = info
        self._settings: dict[str, Any] = {"weights": info.weights_version, "dtype": info.dtype}
        self._settings |= {name: getattr(config, name) for name in _SETTINGS}
        if config.checkpoint_dir is None:
            return
        folder = Path(config.checkpoint_dir)
        self._journal = Journal(folder / "journal")  # its lock guards the whole folder
        try:
            self._checkpoints = Checkpoints(folder, config.keep_checkpoints, config.keep_best, config.best_mode)
        except BaseException:
            self._journal.close()
            raise

    def close(self) -> None:
        """Gives the folder free."""
        if self.is_durable:
            self._journal.close()

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints, the oldest first."""
        return self._checkpoints.infos() if self.is_durable else []

    def accept(self, content: TrainRequest | str, digest: str = "") -> int:
        """Writes down what is about to be done, a train request or the return to a checkpoint: its position.

        Raises StorageFailed, and then it must not be done.
        """
        with self._alone():
            self._begun = self._journal.append(self._settings, content, digest) if self.is_durable else 0
            return self._begun

    def withdraw(self, position: int) -> None:
        """Takes back what was accepted, as nothing of it was done, before anyone is told; raises as `done`."""
        with self._alone():
            self._withdraw(position)

    def give_up(self, loss: RanksLost) -> None:
        """Takes back what was accepted and has not come to its end: this process ends, or has lost those that do it.

        From another thread than all else, which finds from now on that nothing is noted any more. Whoever asked is then
        told to ask again, and may do so without an id: so what is told must not be done at the next start. What was
        noted before is done, and its answer is on its way, or known to whoever asks again with the id.

        Raises StorageFailed where the disk keeps it: then whoever asked may not be told that.
        """
        with self._noting:
            self._loss = loss
            if self._begun is not None:
                self._withdraw(self._begun)

    def answer(self, id: str) -> Answer | None:  # noqa: A002 - what it is called everywhere
        """The answer to the train request of that id, if it is known; raises StorageFailed while it is not safe."""
        answer = self.answers.get(id)
        if answer is not None and self.is_durable:
            self._journal.settle()
        return answer

    def done(self, request: TrainRequest, position: int, answer: Answer) -> None:
        """Keeps the answer to an accepted train request, and how much of it was done, before anyone is told.

        Raises StorageFailed where the disk does not note it: then nobody may be told, until it does.
        """
        with self._alone():
            self.answers.put(request.id, answer)
            if answer.report is None and not answer.num_steps:
                self._withdraw(position)
                return
            self._begun = None
            self.num_unsaved += 1
            if answer.report is not None:
                self.measured = _measured(answer.report)
            if not self.is_durable:
                return
            if answer.report is None:
                self._journal.stop_at(position, answer.num_steps)
            else:
                self._journal.mark_done(position)

    def save(self, lead: Lead, facts: dict[str, Any], metrics: dict[str, float]) -> CheckpointInfo:
        """Makes a checkpoint of everything up to now, and lets go of what it replaces.

        Where the newest one has it all, with the same metrics, that is it: so a save can be asked for again. `facts`
        are the trainer's `step` and `weights_version`. Raises InvalidRequest where there is no folder for it,
        StorageFailed where the disk cannot take it; then the older checkpoints are as they were. Raises RanksLost where
        something was given up.
        """
        checkpoints = self._kept("saved")
        with self._alone():  # the weights have what was given up, where that came to its end nevertheless
            position = self._journal.position
        newest = checkpoints.newest_whole(at=position)
        if newest is not None and newest.info.metrics == metrics:
            return newest.info
        with storing("the checkpoint cannot be saved; the older ones are as they were"):
            aside = checkpoints.begin()
            try:
                lead(Command(Signal.SAVE, self._name, folder=str(aside)))
                info = checkpoints.commit(
                    aside,
                    step=facts["step"],
                    weights_version=facts["weights_version"],
                    metrics=metrics,
                    position=position,
                    answers=self.answers.to_json(),
                    settings=self._settings,
                )
            except BaseException as e:
                checkpoints.discard(aside)
                if isinstance(e, SafetensorError):  # so it tells of a full disk
                    raise OSError(0, str(e), str(aside)) from e
                raise
        self.num_unsaved = 0
        self._journal.forget(checkpoints.oldest_position())
        checkpoints.prune(spare=self._journal.checkpoints())
        return info

    def checkpoint(self, name: str | None) -> Checkpoint:
        """The whole checkpoint of that name, or the newest; raises InvalidRequest, for a damaged one, too."""
        try:
            return self._kept("loaded").whole(name)
        except DamagedCheckpoint as e:
            others = ", ".join(info.name for info in self.checkpoints() if info.name != e.name) or "none"
            raise InvalidRequest(f"checkpoint {e.name} is damaged: {e}; load another one, of: {others}") from e

    def gone_back(self, checkpoint: Checkpoint) -> None:
        """Takes over what the checkpoint has beside the weights: what came after it was not done in this state."""
        with self._alone():
            self._begun = None
            self.answers = Answers.from_json(checkpoint.answers())
            self.measured = {name: value for name, value in checkpoint.info.metrics.items() if name in _MEASURED}

    def restore(self, lead: Lead) -> None:
        """Brings the trainer to where it was: loads the newest whole checkpoint and does again what came after it.

        Raises StartError where something is missing or damaged without which this cannot be.
        """
        if not self.is_durable:
            return
        position = 0
        if (newest := self._checkpoints.newest_whole()) is not None:
            log.info("loading %s", newest.folder)
            lead(Command(Signal.LOAD, self._name, folder=str(newest.folder)))
            self.gone_back(newest)
            position = newest.position
        elif self._checkpoints.has_damaged and not self._journal.position:
            raise StartError(
                "all checkpoints are damaged, and the journal is empty",
                "restore one from a backup; or move the folder elsewhere, which gives up what was learnt",
            )
        self._journal.start_after(position)
        count = self._journal.count(position)
        for i, record in enumerate(self._journal.records(position), 1):
            what = f"train request {record.request.id}" if record.request else f"return to {record.checkpoint}"
            log.info("replaying the journal: %d of %d, %s", i, count, what)
            self._check_settings(record)
            try:
                self._replay(record, lead)
            except RanksLost:  # of which the record has no guilt: the next start does it
                raise
            except Exception as e:
                self._not_replayed(record, what, e)

    def _replay(self, record: Record, lead: Lead) -> None:
        if record.request is None:
            source = self.checkpoint(record.checkpoint)
            lead(Command(Signal.LOAD, self._name, folder=str(source.folder), lineage=record.position))
            self.gone_back(source)
            return
        command = Command(Signal.TRAIN, self._name, train=record.request, first_steps=record.num_steps)
        report: TrainReport = lead(command)
        if record.num_steps is None:
            answer = Answer(record.digest, report)
            if not record.is_done:
                self._done_again(record.request, record.position, answer)
                return
            self.measured = _measured(report)
        else:
            stand = f"broke off; the first {record.num_steps} of its global batches stand"
            answer = Answer(record.digest, None, f"train request {record.request.id} {stand}", record.num_steps)
        self.answers.put(record.request.id, answer)
        self.num_unsaved += 1

    def _done_again(self, request: TrainRequest, position: int, answer: Answer) -> None:
        """As `done`, of what had not come to its end before: only from now on it may be answered."""
        try:
            self.done(request, position, answer)
        except StorageFailed as e:
            log.error("train request %s: %s", request.id, e)

    def _not_replayed(self, record: Record, what: str, error: Exception) -> None:
        """Deals with a record that failed: as with any train request, if it can be the first time that it did."""
        if record.is_done or record.request is None or record.position != self._journal.position:
            raise StartError(
                f"record {record.position} of the journal ({what}) cannot be done again: {error}",
                "mend the cause (memory, a missing checkpoint) and start again, since it may have been acknowledged; "
                "to give it up, move it and all records behind it elsewhere",
            ) from error
        if isinstance(error, TrainFailed):
            log.warning("%s, which nobody was answered to, failed: %s", what, error)
            answer = Answer(record.digest, None, str(error), error.num_steps)
            self._done_again(record.request, record.position, answer)
            return
        self.withdraw(record.position)
        raise StartError(
            f"{what}, which nobody was answered to, broke the critic down: {error}",
            "start again: it was taken out of the journal",
        ) from error

    def _check_settings(self, record: Record) -> None:
        other = record.settings
        if self._info.is_named(other.get("weights", "")):
            other = other | {"weights": self._info.weights_version}
        differing = [k for k in {**other, **self._settings} if other.get(k) != self._settings.get(k)]
        if differing:
            then = ", ".join(f"{k} {other.get(k)}" for k in differing)
            now = ", ".join(f"{k} {self._settings.get(k)}" for k in differing)
            told = f"the journal was written with {then}; now: {now}"
            if "weights" in differing:
                raise StartError(
                    f"{told}: the model's files are others than they were",
                    "put back the files of then and start again; or begin anew, with these, in another "
                    "--checkpoint-dir (a checkpoint in the old one is a model that can be begun from, too)",
                )
            raise StartError(
                told,
                "start once more with the settings of then and save a checkpoint; it can be gone on from with others",
            )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A context in which something is noted; raises RanksLost where it was given up."""
        with self._noting:
            if self._loss is not None:
                raise copy.copy(self._loss)
            yield

    def _withdraw(self, position: int) -> None:
        self._begun = None
        if self.is_durable:
            self._journal.withdraw(position)

    def _kept(self, what: str) -> Checkpoints:
        if not self.is_durable:
            raise InvalidRequest(
                f"nothing can be {what}: the server has no folder for checkpoints; start it with --checkpoint-dir"
            )
        return self._checkpoints


def _measured(report: TrainReport) -> dict[str, float]:
    return {name: getattr(report, name) for name in _MEASURED}
