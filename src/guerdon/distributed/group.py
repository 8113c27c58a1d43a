"""The ranks that hold one set of models: rank 0 leads, the others follow. Here: one process."""

from __future__ import annotations

from guerdon.core import Command, Scored, TrainReport
from guerdon.distributed.worker import Worker


class Group:
    """A group of one: the leader's own worker is all there is."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def lead(self, command: Command) -> Scored | TrainReport | None:
        """Executes the command on every rank and returns this rank's result."""
        return self._worker.execute(command)
