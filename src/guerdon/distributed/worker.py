"""What every rank does with a command."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import Protocol

from guerdon.core import Command, ModelInfo, Score, Sequence, Signal
from guerdon.errors import GuerdonError


class Scorer(Protocol):
    """A model, or a user's function, that scores sequences."""

    info: ModelInfo

    def score(self, sequences: list[Sequence]) -> ListLike[Score | GuerdonError]: ...


class Worker:
    """Holds this rank's scorers by name and executes one command at a time."""

    def __init__(self, scorers: dict[str, Scorer]) -> None:
        self._scorers = scorers

    def execute(self, command: Command) -> list[Score | GuerdonError]:
        """Does what the command says; FORWARD returns one result a sequence, EXIT nothing."""
        if command.signal is Signal.EXIT:
            return []
        return list(self._scorers[command.model].score(command.sequences))
