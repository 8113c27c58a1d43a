"""A critic's checkpoints on disk: each is there whole or not at all, and what is damaged later is seen."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from guerdon.core import CheckpointInfo
from guerdon.errors import InvalidRequest, StartError
from guerdon.server.durable import ASIDE, sync, write_new

log = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint-(\d{6,})-step-(\d+)")
_MANIFEST = "manifest.json"
_ANSWERS = "answers.json"
_DAMAGED = "damaged-"


class DamagedCheckpoint(Exception):
    """The files of checkpoint `name` are not those that were written; the text says which."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(slots=True, eq=False)
class Checkpoint:
    """One checkpoint: its folder holds what was done up to the journal's `position`; `files` are as the manifest."""

    info: CheckpointInfo
    position: int
    folder: Path
    files: dict[str, dict[str, Any]]

    def answers(self) -> bytes:
        """What `commit` was given."""
        return (self.folder / _ANSWERS).read_bytes()


class Checkpoints:
    """The checkpoints in `folder`: the newest `keep` of them, and the one that is best by the metric `best`.

    The constructor removes what a crash left unfinished; no other server may work in the folder. Raises StartError
    where it cannot be written.
    """

    def __init__(self, folder: Path, keep: int, best: str | None = None, mode: Literal["max", "min"] = "max") -> None:
        self._folder = folder
        self._keep, self._best, self._mode = keep, best, mode
        self._all: dict[int, Checkpoint] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(ASIDE + "*"):
                shutil.rmtree(leftover)
            names = [path.name for path in folder.iterdir()]
        except OSError as e:
            raise StartError(
                f"cannot keep checkpoints in {folder}: {e.strerror}", "give a checkpoint_dir that can be written"
            ) from e
        numbers = [int(m[1]) for name in names if (m := _NAME.fullmatch(name.removeprefix(_DAMAGED)))]
        self._next = max(numbers, default=0) + 1
        self.has_damaged = any(name.startswith(_DAMAGED) for name in names)
        for name in names:
            if match := _NAME.fullmatch(name):
                try:
                    self._all[int(match[1])] = _described(folder / name)
                except DamagedCheckpoint as e:
                    self._set_aside(folder / name, e)

    def infos(self) -> list[CheckpointInfo]:
        """All that are there, the oldest first."""
        return [self._all[number].info for number in sorted(self._all)]

    def begin(self) -> Path:
        """An empty folder for the files of the next checkpoint; raises OSError."""
        aside = self._folder / f"{ASIDE}{self._next:06d}"
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir()
        return aside

    def discard(self, aside: Path) -> None:
        """Gives up a checkpoint that was begun."""
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
        settings: dict[str, Any],
    ) -> CheckpointInfo:
        """Makes the files in `aside` a checkpoint that outlives a crash; raises OSError, and then there is none."""
        info = CheckpointInfo(f"checkpoint-{self._next:06d}-step-{step}", self._next, step, weights_version, metrics)
        write_new(aside / _ANSWERS, answers)
        files = {}
        for path in sorted(aside.rglob("*")):
            sync(path)
            if path.is_file():
                files[path.relative_to(aside).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        manifest = {"info": info, "position": position, "settings": settings, "files": files}
        sealed = {"manifest": manifest, "sha256": _seal(orjson.loads(orjson.dumps(manifest)))}
        write_new(aside / _MANIFEST, orjson.dumps(sealed, option=orjson.OPT_INDENT_2))
        folder = self._folder / info.name
        aside.rename(folder)
        try:
            sync(self._folder)
        except OSError:
            folder.rename(aside)
            raise
        self._all[self._next] = Checkpoint(info, position, folder, files)
        self._next += 1
        return info

    def newest_whole(self, at: int | None = None) -> Checkpoint | None:
        """The newest whole one, None where there is none, or none that ends `at` that position of the journal.

        Those that are found damaged are put aside, loudly.
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
        """The checkpoint of that name, the newest for None; raises InvalidRequest, and DamagedCheckpoint."""
        found = [c for c in self._all.values() if name in (None, c.info.name)]
        if not found:
            have = ", ".join(info.name for info in self.infos()) or "none yet"
            raise InvalidRequest(f"no checkpoint {name or 'to load'}; there are: {have}")
        checkpoint = max(found, key=lambda c: c.info.number)
        _verify(checkpoint)
        return checkpoint

    def oldest_position(self) -> int:
        """The position of the oldest of the newest `keep`: with the records behind it any of them can be taken.

        0 while there are fewer: then the journal reaches back to the model itself.
        """
        newest = sorted(self._all)[-self._keep :]
        return self._all[newest[0]].position if len(newest) == self._keep else 0

    def prune(self, spare: set[str]) -> None:
        """Removes all but the newest `keep`, the best, and those named in `spare`."""
        kept = set(sorted(self._all)[-self._keep :])
        sign = 1 if self._mode == "max" else -1
        rated = [(sign * c.info.metrics[self._best], n) for n, c in self._all.items() if self._best in c.info.metrics]
        if rated:
            kept.add(max(rated)[1])
        for number, checkpoint in list(self._all.items()):
            if number not in kept and checkpoint.info.name not in spare:
                del self._all[number]
                try:
                    # One rename, so that a crash leaves no checkpoint half removed.
                    aside = checkpoint.folder.rename(self._folder / (ASIDE + checkpoint.info.name))
                    shutil.rmtree(aside)
                except OSError as e:
                    log.warning("cannot remove %s: %s", checkpoint.folder, e)

    def _set_aside(self, folder: Path, why: DamagedCheckpoint) -> None:
        number = int(folder.name.split("-")[1])
        self._all.pop(number, None)
        self.has_damaged = True
        log.error("CHECKPOINT %s IS DAMAGED: %s; the one before it counts in its place", folder, why)
        try:
            folder.rename(folder.with_name(_DAMAGED + folder.name))
        except OSError as e:
            log.error("cannot rename %s: %s", folder, e)


def _described(folder: Path) -> Checkpoint:
    """The checkpoint as its manifest tells it; raises DamagedCheckpoint."""
    try:
        sealed = orjson.loads((folder / _MANIFEST).read_bytes())
        manifest = sealed["manifest"]
        if _seal(manifest) != sealed["sha256"]:
            raise ValueError("it is not what was written")
        return Checkpoint(CheckpointInfo(**manifest["info"]), manifest["position"], folder, manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise DamagedCheckpoint(folder.name, f"{_MANIFEST}: {e}") from e


def _verify(checkpoint: Checkpoint) -> None:
    """Raises DamagedCheckpoint where a file is not as the manifest has it."""
    for name, expected in checkpoint.files.items():
        path = checkpoint.folder / name
        try:
            if path.stat().st_size != expected["bytes"]:
                raise DamagedCheckpoint(
                    checkpoint.info.name, f"{name} has {path.stat().st_size} bytes, not {expected['bytes']}"
                )
            if _sha256(path) != expected["sha256"]:
                raise DamagedCheckpoint(checkpoint.info.name, f"{name} has other bytes than were written")
        except OSError as e:
            raise DamagedCheckpoint(checkpoint.info.name, f"{name}: {e.strerror}") from e


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(manifest, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
