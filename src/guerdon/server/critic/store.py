"""A critic's durable state: journal, checkpoints, outcomes, and recovery after a crash.

A checkpoint says up to which journal record it has everything. So the state before a crash is the newest whole
checkpoint with the later records applied again, no matter between which two writes the crash came.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors import SafetensorError
from safetensors.numpy import load as unpack
from safetensors.numpy import save as pack

from guerdon.core import Command, ModelInfo, Signal
from guerdon.critic_core import CheckpointInfo, TrainReport, TrainRequest
from guerdon.durable import ASIDE, DAMAGED, locked, make_folder, storing, sync, write_new
from guerdon.errors import InvalidRequest, RanksLost, StartError, StorageFailed, TrainFailed
from guerdon.server.critic.checkpoint_folder import Checkpoint, CheckpointFolder, DamagedCheckpoint
from guerdon.server.critic.records import NAME, Record, decode_record, encode_record, is_cut, read_checkpoint
from guerdon.settings.config import FREEZING, LEARNING, CriticConfig
from guerdon.wire import critic_tensors

log = logging.getLogger(__name__)

MOST_OUTCOMES = 10_000
"""An id older than this many train requests would be applied as a new one."""

MOST_KEPT_BYTES = 256 << 20
"""Older answers are dropped, but never the newest; a client asks again for the one that it waits for."""

_SETTINGS = (*LEARNING, *FREEZING, "attribute_weights", "mean", "std", "global_batch_size", "loss_clip_val")
"""Facts that determine the weights, beside the requests and the initial weights."""

MEASURED = ("loss", "explained_variance", "value_mean", "return_mean", "clip_fraction", "grad_norm", "learning_rate")
"""Fields of a report in metrics, checkpoints and the page."""

Lead = Callable[[Command], Any]


@dataclass(slots=True)
class TrainOutcome:
    """A train request's outcome: its report, or its error and the number of applied global batches."""

    digest: str
    report: TrainReport | None = None
    failure: str = ""
    num_batches: int = 0

    def report_for(self, id: str, digest: str) -> TrainReport:  # noqa: A002 - what it is called everywhere
        """Returns the report or raises the failure; InvalidRequest if another request has the same id."""
        if digest != self.digest:
            raise reused_id(id)
        if self.report is None:
            raise TrainFailed(self.failure, self.num_batches)
        return self.report


def reused_id(id: str) -> InvalidRequest:  # noqa: A002
    """Returns the error for a train request with the id of another one."""
    return InvalidRequest(f"train_id {id!r} was used for another request; give every request an id of its own")


