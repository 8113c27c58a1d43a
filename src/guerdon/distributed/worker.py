"""What every rank does with a command."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import Any, Protocol

from guerdon.core import Command, ModelInfo, Score, Scored, Sequence, Signal
from guerdon.critic_core import TrainReport, TrainRequest
from guerdon.distributed import computing
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.distributed.shards import shards
from guerdon.errors import GuerdonError, ServerFault


class Scorer(Protocol):
    """A model, or a user's function, that scores sequences.

    One that `takes_all` is given all of them on every rank, whose parts it knows itself, and rank 0's results count.
    One that runs by several paths also has `score_plainly`, which does the same by the plain forward. One that can be
    unloaded has `discard`, which gives up what it holds.
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

    Another scorer is loaded beside the one that serves, on a thread of its own where this rank is the only one: with
    the commands LOAD and RELEASE, any other may be executed at the same time.
    """

    def __init__(
        self,
        scorers: dict[str, Scorer],
        trainers: dict[str, Trainer] | None = None,
        ranks: Ranks = ALONE,
        load: Callable[[str, str], Scorer] | None = None,
    ) -> None:
        """`load(name, folder)` makes the scorer that may take the place of that name; all ranks call it alike."""
        self._scorers = dict(scorers)
        self._trainers = trainers or {}
        self._ranks = ranks
        self._load = load
        self._beside: dict[str, Scorer] = {}
        self._ticking: set[str] = set()
        self._tick: Callable[..., None] | None = None

    def watch(self, tick: Callable[..., None]) -> None:
        """Has `tick` called while its models compute, where they can tell."""
        self._tick = tick
        models: list[tuple[str, Scorer | Trainer]] = [*self._scorers.items(), *self._trainers.items()]
        self._ticking = {name for name, model in models if model.watch(tick)}

    def execute(self, command: Command) -> Any:
        """Does this rank's part: of FORWARD a Scored, of TRAIN and VALIDATE a TrainReport, of a scorer's LOAD on rank 0
        what was loaded."""
        name = command.model
        match command.signal:
            case Signal.EXIT:
                return None
            case Signal.FORWARD:
                with computing.HERE.computing():
                    return self._forward(command)
            case Signal.LOAD if name not in self._trainers:
                assert self._load is not None
                self._beside[name] = made = self._load(name, command.folder)
                return made if self._ranks.is_leader else None
            case Signal.SWITCH:
                self._switch(name)
            case Signal.UNLOAD:
                self._discard(self._scorers.pop(name))
            case Signal.RELEASE:
                self._beside.pop(name, None)
                computing.release()
            case _:
                with computing.HERE.computing():
                    return self._operate(self._trainers[name], command)
        return None

    def _forward(self, command: Command) -> Scored:
        scorer: Any = self._scorers[command.model]
        own = command.sequences
        if not scorer.takes_all:
            own = [own[i] for i in self._parts(command)[self._ranks.data_rank]]
        score = scorer.score_plainly if command.plain else scorer.score
        results = list(score(own)) if own or self._ranks.in_step else []
        if len(results) != len(own):
            raise ServerFault(f"{command.model} gave {len(results)} results for {len(own)} samples")
        return Scored(results if self._ranks.tensor_rank == 0 else [], scorer.info.weights_version)

    def _switch(self, name: str) -> None:
        """Gives the place of that name to what was loaded beside it."""
        before, made = self._scorers.get(name), self._beside.pop(name)
        self._scorers[name] = made
        self._discard(before)
        if self._tick is not None:
            self._ticking.discard(name)
            if made.watch(self._tick):
                self._ticking.add(name)

    def _discard(self, scorer: Any) -> None:
        # Its modules hold each other, and where they were there at the start no collection finds them.
        if scorer is not None:
            scorer.discard()

    def _operate(self, trainer: Trainer, command: Command) -> TrainReport | None:
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

    def merge(self, command: Command, parts: list[Any]) -> Any:
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
