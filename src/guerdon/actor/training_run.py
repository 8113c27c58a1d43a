"""One run of an actor: its parts, its steps, and everything that it leaves behind and goes on from."""

from __future__ import annotations

import dataclasses
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar

import yaml

from guerdon.actor import curves, trackers
from guerdon.actor.pairing import PairedCritic, load_critic, pairable
from guerdon.actor.policy_group import SharedPolicy, opened
from guerdon.actor.preemption import TIME_IS_UP, Left, Stopping, heeding
from guerdon.actor.progress import Progress
from guerdon.actor.prompts import Prompts, check_sendable, sent_ending
from guerdon.actor.rollouts import Prompt, Rollout
from guerdon.actor.run_checkpoints import (
    Checkpoint,
    Checkpoints,
    RunState,
    check_settings,
    decisive_contents,
    decisive_settings,
)
from guerdon.actor.run_metrics import METRICS, rollout_metrics
from guerdon.actor.saving import Saving, Snapshot
from guerdon.durable import locked, make_folder
from guerdon.errors import ConfigError, RewardsFailed
from guerdon.settings.actors import PPORunConfig, ReinforceRunConfig, get_remote, resolve_schedule

T = TypeVar("T")

Score = Callable[[list[Rollout], Callable[[], None]], None]

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
CURVES = "curves.png"
SETTINGS = "settings.yaml"

_KEPT_WITH_CRITIC = ("reward", "validation_reward", "kl")
"""The metrics that go into a critic's checkpoint, by which its server may keep the best."""
_VALIDATION = 0
"""The step in the seed of validation's responses: they are drawn by the same numbers every time."""
_NUM_RECENT = 3
"""The last steps, whose longest says how long the next may take."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended: `step` of `steps` are done; `stopped` says why it left before the last, None where it did not.

    `metrics` are those last logged under each name. `exit_status` is the command's: 0 at the end, 130 and 143 after
    SIGINT and SIGTERM, 75 (try again later) where the time was up. `checkpoint` is the newest, from which the same
    command goes on, None where there is none.
    """

    output_dir: Path
    step: int
    steps: int
    stopped: str | None
    metrics: dict[str, float]
    exit_status: int
    checkpoint: Path | None

    def __str__(self) -> str:
        if self.stopped is None:
            return (
                f"{self.step} steps are done: the policy is in {self.checkpoint}/policy, all else in {self.output_dir}"
            )
        goes_on = "begins anew" if self.checkpoint is None else f"goes on from {self.checkpoint}"
        return f"{self.stopped}: left after step {self.step} of {self.steps}; the same again {goes_on}"


