"""Commands as every rank executes them: scoring, training, loading."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import Any, Protocol

from guerdon import memory
from guerdon.core import Command, ModelInfo, Score, Scored, Sequence, Signal
from guerdon.critic_core import TrainReport, TrainRequest
from guerdon.distributed import computing
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.distributed.shards import shards
from guerdon.errors import GuerdonError, ServerFault, Unsupported


class ServedScorer(Protocol):
    """A model, or a user's function, that scores sequences.

    One that `takes_all` gets all sequences on every rank and splits them itself; rank 0's results count. One that runs
    by several paths also has `score_plainly`, which scores by the plain forward, and `leave_path`, which makes that the
    only one. One that asks others has `meet`, which gets all by name. One that can be unloaded has `discard`, which
    frees its memory, and a checkpoint's `sleep` and `wake_up`.
    """

    info: ModelInfo
    takes_all: bool

    def watch(self, tick: Callable[..., None]) -> bool:
        """Calls `tick`, with any arguments, after each layer; returns False if layers cannot be observed."""

    def score(self, sequences: list[Sequence]) -> ListLike[Score | GuerdonError]: ...


class Trainer(Protocol):
    """A critic that learns.

    `train` raises TrainFailed if only its `num_steps` leading global batches stand and nothing else changed; any other
    GuerdonError means that nothing changed. `estimate` gives the request with the returns, previous values and
    advantages that its rewards make, and changes nothing. `state` has `step`, `learning_rate`, `num_parameters` and
    `num_trainable`, and `broken`, the reason, if the weights are corrupt. `load` continues the saved lineage, or starts
    a new one with the given number.
    """

    info: ModelInfo
    takes_all: bool

    def watch(self, tick: Callable[..., None]) -> bool: ...

    def train(self, request: TrainRequest, first_batches: int | None = None) -> TrainReport: ...

    def validate(self, request: TrainRequest) -> TrainReport: ...

    def estimate(self, request: TrainRequest) -> TrainRequest: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path, lineage: int | None = None) -> None: ...

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def state(self) -> dict[str, Any]: ...


class Worker:
    """Holds this rank's scorers and trainers by name and executes one command of each model at a time.

    Splits a FORWARD's sequences over the data-parallel ranks, unless the scorer `takes_all`. A trainer splits its rows
    itself, global batch by global batch.

    On a single rank each device has a thread, which executes the commands of its models. A scorer is loaded beside the
    one that serves; there that has a thread of its own, so any other command may run at the same time as LOAD and
    RELEASE. With several ranks all commands come one after the other.
    """

    def __init__(
        self,
        scorers: dict[str, ServedScorer],
        trainers: dict[str, Trainer] | None = None,
        ranks: Ranks = ALONE,
        load: Callable[[str, str], ServedScorer] | None = None,
    ) -> None:
        """`load(name, folder)` makes a scorer that can replace the one of that name; all ranks call it."""
        self._scorers = dict(scorers)
        for scorer in scorers.values():
            self._introduce(scorer)
        self._trainers = trainers or {}
        self._ranks = ranks
        self._load = load
        self._beside: dict[str, ServedScorer] = {}
        self._ticking: set[str] = set()
        self._tick: Callable[..., None] | None = None

    def watch(self, tick: Callable[..., None]) -> None:
        """Calls `tick` while its models compute, if their layers can be observed."""
        self._tick = tick
        models: list[tuple[str, ServedScorer | Trainer]] = [*self._scorers.items(), *self._trainers.items()]
        self._ticking = {name for name, model in models if model.watch(tick)}

    def execute(self, command: Command) -> Any:
        """Does this rank's part of a command.

        Returns a Scored for FORWARD, a TrainReport for TRAIN and VALIDATE, and on rank 0 the loaded scorer for a
        scorer's LOAD, the request with what was estimated for ESTIMATE, and the bytes of a scorer's weights for OFFLOAD
        and UNLOAD.
        """
        name = command.model
        match command.signal:
            case Signal.FORWARD:
                scorer: Any = self._scorers[name]
                own = command.sequences
                if not scorer.takes_all and self._ranks.data_size > 1:
                    own = [own[i] for i in self._parts(command)[self._ranks.data_rank]]
                if command.plain and not hasattr(scorer, "score_plainly"):
                    raise Unsupported(f"{name} has no other way to score")
                score = scorer.score_plainly if command.plain else scorer.score
                with computing.HERE.computing(is_long=not scorer.info.is_checkpoint):  # a function may ask a judge
                    results = list(score(own)) if own or self._ranks.in_step else []
                if len(results) != len(own):
                    raise ServerFault(f"{name} gave {len(results)} results for {len(own)} samples")
                # A batch of several adapters over one base has no single version; they are never replaced.
                version = "" if scorer.info.shared_base else scorer.info.weights_version
                return Scored(results if self._ranks.tensor_rank == 0 else [], version)
            case Signal.LOAD if name not in self._trainers:
                assert self._load is not None
                self._beside[name] = made = self._load(name, command.folder)
                return made if self._ranks.is_leader else None
            case Signal.OFFLOAD | Signal.ONLOAD if name not in self._trainers:
                resting: Any = self._scorers[name]
                num_bytes = resting.sleep() if command.signal is Signal.OFFLOAD else resting.wake_up()
                memory.release()
                return num_bytes
            case Signal.LEAVE_PATH:
                self._scorers[name].leave_path(command.why)  # type: ignore[attr-defined]
            case Signal.SWITCH:
                self._switch(name)
            case Signal.UNLOAD:
                return self._discard(self._scorers.pop(name, None))
            case Signal.RELEASE:
                self._beside.pop(name, None)
                memory.release()
            case Signal.EXIT:
                pass
            case _:
                trainer = self._trainers[name]
                with computing.HERE.computing(is_long=True):
                    match command.signal:
                        case Signal.TRAIN:
                            assert command.ask is not None
                            return trainer.train(command.ask, command.first_batches)
                        case Signal.VALIDATE:
                            assert command.ask is not None
                            return trainer.validate(command.ask)
                        case Signal.ESTIMATE:
                            assert command.ask is not None
                            estimated = trainer.estimate(command.ask)
                            return estimated if self._ranks.is_leader else None
                        case Signal.SAVE:
                            trainer.save(Path(command.folder))
                        case Signal.LOAD:
                            trainer.load(Path(command.folder), command.lineage)
                        case Signal.OFFLOAD:
                            trainer.offload()
                        case Signal.ONLOAD:
                            trainer.onload()
        return None

    def _switch(self, name: str) -> None:
        """Replaces the scorer of that name by the one that was loaded beside it."""
        before, made = self._scorers.get(name), self._beside.pop(name)
        self._scorers[name] = made
        self._introduce(made)
        self._discard(before)
        if self._tick is not None:
            self._ticking.discard(name)
            if made.watch(self._tick):
                self._ticking.add(name)

    def _introduce(self, scorer: Any) -> None:
        """Gives a scorer that asks others all of them, by name."""
        if hasattr(scorer, "meet"):
            scorer.meet(self._scorers)

    def _discard(self, scorer: Any) -> Any:
        # Its modules reference each other, and those loaded at the start are frozen out of garbage collection.
        return 0 if scorer is None else scorer.discard()

    def merge(self, command: Command, parts: list[Any]) -> Any:
        """Returns a FORWARD's results in the order of its sequences, for all else the first rank's part."""
        if command.signal is not Signal.FORWARD or self._scorers[command.model].takes_all:
            return parts[0]
        results: list[Any] = [None] * len(command.sequences)
        for numbers, scored in zip(self._parts(command), parts[:: self._ranks.tensor_size], strict=True):
            for number, result in zip(numbers, scored.results, strict=True):
                results[number] = result
        return Scored(results, parts[0].weights_version)

    def is_watched(self, command: Command) -> bool:
        """Whether the command runs layers that tick."""
        signals = (Signal.FORWARD, Signal.TRAIN, Signal.VALIDATE, Signal.ESTIMATE)
        return command.signal in signals and command.model in self._ticking

    def _parts(self, command: Command) -> list[list[int]]:
        sequences, count = command.sequences, self._ranks.data_size
        reads_text = any(s.text is not None for s in sequences)
        lengths = [s.num_tokens for s in sequences] if reads_text else None
        return shards([s.tokens for s in sequences], count, lengths)
