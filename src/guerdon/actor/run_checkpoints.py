"""An actor's checkpoints, which are complete or absent, each paired with one of the critic's; and when to save them.

```
checkpoints/step-000020/
  policy/       what PolicyTrainer.save writes
  state.json    the run's id, settings and memory, the critic's checkpoint; size and SHA-256 of every file
```

The policy is saved first, then the critic, so that a full disk here costs the critic no checkpoint. The critic's
checkpoint is named in `state.json` when the folder gets its name by one rename, which completes the pair: after a crash
before that, the previous pair is valid, whose critic the server still has. If a critic's server saves a new checkpoint
when it goes back to one, the new one replaces it in the pair at once.
"""

from __future__ import annotations

import itertools
import logging
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from guerdon import durable
from guerdon.actor.remote_critic import RemoteCritic
from guerdon.core import ModelInfo
from guerdon.critic_core import CheckpointInfo, CriticState
from guerdon.errors import CheckpointError, ConfigError, GuerdonError, StorageFailed
from guerdon.settings import actors
from guerdon.settings.actors import ActorConfig, DistillRunConfig, RemoteCriticConfig, RewardedRunConfig

log = logging.getLogger(__name__)

POLICY = "policy"
_STATE = "state.json"
_LEAVING_S = 30.0
"""Seconds that a preempted run waits for a server that is away."""
_COMMAND = "the command"
_BASE = "policy.model's weights"
"""Key under which a state keeps the version of the run's initial weights."""
_ENDING = "the ending of answers that the reward model gets"
_NAME = re.compile(r"step-(\d{6,})")

_NOT_DECISIVE = {
    "policy.model", "policy.revision", "policy.base", "policy.dtype",  # their weights and dtype are decisive instead
    "policy.device", "policy.max_batch_tokens", "policy.max_length", "policy.require_packed",
    "policy.activation_checkpointing", "policy.offload_optimizer", "rollouts.max_batch_rollouts",
    "reinforce.max_failed_fraction", "ppo.max_failed_fraction", "distill.max_failed_fraction",
}  # fmt: skip

WaitForSave = Callable[[Future[CheckpointInfo | None]], CheckpointInfo | None]
"""Waits for the critic's save."""


@dataclass(frozen=True, slots=True)
class RunState:
    """A run's state in its checkpoint, besides the policy.

    `step` counts the steps done; `settings` are the decisive ones, by path; `memory` is the loop's own; `critic` names
    the critic's checkpoint, None without a critic.
    """

    run_id: str
    step: int
    settings: dict[str, Any]
    memory: dict[str, Any]
    critic: str | None = None


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """One complete checkpoint."""

    folder: Path
    state: RunState

    @property
    def policy(self) -> Path:
        """The folder of the policy."""
        return self.folder / POLICY


class RunCheckpoints:
    """The newest `keep` checkpoints in `folder`."""

    def __init__(self, folder: Path, keep: int) -> None:
        """Removes a crash's incomplete files; raises ConfigError if the folder cannot be written."""
        self._folder = folder
        self._keep = keep
        try:
            durable.make_folder(folder)
            for leftover in folder.glob(durable.ASIDE + "*"):
                shutil.rmtree(leftover)
        except OSError as e:
            raise ConfigError(
                f"cannot keep checkpoints in {folder}: {e.strerror}", "give another run.output_dir"
            ) from e

    def newest_whole(self) -> RunCheckpoint | None:
        """Returns the newest complete checkpoint, None if there is none; renames damaged ones, and logs errors.

        Raises CheckpointError if all are damaged, or if another version of guerdon made it.
        """
        for folder in reversed(self._folders()):
            try:
                manifest = durable.read_manifest(folder, _STATE)
                durable.verify(folder, manifest["files"])
            except durable.Damaged as e:
                log.error("CHECKPOINT %s IS DAMAGED: %s; using the one before it", folder, e)
                _set_aside(folder)
                continue
            try:
                return RunCheckpoint(folder, RunState(**manifest["state"]))
            except (KeyError, TypeError) as e:
                raise CheckpointError(
                    f"{folder} was made by another version of guerdon: {e}",
                    "resume with that version; or start a new run in another run.output_dir",
                ) from e
        if damaged := sorted(self._folder.glob(durable.DAMAGED + "*")):
            raise CheckpointError(
                f"all checkpoints in {self._folder} are damaged: {', '.join(path.name for path in damaged)}",
                "restore one of them from a copy, under its own name; or move the folder away to start over",
            )
        return None

    def save(
        self, state: RunState, save_policy: Callable[[Path], None], save_critic: Callable[[], str] | None = None
    ) -> RunCheckpoint:
        """Saves a new checkpoint; `save_policy` writes the policy into an empty folder.

        `save_critic` saves the other part of the pair, and returns its name. Raises StorageFailed if the disk is full;
        older checkpoints stay.
        """
        folder = self._folder / f"step-{state.step:06d}"
        aside = folder.with_name(durable.ASIDE + folder.name)
        with durable.storing(f"cannot save {folder}"):
            try:
                (aside / POLICY).mkdir(parents=True)
                save_policy(aside / POLICY)
                if save_critic is not None:
                    state = replace(state, critic=save_critic())
                durable.seal(aside, _STATE, {"state": asdict(state)})
                durable.place(aside, folder)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
        for old in self._folders()[: -self._keep]:
            try:
                durable.remove(old)
            except OSError as e:
                log.warning("cannot remove %s: %s", old, e)
        return RunCheckpoint(folder, state)

    def pair(self, checkpoint: RunCheckpoint, critic: str) -> RunCheckpoint:
        """Replaces the critic's checkpoint in the pair by another one of the same content; returns the new pair.

        Raises StorageFailed if the disk is full; the pair is unchanged then.
        """
        state = replace(checkpoint.state, critic=critic)
        with durable.storing(f"cannot pair {checkpoint.folder} with {critic}"):
            durable.seal_again(checkpoint.folder, _STATE, {"state": asdict(state)})
        return RunCheckpoint(checkpoint.folder, state)

    def _folders(self) -> list[Path]:
        """Returns the checkpoints' folders, oldest first."""
        folders = {int(match[1]): path for path in self._folder.iterdir() if (match := _NAME.fullmatch(path.name))}
        return [folders[step] for step in sorted(folders)]


