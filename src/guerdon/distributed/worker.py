"""What every rank does with a command."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import Any, Protocol

from guerdon.core import Command, ModelInfo, Score, Scored, Sequence, Signal, TrainReport, TrainRequest
from guerdon.errors import GuerdonError


class Scorer(Protocol):
    """A model, or a user's function, that scores sequences."""

    info: ModelInfo

    def score(self, sequences: list[Sequence]) -> ListLike[Score | GuerdonError]: ...


class Trainer(Protocol):
    """A critic that learns.

    `train` raises TrainFailed, whose `num_steps` leading global batches stand, and has changed nothing beyond them;
    any other GuerdonError means that nothing was changed. `state` has `step`, `learning_rate`, `num_parameters` and
    `num_trainable`, and where the weights are spoilt says under `broken` why. `load` goes on under the saved lineage,
    or under a new one where its number is given.
    """

    info: ModelInfo

    def train(self, request: TrainRequest, first_steps: int | None = None) -> TrainReport: ...

    def validate(self, request: TrainRequest) -> TrainReport: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path, lineage: int | None = None) -> None: ...

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def state(self) -> dict[str, Any]: ...


class Worker:
    """Holds this rank's scorers and trainers by name and executes one command at a time."""

    def __init__(self, scorers: dict[str, Scorer], trainers: dict[str, Trainer] | None = None) -> None:
        self._scorers = scorers
        self._trainers = trainers or {}

    def execute(self, command: Command) -> Scored | TrainReport | None:
        """Does what the command says: FORWARD is answered by Scored, TRAIN and VALIDATE by a TrainReport."""
        if command.signal is Signal.EXIT:
            return None
        if command.signal is Signal.FORWARD:
            scorer = self._scorers[command.model]
            results = list(scorer.score(command.sequences))
            return Scored(results, scorer.info.weights_version)
        trainer = self._trainers[command.model]
        match command.signal:
            case Signal.TRAIN:
                assert command.train is not None
                return trainer.train(command.train, command.first_steps)
            case Signal.VALIDATE:
                assert command.train is not None
                return trainer.validate(command.train)
            case Signal.SAVE:
                trainer.save(Path(command.folder))
            case Signal.LOAD:
                trainer.load(Path(command.folder), command.lineage)
            case Signal.OFFLOAD:
                trainer.offload()
            case Signal.ONLOAD:
                trainer.onload()
        return None
