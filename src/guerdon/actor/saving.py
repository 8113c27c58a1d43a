"""What a run saves of itself: each step's state at most once, in a pair with the critic's where there is one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from guerdon.actor.pairing import Outcome, PairedCritic, save_critic
from guerdon.actor.run_checkpoints import Checkpoint, Checkpoints, RunState
from guerdon.errors import GuerdonError, StorageFailed

log = logging.getLogger(__name__)

_LEAVING_S = 30.0
"""What a run that leaves waits for a server that is away."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run between two steps: its state, what writes its policy, and the metrics in the critic's checkpoint."""

    state: RunState
    save_policy: Callable[[Path], None]
    metrics: dict[str, float]


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

    def save(self, snapshot: Snapshot, outcome: Outcome = Future.result) -> None:
        """Saves a checkpoint, and the critic's, for which `outcome` waits; nothing that is there.

        Raises StorageFailed, and what the critic's server raises; the older ones are as they were then.
        """
        if self.newest is not None and self.newest.state.step == snapshot.state.step:
            return
        began = time.monotonic()
        critic, previous = self._critic, self.newest
        self.newest = self._checkpoints.save(
            snapshot.state,
            snapshot.save_policy,
            None if critic is None else lambda: save_critic(critic, snapshot.metrics, previous, outcome),
        )
        self.seconds = time.monotonic() - began
        self._is_overdue = False

    def save_every(self, steps: int, snapshot: Snapshot, outcome: Outcome) -> None:
        """As `save`, where a checkpoint is due; a disk that does not take it is told on the log, and asked again."""
        if snapshot.state.step % steps and not self._is_overdue:
            return
        try:
            self.save(snapshot, outcome)
        except StorageFailed as e:
            self._is_overdue = True
            step = snapshot.state.step
            log.error("STEP %d IS NOT SAVED: %s. The run goes on, and tries again after the next step", step, e)

    def save_leaving(self, snapshot: Snapshot) -> None:
        """As `save`, by a run that has to leave: it gives up what the critic still does, and waits for it only so long.

        Where nothing could be saved, `newest` is an older one.
        """
        try:
            if self._critic is not None and (self.newest is None or self.newest.state.step != snapshot.state.step):
                self._critic.reconnect(self.patience_s)
            self.save(snapshot)
        except GuerdonError as e:
            log.error("step %d cannot be saved: %s", snapshot.state.step, e)