def _set_aside(folder: Path) -> None:
    aside = folder.with_name(durable.DAMAGED + folder.name)
    for number in itertools.count(2):  # a checkpoint of this step may have been damaged before
        if not aside.exists():
            break
        aside = folder.with_name(f"{durable.DAMAGED}{folder.name}-{number}")
    try:
        folder.rename(aside)
    except OSError as e:
        log.error("cannot rename %s: %s", folder, e)


# ------------------------------------------------------------------------------------------- decisive settings


def decisive_settings(config: ActorConfig) -> dict[str, Any]:
    """Returns the settings, by path, that decide a run's result, and so must not change at a resume."""
    algorithm = actors.get_algorithm(config)[0]
    found: dict[str, Any] = {
        "run.seed": config.run.seed,
        "data.shuffle": config.data.shuffle,
        _COMMAND: f"guerdon {algorithm}",
    }
    if isinstance(config, RewardedRunConfig):
        where, remote = actors.get_remote(config)
        found |= {
            f"{where}.send": remote.send,
            f"{where}.suffix": remote.suffix,
            f"{where}.reward_model.name": remote.reward_model.name,
            "reference.name": None if config.reference.url is None else config.reference.name,
        }
        if isinstance(remote, RemoteCriticConfig):
            found[f"{where}.combine_rm_and_critic_server"] = remote.combine_rm_and_critic_server
    elif isinstance(config, DistillRunConfig):
        found["teacher.name"] = config.teacher.name
    for section in ("policy", "rollouts", algorithm):
        found |= {f"{section}.{name}": value for name, value in asdict(getattr(config, section)).items()}
    found["policy.total_steps"] = actors.resolve_schedule(config).total_steps
    if config.policy.lr_schedule == "constant":
        del found["policy.total_steps"]
    return {path: value for path, value in found.items() if path not in _NOT_DECISIVE}


def decisive_contents(policy: ModelInfo, prompts_digest: str, ending: str) -> dict[str, Any]:
    """Returns further facts that must not change at a resume, once the policy and the prompts are loaded.

    `ending` is the chat template's ending of each answer that is sent; empty if there is none.
    """
    return {
        _BASE: policy.weights_version,
        "policy.model's dtype": policy.dtype,
        "data.prompts' digest": prompts_digest,
        _ENDING: ending,
    }


def check_settings_unchanged(state: RunState, settings: dict[str, Any], folder: Path) -> None:
    """Raises CheckpointError for the first of `settings` that has changed."""
    for path in sorted(settings, key=lambda path: (path != _COMMAND, path)):
        then, now = state.settings.get(path), settings[path]
        if then != now:
            raise CheckpointError(
                f"{folder} was made with {path} {then!r}; now it is {now!r}",
                "set it as before; or start a new run in another run.output_dir",
            )


# ------------------------------------------------------------------------------------------- pairs with a critic


