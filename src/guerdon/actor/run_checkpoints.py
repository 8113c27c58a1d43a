"""An actor's checkpoints on disk: each is there whole or not at all, and names the critic's that belongs to it.

```
checkpoints/step-000020/
  policy/       what PolicyTrainer.save writes
  state.json    the run's id, its settings and its memory, the critic's checkpoint; size and SHA-256 of every file
```

The critic's checkpoint is saved when the policy is on the disk, so that a full one costs the critic none. Its name is
in `state.json` when the folder gets its own by one rename, and that makes the pair: a crash before leaves the pair
before it, whose critic the server still has. A critic's server that goes back to a checkpoint saves it as a new one,
which takes its place in the pair before any other is saved.
"""

from __future__ import annotations

import itertools
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from guerdon.core import ModelInfo
from guerdon.durable import (
    ASIDE,
    DAMAGED,
    Damaged,
    make_folder,
    place,
    read_manifest,
    remove,
    seal,
    seal_again,
    storing,
    verify,
)
from guerdon.errors import CheckpointError, ConfigError
from guerdon.settings.actors import (
    PPORunConfig,
    ReinforceRunConfig,
    RemoteCriticConfig,
    get_algorithm,
    get_remote,
    resolve_schedule,
)

log = logging.getLogger(__name__)

POLICY = "policy"
_STATE = "state.json"
_COMMAND = "the command"
_BASE = "policy.model's weights"
"""Key under which a state keeps the version of the run's initial weights."""
_ENDING = "the ending of answers that the reward model gets"
_NAME = re.compile(r"step-(\d{6,})")

_NOT_DECISIVE = {
    "policy.model", "policy.revision", "policy.dtype",  # the weights and the dtype that they give are
    "policy.device", "policy.max_batch_tokens", "policy.max_length", "policy.require_packed",
    "policy.activation_checkpointing", "policy.offload_optimizer", "rollouts.max_batch_rollouts",
    "reinforce.max_failed_fraction", "ppo.max_failed_fraction",
}  # fmt: skip

_ADDED = {"reinforce.kl_reduction": "sum"}
"""Settings that older checkpoints lack, and what was done before there were any."""


