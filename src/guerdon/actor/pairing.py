"""The critic's side of a pair of checkpoints: whether there can be one, its saving, and the way back to it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from guerdon.actor.run_checkpoints import Checkpoint, Checkpoints
from guerdon.critic_core import CheckpointInfo, CriticState
from guerdon.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

Outcome = Callable[[Future[CheckpointInfo | None]], CheckpointInfo | None]


class PairedCritic(Protocol):
    """The critic whose checkpoints make pairs with the actor's; `guerdon.CriticClient` is one."""

    def submit_save(self, metrics: dict[str, float] | None = None) -> Future[CheckpointInfo | None]:
        """A future of which checkpoint was saved of everything asked of it before."""

    def load(self, checkpoint: str | None = None) -> CheckpointInfo | None:
        """Goes back to the checkpoint of that name."""

    def state(self) -> CriticState:
        """What the critic is, and which checkpoints it has."""

    def reconnect(self, timeout_s: float) -> None:
        """Gives up what is under way; from now on a call has so long with all its tries."""


def pairable(state: CriticState, found: Checkpoint | None) -> CriticState:
    """The critic's state; raises where its checkpoints cannot be paired with those of the actor, `found` among them."""
    if not state.is_durable:
        raise ConfigError(
            "the critic's server keeps no checkpoints, so that a run could not go on after a crash",
            "start it with --checkpoint-dir",
        )
    names = [checkpoint.name for checkpoint in state.checkpoints]
    if found is not None and found.state.critic not in names:
        raise CheckpointError(
            f"{found.folder} belongs to the critic's {found.state.critic}, and its server has "
            f"{', '.join(names) or 'none'}",
            "start the server with the checkpoint_dir that it had; or begin a new run in another run.output_dir",
        )
    return state


def load_critic(critic: PairedCritic, found: Checkpoint, checkpoints: Checkpoints) -> Checkpoint:
    """Brings the critic back to its part of the pair `found`; returns the pair as it is then.

    A server may drop the checkpoint that it went back to at its next save. What it made of it at once, a new one of the
    same content, it keeps for longer, and so that takes its place in the pair.
    """
    info = critic.load(found.state.critic)
    if info is None or info.name == found.state.critic:
        return found
    return checkpoints.pair(found, info.name)


def save_critic(critic: PairedCritic, metrics: dict[str, float], previous: Checkpoint | None, outcome: Outcome) -> str:
    """Saves the critic's part of a new pair, for which `outcome` waits, and returns its name.

    Warns where the server has dropped that of the `previous` pair by then, since a crash would leave none.
    """
    info = outcome(critic.submit_save(metrics))
    if info is None:
        raise CheckpointError(
            "the critic's server does not say which checkpoint it saved, so that none can be paired with it",
            "train the critic by guerdon serve-critic with --checkpoint-dir",
        )
    if previous is not None and previous.state.critic not in {found.name for found in critic.state().checkpoints}:
        log.warning(
            "the critic's server has dropped %s, which belongs to %s, before its successor was there: had this run "
            "crashed now, nothing could go on; start the server without --save-every, and with --keep-checkpoints of "
            "at least 2",
            previous.state.critic,
            previous.folder,
        )
    return info.name
