"""All that a trainer is made of, written into one folder and restored from it, by one rank or by many together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.errors import CheckpointError, StorageFailed
from guerdon.training import collectives, tensor_files, trainer_checkpoint
from guerdon.training.optimiser import Optimiser

PARTS = "optimizer"
"""The folder of the optimiser's state where that is sharded."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What a trainer is made of, and a checkpoint of it: weights by the stem of their file, optimiser, random numbers.

    `made_with` is what must be the same where the checkpoint is loaded, and `others` says by its names what a
    checkpoint is that differs there; `earlier` has what guerdon 0.1 wrote for it. `setting` names the one that chooses
    the folder. The layout of the `ranks` may be another: files tell nothing of it.
    """

    weights: dict[str, dict[str, Tensor]]
    optimiser: Optimiser
    device: torch.device
    made_with: dict[str, Any]
    others: dict[str, str]
    setting: str
    ranks: Ranks = ALONE
    earlier: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path, files: dict[str, bytes], facts: dict[str, Any]) -> None:
        """Writes everything, `files` by name and `facts` beside what is known here, into an existing, empty folder.

        Every file is fsynced, and all ranks return together. Raises StorageFailed, on all of them, where the disk of
        any does not take its part.
        """
        collectives.together(self.ranks, lambda: self._check_shared(folder))
        optimiser = self.optimiser.tensors()
        for stem, tensors in self.weights.items():
            if tensor_files.is_sharded(tensors):
                tensor_files.write_whole(folder, stem, tensors, self.ranks)
        if tensor_files.is_sharded(optimiser):
            tensor_files.write_parts(folder / PARTS, optimiser, self.ranks)
        collectives.together(self.ranks, lambda: self._write_alone(folder, optimiser, files, facts))

    def _check_shared(self, folder: Path) -> None:
        if self.ranks.size > 1 and not folder.is_dir():
            raise StorageFailed(
                f"{folder} is not there: ranks on several hosts need a {self.setting} that all of them share"
            )

    def _write_alone(
        self, folder: Path, optimiser: dict[str, Tensor], files: dict[str, bytes], facts: dict[str, Any]
    ) -> None:
        """What the first rank has all of; the others' random numbers are the same, as far as training draws any."""
        if not self.ranks.is_leader:
            return
        for stem, tensors in self.weights.items():
            if not tensor_files.is_sharded(tensors):
                trainer_checkpoint.write_tensors(folder, stem, tensors)
        for name, data in files.items():
            trainer_checkpoint.write(folder / name, data)
        if not tensor_files.is_sharded(optimiser):
            trainer_checkpoint.write_tensors(folder, "optimizer", optimiser)
        trainer_checkpoint.write_tensors(folder, "rng", trainer_checkpoint.rng_tensors(self.device))
        known = {"step": self.optimiser.step, "learning_rate": self.optimiser.learning_rate}
        trainer_checkpoint.write(folder / "trainer.json", trainer_checkpoint.to_json(self.made_with | known | facts))

    def open(self, folder: Path) -> tuple[dict[str, Any], Callable[[], None]]:
        """The facts, and a function that restores everything; nothing is changed before it is called.

        Either is of this rank alone. Raises CheckpointError where the folder is damaged or was made with something
        else.
        """
        facts = trainer_checkpoint.read_json(folder / "trainer.json")
        for name, own in self.made_with.items():
            if facts.get(name) not in (own, self.earlier.get(name, own)):
                what = self.others.get(name, f"was made with {name}")
                raise CheckpointError(
                    f"{folder} {what} {facts.get(name)}, this is trained with {own}",
                    f"start with the model and the settings that it was made with, or give another {self.setting}",
                )
        restores = [self._open(folder, stem, own) for stem, own in self.weights.items()]
        restores.append(self._open_optimiser(folder, facts["step"]))
        rng = trainer_checkpoint.open_tensors(folder, "rng")

        def restore() -> None:
            for part in restores:
                part()
            trainer_checkpoint.restore_rng(rng, self.device)

        return facts, restore

    def _open(self, folder: Path, stem: str, own: dict[str, Tensor]) -> Callable[[], None]:
        stored = trainer_checkpoint.open_tensors(folder, stem)
        trainer_checkpoint.check_same({name: tensor.shape for name, tensor in stored.items()}, own, folder)
        if tensor_files.is_sharded(own):
            return lambda: tensor_files.read_into(folder, own)
        return lambda: trainer_checkpoint.copy_into(own, stored)

    def _open_optimiser(self, folder: Path, step: int) -> Callable[[], None]:
        own = self.optimiser.tensors()
        in_parts = (folder / PARTS).is_dir()
        if not in_parts and not tensor_files.is_sharded(own):
            stored = trainer_checkpoint.open_tensors(folder, "optimizer")
            trainer_checkpoint.check_same({name: tensor.shape for name, tensor in stored.items()}, own, folder)
            return lambda: self.optimiser.restore(step, lambda name: stored[name][...])
        shapes = (
            tensor_files.StoredParts(folder / PARTS, own).shapes
            if in_parts
            else {name: tensor.shape for name, tensor in trainer_checkpoint.open_tensors(folder, "optimizer").items()}
        )
        trainer_checkpoint.check_same(shapes, own, folder)

        def restore() -> None:
            # Into the state itself, but for the numbers that are none of tensors.
            tensor_files.read_into(folder / PARTS if in_parts else folder, own)
            self.optimiser.restore(step, own.__getitem__)

        return restore
