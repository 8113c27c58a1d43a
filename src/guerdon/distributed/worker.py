"""What every rank does with a command."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import Any, Protocol

from guerdon.core import Command, ModelInfo, Score, Scored, Sequence, Signal, TrainReport, TrainRequest
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.distributed.shards import shards
from guerdon.errors import GuerdonError, ServerFault


class Scorer(Protocol):
    """A model, or a user's function, that scores sequences.

    One that `takes_all` is given all of them on every rank, whose parts it knows itself, and rank 0's results count.
    """

    info: ModelInfo
    takes_all: bool

    def watch(self, tick: Callable[..., None]) -> bool:
        """Calls `tick`, with any arguments, whenever a layer has run; False where nothing of the kind is known."""

    def score(self, sequences: list[Sequence]) -> ListLike[Score | GuerdonError]: ...


class Trainer(Protocol):
    """A critic that learns.

    `train` raises TrainFailed, whose `num_steps` leading global batches stand, and has changed nothing beyond them;
    any other GuerdonError means that nothing was changed. `state` has `step`, `learning_rate`, `num_parameters` and
    `num_trainable`, and where the weights are spoilt says under `broken` why. `load` goes on under the saved lineage,
    or under a new one where its number is given.
    """

    info: ModelInfo
    takes_all: bool

    def watch(self, tick: Callable[..., None]) -> bool: ...

    def train(self, request: TrainRequest, first_steps: int | None = None) -> TrainReport: ...

    def validate(self, request: TrainRequest) -> TrainReport: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path, lineage: int | None = None) -> None: ...

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def state(self) -> dict[str, Any]: ...


class Worker:
    """Holds this rank's scorers and trainers by name and executes one command at a time.

    A FORWARD's sequences are split over the data-parallel ranks, but for a scorer that `takes_all`. What a trainer is
    given it splits itself, global batch by global batch.
    """

    def __init__(
        self, scorers: dict[str, Scorer], trainers: dict[str, Trainer] | None = None, ranks: Ranks = ALONE
    ) -> None:
        self._scorers = scorers
        self._trainers = trainers or {}
        self._ranks = ranks
        self._ticking: set[str] = set()

    def watch(self, tick: Callable[..., None]) -> None:
        """Has `tick` called while its models compute, where they can tell."""
        models: list[tuple[str, Scorer | Trainer]] = [*self._scorers.items(), *self._trainers.items()]
        self._ticking = {name for name, model in models if model.watch(tick)}

    def execute(self, command: Command) -> Scored | TrainReport | None:
        """Does this rank's part: of FORWARD a Scored, of TRAIN and VALIDATE a TrainReport."""
        if command.signal is Signal.EXIT:
            return None
        if command.signal is Signal.FORWARD:
            scorer = self._scorers[command.model]
            own = command.sequences
            if not scorer.takes_all:
                own = [own[i] for i in self._parts(command)[self._ranks.data_rank]]
            results = list(scorer.score(own)) if own or self._ranks.in_step else []
            if len(results) != len(own):
                raise ServerFault(f"{command.model} gave {len(results)} results for {len(own)} samples")
            return Scored(results if self._ranks.tensor_rank == 0 else [], scorer.info.weights_version)
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

    def merge(self, command: Command, parts: list[Any]) -> Scored | TrainReport | None:
        """The results in the sequences' order; of all else every rank has the same, and the first counts."""
        if command.signal is not Signal.FORWARD or self._scorers[command.model].takes_all:
            return parts[0]
        results: list[Any] = [None] * len(command.sequences)
        for numbers, scored in zip(self._parts(command), parts[:: self._ranks.tensor_size], strict=True):
            for number, result in zip(numbers, scored.results, strict=True):
                results[number] = result
        return Scored(results, parts[0].weights_version)

    def is_watched(self, command: Command) -> bool:
        """Whether it runs through a model's layers, which tick."""
        signals = (Signal.FORWARD, Signal.TRAIN, Signal.VALIDATE)
        return command.signal in signals and command.model in self._ticking

    def _parts(self, command: Command) -> list[list[int]]:
        sequences, count = command.sequences, self._ranks.data_size
        reads_text = any(s.text is not None for s in sequences)
        lengths = [s.num_tokens for s in sequences] if reads_text else None
        return shards([s.tokens for s in sequences], count, lengths)
