"""What a run saves of itself: each step's state at most once, in a pair with the critic's where there is one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from guerdon.actor.checkpoints import Checkpoint, Checkpoints, RunState
from guerdon.actor.pairing import Outcome, PairedCritic, save_critic
from guerdon.errors import GuerdonError, StorageFailed

log = logging.getLogger(__name__)

_LEAVING_S = 30.0
"""What a run that leaves waits for a server that is away."""


class Saving:
    """Saves a run; what the disk refuses amid it is tried again after the next step.

    `newest` is the checkpoint that the run would go on from, None where there is none yet; `seconds` are those of the
    last save, None before the first.
    """

    def __init__(self, checkpoints: Checkpoints, critic: PairedCritic | None, newest: Checkpoint | None) -> None:
        self.newest = newest
        self.seconds: float | None = None
        self._checkpoints = checkpoints
        self._critic = critic
        self._is_overdue = False

    @property
    def patience_s(self) -> float:
        """Seconds that a run which is asked to stop still gives a server for what it has begun."""
        return _LEAVING_S + 2 * (self.seconds or 0.0)

    def save(
        self,
        state: RunState,
        save_policy: Callable[[Path], None],
        metrics: dict[str, float],
        outcome: Outcome = Future.result,
    ) -> None:
        """Saves a checkpoint, and the critic's with these metrics, for which `outcome` waits; nothing that is there.

        Raises StorageFailed, and what the critic's server raises; the older ones are as they were then.
        """
        if self.newest is not None and self.newest.state.step == state.step:
            return
        began = time.monotonic()
        critic, previous = self._critic, self.newest
        self.newest = self._checkpoints.save(
            state, save_policy, None if critic is None else lambda: save_critic(critic, metrics, previous, outcome)
        )
        self.seconds = time.monotonic() - began
        self._is_overdue = False

    def save_every(
        self,
        steps: int,
        state: RunState,
        save_policy: Callable[[Path], None],
        metrics: dict[str, float],
        outcome: Outcome,
    ) -> None:
        """As `save`, where a checkpoint is due; a disk that does not take it is told on the log, and asked again."""
        if state.step % steps and not self._is_overdue:
            return
        try:
            self.save(state, save_policy, metrics, outcome)
        except StorageFailed as e:
            self._is_overdue = True
            log.error("STEP %d IS NOT SAVED: %s. The run goes on, and tries again after the next step", state.step, e)

    def save_leaving(self, state: RunState, save_policy: Callable[[Path], None], metrics: dict[str, float]) -> None:
        """As `save`, by a run that has to leave: it gives up what the critic still does, and waits for it only so long.

        Where nothing could be saved, `newest` is an older one.
        """
        try:
            if self._critic is not None and (self.newest is None or self.newest.state.step != state.step):
                self._critic.reconnect(self.patience_s)
            self.save(state, save_policy, metrics)
        except GuerdonError as e:
            log.error("step %d cannot be saved: %s", state.step, e)
