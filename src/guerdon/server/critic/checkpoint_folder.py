"""A critic's checkpoints on disk: each is written atomically, and later damage is detected."""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from guerdon.critic_core import CheckpointInfo
from guerdon.durable import ASIDE, DAMAGED, Damaged, make_folder, place, read_manifest, remove, seal, verify, write_new
from guerdon.errors import InvalidRequest, StartError

log = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint-(\d{6,})-step-(\d+)")
_MANIFEST = "manifest.json"
_ANSWERS = "answers.json"
_ESTIMATES = "answered.safetensors"


class DamagedCheckpoint(Exception):
    """A file of checkpoint `name` is not as it was written; the text says which."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(slots=True, eq=False)
class Checkpoint:
    """One checkpoint of everything up to the journal's `position`; `files` are those of the manifest."""

    info: CheckpointInfo
    position: int
    folder: Path
    files: dict[str, dict[str, Any]]

    def answers(self) -> bytes:
        """Returns the `answers` given to `commit`."""
        return (self.folder / _ANSWERS).read_bytes()

    def estimates(self) -> bytes | None:
        """Returns the `estimates` given to `commit`; None if there were none."""
        return (self.folder / _ESTIMATES).read_bytes() if _ESTIMATES in self.files else None


class CheckpointFolder:
    """The checkpoints in `folder`: the newest `keep`, and the best by the metric `best`.

    The constructor removes a crash's unfinished files; no other server may use the folder. Raises StartError if it
    cannot be written.
    """

    def __init__(self, folder: Path, keep: int, best: str | None = None, mode: Literal["max", "min"] = "max") -> None:
        self._folder = folder
        self._keep, self._best, self._mode = keep, best, mode
        self._all: dict[int, Checkpoint] = {}
        try:
            make_folder(folder)
            for leftover in folder.glob(ASIDE + "*"):
                shutil.rmtree(leftover)
            names = [path.name for path in folder.iterdir()]
        except OSError as e:
            raise StartError(
                f"cannot keep checkpoints in {folder}: {e.strerror}", "give a checkpoint_dir that can be written"
            ) from e
        numbers = [int(m[1]) for name in names if (m := _NAME.fullmatch(name.removeprefix(DAMAGED)))]
        self._next = max(numbers, default=0) + 1
        self.has_damaged = any(name.startswith(DAMAGED) for name in names)
        for name in names:
            if match := _NAME.fullmatch(name):
                try:
                    found = read_manifest(folder / name, _MANIFEST)
                    info = CheckpointInfo(**found["info"])
                    self._all[int(match[1])] = Checkpoint(info, found["position"], folder / name, found["files"])
                except (Damaged, KeyError, TypeError) as e:
                    self._set_aside(folder / name, e)

    def infos(self) -> list[CheckpointInfo]:
        """Returns all checkpoints, the oldest first."""
        return [self._all[number].info for number in sorted(self._all)]

    def begin(self) -> Path:
        """Makes an empty folder for the next checkpoint's files; raises OSError."""
        aside = self._folder / f"{ASIDE}{self._next:06d}"
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir()
        return aside

    def discard(self, aside: Path) -> None:
        """Removes a checkpoint that was begun."""
        shutil.rmtree(aside, ignore_errors=True)

    def commit(
        self,
        aside: Path,
        *,
        step: int,
        weights_version: str,
        metrics: dict[str, float],
        position: int,
        answers: bytes,
        estimates: bytes | None,
        settings: dict[str, Any],
    ) -> CheckpointInfo:
        """Makes a durable checkpoint of the files in `aside`; raises OSError, and then there is none."""
        info = CheckpointInfo(f"checkpoint-{self._next:06d}-step-{step}", self._next, step, weights_version, metrics)
        write_new(aside / _ANSWERS, answers)
        if estimates is not None:
            write_new(aside / _ESTIMATES, estimates)
        files = seal(aside, _MANIFEST, {"info": info, "position": position, "settings": settings})
        folder = self._folder / info.name
        place(aside, folder)
        self._all[self._next] = Checkpoint(info, position, folder, files)
        self._next += 1
        return info

    def newest_whole(self, at: int | None = None) -> Checkpoint | None:
        """Returns the newest whole checkpoint; None if there is none, or it does not end `at` the given position.

        Sets damaged ones aside and logs an error.
        """
        while self._all:
            newest = self._all[max(self._all)]
            if at not in (None, newest.position):
                return None
            try:
                _verify(newest)
            except DamagedCheckpoint as e:
                self._set_aside(newest.folder, e)
            else:
                return newest
        return None

    def whole(self, name: str | None) -> Checkpoint:
        """Returns the checkpoint of that name, or the newest; raises InvalidRequest and DamagedCheckpoint."""
        found = [c for c in self._all.values() if name in (None, c.info.name)]
        if not found:
            have = ", ".join(info.name for info in self.infos()) or "none yet"
            raise InvalidRequest(f"no checkpoint {name or 'to load'}; there are: {have}")
        checkpoint = max(found, key=lambda c: c.info.number)
        _verify(checkpoint)
        return checkpoint

    def oldest_position(self) -> int:
        """Returns the position of the oldest of the newest `keep`; later records must stay in the journal.

        0 while there are fewer: then the journal must reach back to the model itself.
        """
        newest = sorted(self._all)[-self._keep :]
        return self._all[newest[0]].position if len(newest) == self._keep else 0

    def prune(self, spare: set[str]) -> None:
        """Removes all checkpoints but the newest `keep`, the best, and those named in `spare`."""
        kept = set(sorted(self._all)[-self._keep :])
        sign = 1 if self._mode == "max" else -1
        rated = [(sign * c.info.metrics[self._best], n) for n, c in self._all.items() if self._best in c.info.metrics]
        if rated:
            kept.add(max(rated)[1])
        for number, checkpoint in list(self._all.items()):
            if number not in kept and checkpoint.info.name not in spare:
                del self._all[number]
                try:
                    remove(checkpoint.folder)
                except OSError as e:
                    log.warning("cannot remove %s: %s", checkpoint.folder, e)

    def _set_aside(self, folder: Path, why: Exception) -> None:
        number = int(folder.name.split("-")[1])
        self._all.pop(number, None)
        self.has_damaged = True
        log.error("CHECKPOINT %s IS DAMAGED: %s; the one before it counts in its place", folder, why)
        try:
            folder.rename(folder.with_name(DAMAGED + folder.name))
        except OSError as e:
            log.error("cannot rename %s: %s", folder, e)


def _verify(checkpoint: Checkpoint) -> None:
    """Raises DamagedCheckpoint if a file differs from the manifest."""
    try:
        verify(checkpoint.folder, checkpoint.files)
    except Damaged as e:
        raise DamagedCheckpoint(checkpoint.info.name, str(e)) from e