class Journal:
    """The records in `folder`, numbered upwards, each written before it is done; locks the folder until `close`.

    A file's name says its record's state: `000000000012.safetensors` is not finished, `000000000012-done` is finished,
    `-stopped-2` broke off after two global batches, `-return` went back to a checkpoint. A record names the one before
    it, so that a gap is seen. Raises StartError if another server has the folder, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._owed: dict[Path, Path | None] = {}  # not on the disk yet: each file's new name, None to remove it
        try:
            make_folder(folder)
            if not os.access(folder, os.W_OK):
                raise OSError(errno.EROFS, "it cannot be written")
            self._lock = locked(folder / "lock")
            for leftover in folder.glob(ASIDE + "*"):
                leftover.unlink()
        except BlockingIOError:
            raise StartError(
                f"another server works on {folder}", "stop it, or give each critic a checkpoint_dir of its own"
            ) from None
        except OSError as e:
            raise StartError(
                f"cannot keep a journal in {folder}: {e.strerror}", "give a checkpoint_dir that can be written"
            ) from e
        self._paths = {int(match[1]): path for path in folder.iterdir() if (match := NAME.fullmatch(path.name))}
        self._next = max(self._paths, default=0) + 1
        self._base = 0

    @property
    def position(self) -> int:
        """The position of the last record."""
        return max(self._base, *self._paths, 0)

    def start_after(self, position: int) -> None:
        """Numbers new records after a checkpoint's position, even if the journal's own records end before it."""
        self._base = position
        self._next = max(self._next, position + 1)

    def append(self, settings: dict[str, Any], content: TrainRequest | str, digest: str = "") -> int:
        """Writes a record of a train request and its digest, or of a return to the named checkpoint.

        Returns its position once it is durable. Raises StorageFailed if the disk refuses it; what it wrote of it is
        removed, at the latest before the next record.
        """
        self.settle()
        position = self._next
        kind = "-return" if isinstance(content, str) else ""
        path = self._folder / f"{position:012d}{kind}.safetensors"
        data = encode_record({"position": position, "previous": self.position, "settings": settings}, content, digest)
        self._next += 1
        with storing("the journal cannot take it, so that nothing was changed"):
            try:
                write_new(path, data)
            except OSError:
                self._remove_file(path)
                raise
        self._paths[position] = path
        return position

    def remove(self, position: int) -> None:
        """Removes the record of a request that changed nothing; raises StorageFailed as `mark_done`."""
        self._remove_file(self._paths.pop(position))

    def mark_done(self, position: int, num_batches: int | None = None) -> None:
        """Marks a train request as finished, or as broken off after `num_batches` global batches; durable on return.

        Nobody is answered before. Raises StorageFailed; then `settle` must succeed before anyone is.
        """
        path = self._paths[position]
        mark = "done" if num_batches is None else f"stopped-{num_batches}"
        self._owed[path] = self._paths[position] = path.with_name(f"{position:012d}-{mark}.safetensors")
        self.settle()

    def settle(self) -> None:
        """Catches up on marks and removals that the disk refused; raises StorageFailed while it still does."""
        if not self._owed:
            return
        with storing("the journal cannot record how a train request ended; until it can, none is accepted or answered"):
            for path, renamed in list(self._owed.items()):
                if path.exists():
                    path.rename(renamed) if renamed else path.unlink()
                sync(self._folder)
                del self._owed[path]

    def records(self, after: int) -> Iterator[Record]:
        """Yields the whole records after that position, in order.

        Drops, with a warning, a last record that is cut, or damaged and never answered. Raises StartError for one that
        is damaged and may have been answered, and for a damaged or missing one before others.
        """
        previous = after
        for position in sorted(p for p in self._paths if p > after):
            path = self._paths[position]
            try:
                record = decode_record(path)
                if record.position != position:
                    raise ValueError(f"it is record {record.position}")
            except OSError as e:
                raise StartError(f"cannot read {path}: {e.strerror}", "mend the disk, or its permissions") from e
            except (SafetensorError, ValueError, KeyError, TypeError) as e:
                self._leave_out(position, e)
                return
            if record.previous != previous:
                raise StartError(
                    f"record {path} was done after record {record.previous}, but the state at hand is that of "
                    f"record {previous}",
                    "restore the newest checkpoint or the missing records from a backup; or move the folder "
                    f"{self._folder} elsewhere, which gives up what it holds",
                )
            previous = position
            yield record

    def count(self, after: int) -> int:
        """Returns the number of records after that position."""
        return sum(position > after for position in self._paths)

    def checkpoints(self) -> set[str]:
        """Returns the checkpoints that its records return to."""
        return {read_checkpoint(path) for path in self._paths.values() if path.stem.endswith("-return")}

    def forget(self, upto: int) -> None:
        """Removes the records up to that position, which checkpoints hold, but never the last of all.

        The last one shows at a start whether a checkpoint is as new as the journal.
        """
        try:
            for position in sorted(p for p in self._paths if p <= upto and p != self.position):
                self._paths[position].unlink()
                del self._paths[position]
        except OSError as e:  # harmless: what a checkpoint holds is not replayed
            log.warning("cannot remove old records of the journal: %s", e)

    def close(self) -> None:
        """Unlocks the folder."""
        self._lock.close()

    def _leave_out(self, position: int, why: Exception) -> None:
        """Sets a damaged record aside if `records` may drop it; else raises StartError."""
        path = self._paths[position]
        if position != max(self._paths):
            raise StartError(
                f"record {path} is damaged ({why}), and others follow it",
                "restore it from a backup; or move all records from it on elsewhere, which gives them up",
            ) from why
        may_be_answered = path.stem != f"{position:012d}"  # a return has no mark of its end
        if not may_be_answered:
            log.warning("the last record of the journal, %s, is damaged (%s): IT IS LEFT OUT", path, why)
        elif is_cut(path):
            log.critical(
                "the last record of the journal, %s, is truncated (%s): IT IS LEFT OUT ALTHOUGH IT WAS ANSWERED: an "
                "acknowledged update is lost",
                path,
                why,
            )
        else:
            raise StartError(
                f"record {path} is damaged ({why}), and it had been answered",
                "restore it from a backup; or move it elsewhere, which gives it up",
            ) from why
        path.rename(path.with_name(DAMAGED + path.name))
        del self._paths[position]

    def _remove_file(self, path: Path) -> None:
        self._owed[path] = None
        self.settle()


class AnsweredEstimates:
    """Advantages and returns of the masked tokens of the newest train requests, by id; at most MOST_KEPT_BYTES."""

    def __init__(self, data: bytes | None = None) -> None:
        """`data` is what `dumps` returned."""
        tables = {} if data is None else unpack(data)
        # safetensors does not keep the order.
        self._tables = {name.split("/", 1)[1]: tables[name] for name in sorted(tables)}

    def dumps(self) -> bytes | None:
        """Returns all of it as bytes; None if there is nothing."""
        if not self._tables:
            return None
        return pack({f"{i:06d}/{name}": table for i, (name, table) in enumerate(self._tables.items())})

    def keep(self, request: TrainRequest) -> None:
        """Keeps the request's estimates, if it has rewards."""
        if request.advantages is None:
            return
        counts = request.mask > 0
        self.drop(request.id)
        self._tables[request.id] = np.stack([request.advantages[counts], request.returns[counts]])
        while len(self._tables) > 1 and sum(table.nbytes for table in self._tables.values()) > MOST_KEPT_BYTES:
            del self._tables[next(iter(self._tables))]

    def drop(self, name: str) -> None:
        """Drops the kept estimates of the request of that id, if any."""
        self._tables.pop(name, None)

    def complete(self, report: TrainReport, request: TrainRequest) -> TrainReport:
        """Returns the report with the advantages and returns of the request, if that has rewards.

        Raises InvalidRequest if they are not kept any more.
        """
        if request.rewards is None:
            return report
        if (table := self._tables.get(request.id)) is None:
            raise InvalidRequest(
                f"train request {request.id!r} was applied (the critic was at step {report.step} then), but its "
                "advantages are not kept any more: those of the newest requests are, "
                f"{MOST_KEPT_BYTES >> 20} MiB of them"
            )
        advantages, returns = np.zeros((2, *request.mask.shape), np.float32)
        advantages[request.mask > 0], returns[request.mask > 0] = table
        return dataclasses.replace(report, advantages=advantages, returns=returns)


