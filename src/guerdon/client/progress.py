"""How far a client has seen its critic come: that it does not go on with one that was set back. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from guerdon.client.calls import Errand
from guerdon.client.retry import Caller, Step
from guerdon.core import CriticState, TrainReport
from guerdon.errors import CriticReset


class Progress:
    """The newest step of one critic that its client has seen in reports."""

    def __init__(self) -> None:
        self._step = 0
        self._weights_version = ""
        self._reset = ""

    def reporting(
        self,
        caller: Caller,
        errand: Errand[TrainReport],
        *,
        trains: bool = True,
        state: Errand[CriticState] | None = None,
    ) -> Generator[Step, Any, TrainReport]:
        """The report of an errand that trains, or validates; raises CriticReset where it began before the newest step.

        The report of a train request that may have been answered before may do so: `state` then tells whether the
        critic has gone on since. What `caller.ask` raises comes through.
        """
        report = yield from caller.ask(errand)
        before = report.step - report.num_steps * trains
        if not self._reset and before < self._step and not (yield from self._is_known(report, caller, state)):
            self._reset = (
                f"{errand.model} was answered from step {before} on, but this client had seen step {self._step}: the "
                "server was started again without --checkpoint-dir, or somebody loaded a checkpoint. What was learnt "
                "since is gone: load a checkpoint by this client's load, or go on from where the critic is with a new "
                "client"
            )
        if self._reset:
            raise CriticReset(self._reset)
        if report.step >= self._step:
            self._step, self._weights_version = report.step, report.weights_version
        return report

    def _is_known(
        self, report: TrainReport, caller: Caller, state: Errand[CriticState] | None
    ) -> Generator[Step, Any, bool]:
        """Whether the report is an older answer once more, and not of a step that was made just now."""
        if state is None:
            return False
        if (report.step, report.weights_version) == (self._step, self._weights_version):
            return True
        now = yield from caller.ask(state)
        return now.step >= self._step and now.step > report.step

    def returning(self, caller: Caller, errand: Errand[Any]) -> Generator[Step, Any, Any]:
        """The errand of going back to a checkpoint: from when it is sent, older steps are as they should be."""
        self._step, self._reset = 0, ""
        return (yield from caller.ask(errand))