def check_pairable(state: CriticState, found: RunCheckpoint | None) -> CriticState:
    """Returns the critic's state; raises if its checkpoints cannot be paired with the actor's, `found` among them."""
    if not state.is_durable:
        raise ConfigError(
            "the critic's server keeps no checkpoints, so that a run could not resume after a crash",
            "start it with --checkpoint-dir",
        )
    names = [checkpoint.name for checkpoint in state.checkpoints]
    if found is not None and found.state.critic not in names:
        raise CheckpointError(
            f"{found.folder} belongs to the critic's {found.state.critic}, and its server has "
            f"{', '.join(names) or 'none'}",
            "start the server with the checkpoint_dir that it had; if later saves removed that checkpoint "
            "(keep_checkpoints), start a new run in another run.output_dir",
        )
    return state


def load_paired_critic(critic: RemoteCritic, found: RunCheckpoint, checkpoints: RunCheckpoints) -> RunCheckpoint:
    """Loads the critic's part of the pair `found`; returns the pair as it is then.

    A server may remove the checkpoint that it went back to at its next save. It keeps the new one of the same content,
    which it saved at once, for longer: so that one replaces it in the pair.
    """
    info = critic.load(found.state.critic)
    if info is None or info.name == found.state.critic:
        return found
    return checkpoints.pair(found, info.name)


def save_paired_critic(
    critic: RemoteCritic, metrics: dict[str, float], previous: RunCheckpoint | None, wait: WaitForSave
) -> str:
    """Saves the critic's part of a new pair, for which `wait` waits, and returns its name.

    Warns if the server has removed that of the `previous` pair by then, because a crash would leave no pair.
    """
    info = wait(critic.submit_save(metrics))
    if info is None:
        raise CheckpointError(
            "the critic's server does not report which checkpoint it saved, so that the pair cannot be completed",
            "train the critic by guerdon serve-critic with --checkpoint-dir",
        )
    if previous is not None and previous.state.critic not in {found.name for found in critic.state().checkpoints}:
        log.warning(
            "the critic's server has removed %s, which belongs to %s, before this run had saved the next pair: after "
            "a crash in between, no pair could be resumed; start the server without --save-every, and with "
            "--keep-checkpoints of at least 2",
            previous.state.critic,
            previous.folder,
        )
    return info.name


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run between two steps: its state, a function that writes its policy, and the critic's metrics."""

    state: RunState
    save_policy: Callable[[Path], None]
    metrics: dict[str, float]


class CheckpointSaver:
    """Saves a run's checkpoints; if the disk is full, it retries after the next step.

    `newest` is the checkpoint to resume from, None if there is none; `last_save_s` are the seconds of the last save,
    None before the first.
    """

    def __init__(self, checkpoints: RunCheckpoints, critic: RemoteCritic | None, newest: RunCheckpoint | None) -> None:
        self.newest = newest
        self.last_save_s: float | None = None
        self._checkpoints = checkpoints
        self._critic = critic
        self._is_overdue = False

    @property
    def grace_s(self) -> float:
        """Seconds that a preempted run still gives a server for requests in progress."""
        return _LEAVING_S + 2 * (self.last_save_s or 0.0)

    def save(self, snapshot: RunSnapshot, wait: WaitForSave = Future.result) -> None:
        """Saves a checkpoint and the critic's, for which `wait` waits; no-op if this step is saved.

        Raises StorageFailed and the critic's errors; older checkpoints stay.
        """
        if self.newest is not None and self.newest.state.step == snapshot.state.step:
            return
        began = time.monotonic()
        critic, previous = self._critic, self.newest
        self.newest = self._checkpoints.save(
            snapshot.state,
            snapshot.save_policy,
            None if critic is None else lambda: save_paired_critic(critic, snapshot.metrics, previous, wait),
        )
        self.last_save_s = time.monotonic() - began
        self._is_overdue = False

    def save_if_due(self, steps: int, snapshot: RunSnapshot, wait: WaitForSave) -> None:
        """As `save`, every `steps` steps; logs an error if the disk is full, and retries after the next step."""
        if snapshot.state.step % steps and not self._is_overdue:
            return
        try:
            self.save(snapshot, wait)
        except StorageFailed as e:
            self._is_overdue = True
            step = snapshot.state.step
            log.error("STEP %d IS NOT SAVED: %s. The run continues, and tries again after the next step", step, e)

    def save_preempted(self, snapshot: RunSnapshot) -> None:
        """As `save` for a preempted run: abandons the critic's requests in progress, and waits for at most `grace_s`.

        If nothing could be saved, `newest` is an older one.
        """
        try:
            if self._critic is not None and (self.newest is None or self.newest.state.step != snapshot.state.step):
                self._critic.reconnect(self.grace_s)
            self.save(snapshot)
        except GuerdonError as e:
            log.error("step %d cannot be saved: %s", snapshot.state.step, e)