class Run:
    """The policy, its generator, prompts, trackers and checkpoints; used as a context, whose end closes them all.

        with Run(config, score=rewards.score) as run:
            for step in run.steps():
                for group in run.rollouts(step):  # each when it is finished
                    ...
                run.finish(step, metrics, rollouts)
        return run.summary()

    `policy` is the PolicyTrainer, or where there are several ranks the SharedPolicy, `generator` what generates with
    it, `data` the Prompts. `id` names the run, and is the same after a resume; `step` counts the steps done. `memory`
    is a dict of JSON values that goes into each checkpoint and comes back at a resume: what a loop must remember from
    step to step. Like the weights it may change only when the step's rollouts are all there, since a stop amid them
    saves what is then, and ends the `with` block.
    """

    def __init__(
        self,
        config: ReinforceRunConfig | PPORunConfig,
        *,
        score: Score,
        critic: PairedCritic | None = None,
        stopping: Stopping | None = None,
        shared: SharedPolicy | None = None,
    ) -> None:
        """Loads everything, and goes on from the newest checkpoint in output_dir where there is one.

        `score` sets `reward` or `error` of each of these rollouts (of several groups), and returns when all are there;
        while it waits it calls what it is given, now and then. Validation asks it. A `critic`, which must be reachable,
        is brought to the same step. `stopping` counts the time limit from when it was made. `shared` is
        the policy where it is on several ranks. Raises ConfigError and CheckpointError.
        """
        self.config = config
        self._score = score
        self._critic = critic
        self._stopping = stopping or Stopping(config.run.time_limit)
        self._shared = shared
        self._stopped: str | None = None
        self._metrics: dict[str, float] = {}
        self._folder = Path(config.run.output_dir)
        with ExitStack() as stack:
            self._begin(stack)
            self._exits = stack.pop_all()

    def _begin(self, exits: ExitStack) -> None:
        exits.enter_context(_taken(self._folder))
        trackers.check_installed(self.config.run.trackers)
        checkpoints = Checkpoints(self._folder / CHECKPOINTS, self.config.run.keep_checkpoints)
        found = self._found(checkpoints)
        critic = None if self._critic is None else pairable(self._critic.state(), found)
        started = time.monotonic()
        exits.callback(self._stopping.close)
        self._load(found)
        self.id, self.step = secrets.token_hex(4), 0
        self.memory: dict[str, Any] = {}
        if found is not None:
            found = self._resume(found, checkpoints)
        elif critic is not None and critic.step:
            log.warning("the critic has learnt %d steps already, and goes on from there", critic.step)
        self._generates_with = self.policy.weights_version if found is None else ""
        self._saving = Saving(checkpoints, self._critic, found)
        self._first_step = self.step
        self._recent_s: deque[float] = deque([0.0], _NUM_RECENT)
        self._generation_s, self._loading_s = 0.0, time.monotonic() - started
        self._open_logs(exits)

    def _found(self, checkpoints: Checkpoints) -> Checkpoint | None:
        """The checkpoint to go on from, None for a new run; raises where the settings do not let the run go on."""
        found = checkpoints.newest_whole()
        if found is None:
            return None
        if not self.config.run.resume:
            raise ConfigError(
                f"{self._folder} has a run of {found.state.step} steps, and run.resume is false",
                "give another run.output_dir, or move that one away",
            )
        check_settings(found.state, decisive_settings(self.config), found.folder)
        return found

    def _load(self, found: Checkpoint | None) -> None:
        """Loads the policy as it was before step 1, and the prompts; raises where they are not those of `found`."""
        config, run = self.config, self.config.run
        self.policy, self.generator = opened(
            resolve_schedule(config), config.rollouts, run.seed, self._shared, self._stopping
        )
        loaded = self.policy.policy
        self.data = Prompts(
            config.data,
            loaded.tokenizer,
            prompts_per_step=config.rollouts.prompts_per_step,
            max_prompt_length=_room(loaded.max_length, config.rollouts.max_new_tokens),
            seed=run.seed,
            output_dir=self._folder,
        )
        check_sendable(self.data, *get_remote(config), config.rollouts.max_new_tokens)
        ending = sent_ending(self.data.ending, get_remote(config)[1])
        self._decisive = decisive_settings(config) | decisive_contents(loaded.info, self.data.digest, ending)
        if found is not None:
            check_settings(found.state.with_current_name(loaded.info), self._decisive, found.folder)

    def _resume(self, found: Checkpoint, checkpoints: Checkpoints) -> Checkpoint:
        """Becomes the run that was saved, and brings the critic there; returns the checkpoint of the pair."""
        self.id, self.step, self.memory = found.state.run_id, found.state.step, found.state.memory
        self.policy.load(found.policy)
        if self._critic is not None:
            found = load_critic(self._critic, found, checkpoints)
        log.info("going on from %s", found.folder)
        return found

    def _open_logs(self, exits: ExitStack) -> None:
        """Writes the settings, and opens trackers and bar behind the steps done."""
        run, settings = self.config.run, dataclasses.asdict(self.config)
        (self._folder / SETTINGS).write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        self._trackers = trackers.Trackers(self._folder, run.trackers, run.project, self.id, settings, self.step)
        exits.callback(self._trackers.close)
        for row in trackers.read_metrics(self._folder / trackers.METRICS_FILE):
            self._metrics |= {name: value for name, value in row.items() if name in METRICS and value is not None}
        self._progress = Progress(self.step, run.steps, run.progress)
        exits.callback(self._progress.close)

    # --------------------------------------------------------------------------------------- what a loop calls

    def steps(self) -> Iterator[int]:
        """The numbers of the steps to do, from 1 or from behind the resumed one, up to run.steps, and saves the last.

        Validates before step 1. Ends the `with` block where the run was asked to stop or the time is up. Every step
        must be brought to `finish`.
        """
        if self._critic is not None:
            self.save()  # that of a new run says where both begin
        if not self.step and self.data.validation:
            self._log(0, self._validate(0))
        while self.step < self.config.run.steps:
            self._leave_where_asked(max(self._recent_s) + self._save_s)
            self._began = time.monotonic()
            yield self.step + 1
        self.save()

    def rollouts(self, step: int) -> Iterator[list[Rollout]]:
        """The step's responses, a finished group (all responses to one prompt) at a time; none has a reward yet.

        The prompts are `data.batch(step)`. The generator has the policy's newest weights, which must not change before
        the iterator is at its end; the optimiser is off the device meanwhile, where the settings say so.
        """
        began = time.monotonic()
        for group in self._generated(self.data.batch(step), self.config.rollouts.rollouts_per_prompt, step):
            yield group
            self.heed()
        self._generation_s = time.monotonic() - began

    def heed(self) -> None:
        """Ends the `with` block where the run was asked to stop, or the time is up; the step counts as not begun.

        To be called where a step waits, before it changes the weights or the memory.
        """
        self._leave_where_asked(self._save_s)

    def outcome(self, future: Future[T]) -> T:
        """The result of what the critic was asked to do while policy and critic are not as between two steps.

        Where the run is asked to stop, it waits for that a little longer, then ends the `with` block without a save:
        the checkpoint before is the right one to go on from.
        """
        until = math.inf

        def heed() -> None:
            nonlocal until
            if (reason := self._stopping.reason(0.0)) is not None:
                until = min(until, time.monotonic() + min(self._saving.patience_s, self._stopping.left_s()))
            if time.monotonic() >= until:
                self._stopped = reason
                raise Left(is_between=False)

        return heeding(future, heed)

    def finish(self, step: int, metrics: dict[str, float], rollouts: list[Rollout]) -> None:
        """Ends a step: shows and logs its metrics, and validates and saves where that is due.

        `metrics` are the loop's own (names of docs/metrics.md); those of rewards, lengths, failures and the step's time
        are made here from `rollouts`, which are all of the step's, failed ones included.
        """
        run = self.config.run
        self.step = step
        seconds = time.monotonic() - self._began
        known = {
            **rollout_metrics(rollouts),
            **metrics,
            "epoch": self.data.epoch(step),
            "optimizer_steps": float(self.policy.step_count),
            "tokens_per_second": sum(rollout.response_length for rollout in rollouts) / seconds,
            "seconds_step": seconds,
            "seconds_generation": self._generation_s,
        }
        if self._saving.seconds is not None:
            known["seconds_save"] = self._saving.seconds
        try:
            if self.data.validation and (step % run.validate_every == 0 or step == run.steps):
                known |= self._validate(step)
        finally:  # also where the run leaves amid the validation: the step is done
            self._log(step, known)
            self._progress.update(known)
        self._recent_s.append(time.monotonic() - self._began)
        self._saving.save_every(run.save_every, self._snapshot(), self.outcome)

    def save(self) -> None:
        """Saves a checkpoint of the steps done, with the critic's; nothing where the newest one has them.

        Raises StorageFailed; the older ones are as they were then.
        """
        self._saving.save(self._snapshot(), self.outcome)

    def summary(self) -> RunSummary:
        """How it ended, or stands now."""
        status = self._stopping.exit_status() if self._stopped else 0
        newest = None if self._saving.newest is None else self._saving.newest.folder
        return RunSummary(
            self._folder, self.step, self.config.run.steps, self._stopped, dict(self._metrics), status, newest
        )

    def __enter__(self) -> Run:
        self._stopping.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        with self._exits:
            if isinstance(error, RewardsFailed) or (isinstance(error, Left) and error.is_between):
                self._saving.save_leaving(self._snapshot())
            if error is not None and not isinstance(error, Left):
                return False
            if error is None:
                self.save()
            newest, has_learnt = self._saving.newest, self.step > self._first_step
            self.step = 0 if newest is None else newest.state.step
        if self._stopped == TIME_IS_UP and not has_learnt:
            raise ConfigError(
                f"not one step fits into run.time_limit, {self.config.run.time_limit}: it was over amid the first",
                "give more time, or smaller steps; where the servers were away, start them before",
            )
        rows = trackers.read_metrics(self._folder / trackers.METRICS_FILE)
        curves.save(rows, self._folder / CURVES, f"{self._folder.name}: {self.step} steps")
        log.info("%s", self.summary())
        return True

    # --------------------------------------------------------------------------------------- within

    @property
    def _save_s(self) -> float:
        """What a save may take: as long as the last one, or before the first as long as loading took."""
        return self._loading_s if self._saving.seconds is None else self._saving.seconds

    def _leave_where_asked(self, seconds_ahead: float) -> None:
        self._stopped = self._stopping.reason(seconds_ahead)
        if self._stopped is not None:
            raise Left

    def _snapshot(self) -> Snapshot:
        metrics = {"actor_step": float(self.step)}
        metrics |= {name: self._metrics[name] for name in _KEPT_WITH_CRITIC if name in self._metrics}
        return Snapshot(RunState(self.id, self.step, self._decisive, self.memory), self.policy.save, metrics)

    def _generated(self, prompts: list[Prompt], num: int, step: int) -> Iterator[list[Rollout]]:
        if self._generates_with != self.policy.weights_version:
            self.generator.sync()
            self._generates_with = self.policy.weights_version
        offloads = self.config.policy.offload_optimizer
        if offloads:
            self.policy.offload_optimizer()
        try:
            yield from self.generator.generate(
                prompts, num=num, config=self.config.rollouts, seed=(self.config.run.seed, step)
            )
        finally:
            if offloads:
                self.policy.onload_optimizer()

    def _validate(self, step: int) -> dict[str, float]:
        began = time.monotonic()
        rollouts: list[Rollout] = []
        for group in self._generated(self.data.validation, 1, _VALIDATION):
            rollouts += group
            self.heed()
        rollouts.sort(key=lambda rollout: rollout.group)
        self._score(rollouts, self.heed)
        if shown := rollouts[: self.config.run.num_samples]:
            self._trackers.samples(step, shown)
        metrics = rollout_metrics(rollouts, prefix="validation_")
        return metrics | {"seconds_validation": time.monotonic() - began}

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self._trackers.log(step, metrics)
        self._metrics |= metrics


def _taken(folder: Path) -> TextIO:
    """The lock of the folder, which is there then, and nobody else's."""
    try:
        make_folder(folder)
        return locked(folder / ".lock")
    except BlockingIOError as e:
        raise ConfigError(f"another run works in {folder}", "stop it, or give another run.output_dir") from e
    except OSError as e:
        raise ConfigError(f"cannot write to {folder}: {e.strerror}", "give another run.output_dir") from e


def _room(max_length: int | None, max_new_tokens: int) -> int | None:
    """Tokens that a prompt may have."""
    if max_length is None:
        return None
    if max_length <= max_new_tokens:
        raise ConfigError(
            f"rollouts.max_new_tokens is {max_new_tokens}, and the policy takes {max_length} tokens in all",
            "give less, so that prompts have room",
        )
    return max_length - max_new_tokens