class Store:
    """Keeps one critic's journal, checkpoints and outcomes; without `config.checkpoint_dir` only the outcomes.

    `info` is the model as it was loaded. `num_unsaved` counts the train requests since the newest checkpoint;
    `measured` has the last one's measurements. Locks the folder; raises StartError if it cannot be used.
    """

    def __init__(self, config: CriticConfig, info: ModelInfo) -> None:
        self.num_unsaved = 0
        self.measured: dict[str, float] = {}
        self.is_durable = config.checkpoint_dir is not None
        self._outcomes: dict[str, TrainOutcome] = {}
        self._answered = AnsweredEstimates()
        self._lock = threading.Lock()
        self._begun: int | None = None
        self._loss: RanksLost | None = None
        self._name = config.name
        # Not the model's folder, which may be moved, nor the dtype that was asked for, which may be `auto`.
        self._settings: dict[str, Any] = {"weights": info.weights_version.partition("+")[0], "dtype": info.dtype}
        self._settings |= {name: getattr(config, name) for name in _SETTINGS}
        if config.checkpoint_dir is None:
            return
        folder = Path(config.checkpoint_dir)
        self._journal = Journal(folder / "journal")  # its lock guards the whole folder
        try:
            self._checkpoints = CheckpointFolder(folder, config.keep_checkpoints, config.keep_best, config.best_mode)
        except BaseException:
            self._journal.close()
            raise

    def close(self) -> None:
        """Unlocks the folder."""
        if self.is_durable:
            self._journal.close()

    def checkpoints(self) -> list[CheckpointInfo]:
        """Returns all checkpoints, the oldest first."""
        return self._checkpoints.infos() if self.is_durable else []

    # ------------------------------------------------------------------------ one train request, or one return

    def accept(self, content: TrainRequest | str, digest: str = "") -> int:
        """Journals a train request, or the return to a checkpoint, and returns its position.

        Raises StorageFailed; then it must not be done.
        """
        with self._writing():
            self._begun = self._journal.append(self._settings, content, digest) if self.is_durable else 0
            return self._begun

    def keep_estimates(self, request: TrainRequest) -> None:
        """Keeps a trained request's advantages and returns; before `finish`, for from then on it may not fail."""
        self._answered.keep(request)

    def finish(self, request: TrainRequest, position: int, outcome: TrainOutcome) -> None:
        """Records the outcome of an accepted train request before it is acknowledged.

        Raises StorageFailed if the disk refuses; then nothing may be acknowledged until `Journal.settle` succeeds.
        """
        with self._writing():
            self._keep(request, outcome)
            if outcome.report is None and not outcome.num_batches:
                self._remove_record(position)
                return
            self._begun = None
            self.num_unsaved += 1
            if outcome.report is not None:
                self.measured = _measured(outcome.report)
            if self.is_durable:
                self._journal.mark_done(position, None if outcome.report is not None else outcome.num_batches)

    def withdraw(self, position: int) -> None:
        """Withdraws an accepted request that changed nothing, before its client is answered; raises as `finish`."""
        with self._writing():
            self._remove_record(position)

    def give_up(self, loss: RanksLost) -> None:
        """Withdraws unfinished requests, because this process ends or has lost its ranks; thread-safe.

        From then on all else raises the loss. Clients may retry, possibly without an id, so the next start must not
        replay refused requests. Requests marked as done stay done: their answers are known by their ids.

        Raises StorageFailed if the record cannot be removed; then clients must not retry.
        """
        with self._lock:
            self._loss = loss
            if self._begun is not None:
                self._remove_record(self._begun)

    def outcome(self, id: str) -> TrainOutcome | None:  # noqa: A002 - what it is called everywhere
        """Returns the outcome of the train request with that id, if known; raises StorageFailed while it is unsafe."""
        outcome = self._outcomes.get(id)
        if outcome is not None and self.is_durable:
            self._journal.settle()
        return outcome

    def reports(self) -> list[TrainReport]:
        """Returns the reports of the finished train requests that are known, the oldest first."""
        return [outcome.report for outcome in self._outcomes.values() if outcome.report is not None]

    def complete(self, report: TrainReport, request: TrainRequest) -> TrainReport:
        """Returns the report of a finished request as it is answered; raises InvalidRequest as `AnsweredEstimates`."""
        return self._answered.complete(report, request)

    # ------------------------------------------------------------------------------------------ checkpoints

    def save(self, lead: Lead, facts: dict[str, Any], metrics: dict[str, float]) -> CheckpointInfo:
        """Saves a checkpoint of everything so far, and removes superseded files.

        Idempotent: returns the newest one if that has everything, with the same metrics. `facts` are the trainer's
        `step` and `weights_version`. Raises InvalidRequest without a folder; StorageFailed if the disk cannot take it,
        with the older checkpoints unharmed; RanksLost after `give_up`.
        """
        checkpoints = self._folder("saved")
        with self._writing():  # the weights include what was given up, if that finished nevertheless
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
                    answers=_encode(self._outcomes),
                    estimates=self._answered.dumps(),
                    settings=self._settings,
                )
            except BaseException as e:
                checkpoints.discard(aside)
                if isinstance(e, SafetensorError):  # how safetensors reports a full disk
                    raise OSError(0, str(e), str(aside)) from e
                raise
        self.num_unsaved = 0
        self._journal.forget(checkpoints.oldest_position())
        checkpoints.prune(spare=self._journal.checkpoints())
        return info

    def checkpoint(self, name: str | None) -> Checkpoint:
        """Returns the checkpoint of that name, or the newest; raises InvalidRequest, also if it is damaged."""
        try:
            return self._folder("loaded").whole(name)
        except DamagedCheckpoint as e:
            others = ", ".join(info.name for info in self.checkpoints() if info.name != e.name) or "none"
            raise InvalidRequest(f"checkpoint {e.name} is damaged: {e}; load another one, of: {others}") from e

    def returned_to(self, checkpoint: Checkpoint) -> None:
        """Restores the checkpoint's outcomes and measurements: later ones are undone."""
        with self._writing():
            self._begun = None
            self._outcomes = _decode(checkpoint.answers())
            self._answered = AnsweredEstimates(checkpoint.estimates())
            self.measured = {name: value for name, value in checkpoint.info.metrics.items() if name in MEASURED}

    # ------------------------------------------------------------------------------------------ the way back

    def restore(self, lead: Lead) -> None:
        """Loads the newest whole checkpoint and replays the journal after it.

        Raises StartError if something that this needs is missing or damaged.
        """
        if not self.is_durable:
            return
        position = 0
        if (newest := self._checkpoints.newest_whole()) is not None:
            log.info("loading %s", newest.folder)
            lead(Command(Signal.LOAD, self._name, folder=str(newest.folder)))
            self.returned_to(newest)
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
            except RanksLost:  # not the record's fault: the next start replays it
                raise
            except Exception as e:
                self._not_replayed(record, what, e)

    def _replay(self, record: Record, lead: Lead) -> None:
        if record.request is None:
            source = self.checkpoint(record.checkpoint)
            lead(Command(Signal.LOAD, self._name, folder=str(source.folder), lineage=record.position))
            self.returned_to(source)
            return
        command = Command(Signal.TRAIN, self._name, ask=record.request, first_batches=record.num_batches)
        report: TrainReport = lead(command)
        if record.num_batches is None:
            self.keep_estimates(record.request)
            outcome = TrainOutcome(record.digest, report)
            if not record.is_done:
                self._finish_replayed(record.request, record.position, outcome)
                return
            self.measured = _measured(report)
        else:
            stand = f"broke off; the first {record.num_batches} of its global batches stand"
            failure = f"train request {record.request.id} {stand}"
            outcome = TrainOutcome(record.digest, None, failure, record.num_batches)
        self._keep(record.request, outcome)
        self.num_unsaved += 1

    def _finish_replayed(self, request: TrainRequest, position: int, outcome: TrainOutcome) -> None:
        """Finishes a request that had not been finished before: only from now on it may be answered."""
        try:
            self.finish(request, position, outcome)
        except StorageFailed as e:
            log.error("train request %s: %s", request.id, e)

    def _not_replayed(self, record: Record, what: str, error: Exception) -> None:
        """Handles a record that failed: as any failed train request if it may never have succeeded."""
        if record.is_done or record.request is None or record.position != self._journal.position:
            raise StartError(
                f"record {record.position} of the journal ({what}) cannot be done again: {error}",
                "mend the cause (memory, a missing checkpoint) and start again, since it may have been acknowledged; "
                "to give it up, move it and all records after it elsewhere",
            ) from error
        if isinstance(error, TrainFailed):
            log.warning("%s, which was never answered, failed: %s", what, error)
            outcome = TrainOutcome(record.digest, None, str(error), error.num_steps)
            self._finish_replayed(record.request, record.position, outcome)
            return
        self.withdraw(record.position)
        raise StartError(
            f"{what}, which was never answered, corrupted the critic: {error}",
            "start again: it was removed from the journal",
        ) from error

    def _check_settings(self, record: Record) -> None:
        other = record.settings
        differing = [k for k in {**other, **self._settings} if other.get(k) != self._settings.get(k)]
        if differing:
            then = ", ".join(f"{k} {other.get(k)}" for k in differing)
            now = ", ".join(f"{k} {self._settings.get(k)}" for k in differing)
            difference = f"the journal was written with {then}; now: {now}"
            if "weights" in differing:
                raise StartError(
                    f"{difference}: the model's files have changed",
                    "restore the old files and start again; or begin anew with the new ones in another "
                    "--checkpoint-dir (a checkpoint in the old one can be served as a model, too)",
                )
            raise StartError(
                difference,
                "start once more with the old settings and save a checkpoint; from there you can resume with new ones",
            )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Holds the lock; raises RanksLost after `give_up`."""
        with self._lock:
            if self._loss is not None:
                raise copy.copy(self._loss)
            yield

    def _keep(self, request: TrainRequest, outcome: TrainOutcome) -> None:
        self._outcomes.pop(request.id, None)
        self._outcomes[request.id] = outcome
        if len(self._outcomes) > MOST_OUTCOMES:
            oldest = next(iter(self._outcomes))
            del self._outcomes[oldest]
            self._answered.drop(oldest)

    def _remove_record(self, position: int) -> None:
        self._begun = None
        if self.is_durable:
            self._journal.remove(position)

    def _folder(self, what: str) -> CheckpointFolder:
        if not self.is_durable:
            raise InvalidRequest(
                f"nothing can be {what}: the server has no folder for checkpoints; start it with --checkpoint-dir"
            )
        return self._checkpoints


def _measured(report: TrainReport) -> dict[str, float]:
    return {name: getattr(report, name) for name in MEASURED}


def _encode(outcomes: dict[str, TrainOutcome]) -> bytes:
    entries = {
        name: {"digest": one.digest, "report": one.report, "failure": one.failure, "num_steps": one.num_batches}
        for name, one in outcomes.items()
    }
    return orjson.dumps(entries, option=orjson.OPT_SERIALIZE_NUMPY)


def _decode(answers: bytes) -> dict[str, TrainOutcome]:
    outcomes = {}
    for name, entry in orjson.loads(answers).items():
        report = entry["report"] and critic_tensors.from_json(TrainReport, orjson.dumps(entry["report"]))
        outcomes[name] = TrainOutcome(entry["digest"], report, entry["failure"], entry["num_steps"])
    return outcomes