@dataclass(frozen=True, slots=True)
class RunState:
    """What a checkpoint holds of a run beside the policy.

    `step` counts the steps done; `settings` are those that decide what a run becomes, by their paths; `memory` is the
    loop's own; `critic` names the critic's checkpoint, None where there is no critic.
    """

    run_id: str
    step: int
    settings: dict[str, Any]
    memory: dict[str, Any]
    critic: str | None = None

    def with_current_name(self, policy: ModelInfo) -> RunState:
        """Returns the state with the current name of the policy's weights, if 0.1 named the same ones."""
        if not policy.is_named(self.settings.get(_BASE, "")):
            return self
        return replace(self, settings=self.settings | {_BASE: policy.weights_version})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint that is whole."""

    folder: Path
    state: RunState

    @property
    def policy(self) -> Path:
        """The folder that the policy was saved into."""
        return self.folder / POLICY


class Checkpoints:
    """The newest `keep` checkpoints in `folder`; what a crash left unfinished is removed at the start."""

    def __init__(self, folder: Path, keep: int) -> None:
        """Raises ConfigError where the folder cannot be written."""
        self._folder = folder
        self._keep = keep
        try:
            make_folder(folder)
            for leftover in folder.glob(ASIDE + "*"):
                shutil.rmtree(leftover)
        except OSError as e:
            raise ConfigError(
                f"cannot keep checkpoints in {folder}: {e.strerror}", "give another run.output_dir"
            ) from e

    def newest_whole(self) -> Checkpoint | None:
        """The newest checkpoint, None where there is none; damaged ones are put aside, loudly.

        Raises CheckpointError where all are damaged, and where another version of guerdon has made it.
        """
        for folder in reversed(self._folders()):
            try:
                manifest = read_manifest(folder, _STATE)
                verify(folder, manifest["files"])
            except Damaged as e:
                log.error("CHECKPOINT %s IS DAMAGED: %s; the one before it counts in its place", folder, e)
                _set_aside(folder)
                continue
            try:
                return Checkpoint(folder, RunState(**manifest["state"]))
            except (KeyError, TypeError) as e:
                raise CheckpointError(
                    f"{folder} was made by another version of guerdon: {e}",
                    "go on with that version; or begin a new run in another run.output_dir",
                ) from e
        if damaged := sorted(self._folder.glob(DAMAGED + "*")):
            raise CheckpointError(
                f"all checkpoints in {self._folder} are damaged: {', '.join(path.name for path in damaged)}",
                "bring one of them back from a copy, under its own name; or move the folder away to begin anew",
            )
        return None

    def save(
        self, state: RunState, save_policy: Callable[[Path], None], save_critic: Callable[[], str] | None = None
    ) -> Checkpoint:
        """A new checkpoint, whose policy `save_policy` writes into an empty folder.

        `save_critic` saves the other part of the pair, and returns its name. Raises StorageFailed where the disk does
        not take it; the older ones are as they were then.
        """
        folder = self._folder / f"step-{state.step:06d}"
        aside = folder.with_name(ASIDE + folder.name)
        with storing(f"cannot save {folder}"):
            try:
                (aside / POLICY).mkdir(parents=True)
                save_policy(aside / POLICY)
                if save_critic is not None:
                    state = replace(state, critic=save_critic())
                self._complete(aside, folder, state)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
        for old in self._folders()[: -self._keep]:
            try:
                remove(old)
            except OSError as e:
                log.warning("cannot remove %s: %s", old, e)
        return Checkpoint(folder, state)

    def pair(self, checkpoint: Checkpoint, critic: str) -> Checkpoint:
        """Puts another critic's checkpoint, of the same content, into the pair; returns it as it is then.

        Raises StorageFailed where the disk does not take it; it is as it was then.
        """
        state = replace(checkpoint.state, critic=critic)
        with storing(f"cannot pair {checkpoint.folder} with {critic}"):
            seal_again(checkpoint.folder, _STATE, {"state": asdict(state)})
        return Checkpoint(checkpoint.folder, state)

    def _complete(self, aside: Path, folder: Path, state: RunState) -> None:
        seal(aside, _STATE, {"state": asdict(state)})
        place(aside, folder)

    def _folders(self) -> list[Path]:
        """The oldest first."""
        folders = {int(match[1]): path for path in self._folder.iterdir() if (match := _NAME.fullmatch(path.name))}
        return [folders[step] for step in sorted(folders)]


def decisive_settings(config: ReinforceRunConfig | PPORunConfig) -> dict[str, Any]:
    """The settings by their paths that decide what a run becomes, and so may not change at a resume."""
    algorithm = get_algorithm(config)[0]
    where, remote = get_remote(config)
    found: dict[str, Any] = {
        "run.seed": config.run.seed,
        "data.shuffle": config.data.shuffle,
        f"{where}.send": remote.send,
        f"{where}.suffix": remote.suffix,
        f"{where}.reward_model.name": remote.reward_model.name,
        _COMMAND: f"guerdon {algorithm}",
    }
    if isinstance(remote, RemoteCriticConfig):
        found[f"{where}.combine_rm_and_critic_server"] = remote.combine_rm_and_critic_server
    for section in ("policy", "rollouts", algorithm):
        found |= {f"{section}.{name}": value for name, value in asdict(getattr(config, section)).items()}
    found["policy.total_steps"] = resolve_schedule(config).total_steps
    if config.policy.lr_schedule == "constant":
        del found["policy.total_steps"]
    return {path: value for path, value in found.items() if path not in _NOT_DECISIVE}


def decisive_contents(policy: ModelInfo, prompts_digest: str, ending: str) -> dict[str, Any]:
    """Returns what must be the same at a resume, and is known once the policy and the prompts are loaded.

    `ending` is what the chat template adds to each answer that is sent; empty if nothing is added.
    """
    return {
        _BASE: policy.weights_version,
        "policy.model's dtype": policy.dtype,
        "data.prompts' digest": prompts_digest,
        _ENDING: ending,
    }


def check_settings(state: RunState, settings: dict[str, Any], folder: Path) -> None:
    """Raises CheckpointError for the first of `settings` that is not as it was, which a run cannot go on with."""
    for path in sorted(settings, key=lambda path: (path != _COMMAND, path)):
        if path == _ENDING and path not in state.settings:
            if settings[path]:
                log.warning(
                    "this run was begun by guerdon 0.1, which did not end answers as the chat template does: rewards "
                    "from here on are not comparable with those before"
                )
            continue
        then, now = state.settings.get(path, _ADDED.get(path)), settings.get(path)
        if then != now:
            raise CheckpointError(
                f"{folder} was made with {path} {then!r}; now it is {now!r}",
                "set it as it was; or begin a new run in another run.output_dir",
            )


def _set_aside(folder: Path) -> None:
    aside = folder.with_name(DAMAGED + folder.name)
    for number in itertools.count(2):  # its step may have been damaged before
        if not aside.exists():
            break
        aside = folder.with_name(f"{DAMAGED}{folder.name}-{number}")
    try:
        folder.rename(aside)
    except OSError as e:
        log.error("cannot rename %s: %s", folder, e)
