"""One run of an actor: its parts, steps, saves and resumes, in one process or on all ranks that torchrun has started.

```
rank 0                                                       every other rank
guerdon reinforce -> train_on_ranks                          train_on_ranks
reinforce.train       the loop, as in one process
training_run.Run      prompts, rewards, checkpoints
update.update
PolicyGroup.step
Group.execute            -- OnTrainer, its rows and loss ---->  Group.follow
PolicyWorker.execute                                         PolicyWorker.execute
PolicyTrainer.step    its shard of the rows                  PolicyTrainer.step
Group.execute            <-- result --------------------------  Group.follow
```
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import secrets
import sys
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

from guerdon.actor import run_checkpoints, trackers
from guerdon.actor.policy_group import PolicyGroup, PolicyWorker
from guerdon.actor.preemption import TIME_IS_UP, Preempted, Preemption, wait_for
from guerdon.actor.prompt_sources import check_prompts
from guerdon.actor.prompts import Prompts, check_sendable, sent_ending
from guerdon.actor.remote_critic import RemoteCritic
from guerdon.actor.remote_teacher import RemoteTeacher
from guerdon.actor.rollouts import Prompt, Rollout
from guerdon.actor.run_metrics import METRICS, rollout_metrics, save_curves, timed
from guerdon.distributed.group import Group
from guerdon.distributed.pulse import EXIT_STATUS, Pulse
from guerdon.distributed.ranks import start
from guerdon.distributed.stopping import asking
from guerdon.durable import locked, make_folder
from guerdon.errors import ConfigError, RanksLost, RewardsFailed
from guerdon.settings.actors import ActorConfig, RewardedRunConfig, get_remote, resolve_schedule

T = TypeVar("T")
Config = TypeVar("Config", bound=ActorConfig)

Score = Callable[[list[Rollout], Callable[[], None]], None]

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
CURVES = "curves.png"
SETTINGS = "settings.yaml"

_KEPT_WITH_CRITIC = ("reward", "validation_reward", "kl")
"""Metrics stored in a critic's checkpoint, by which its server may keep the best one."""
_VALIDATION = 0
"""The step in the seed of validation's responses, constant so that they are always drawn by the same numbers."""
_NUM_RECENT = 3
"""The next step is expected to take as long as the longest of so many last steps."""
_PATIENCE_S = 5.0
"""Seconds for the pulse to log a loss and end the process."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended: `step` of `steps` are done; `stopped` says why it stopped before the last, None if it did not.

    `metrics` are the last logged value of each. `exit_status` is the command's: 0 at the end, 130 and 143 after SIGINT
    and SIGTERM, 75 (try again later) at the time limit. `checkpoint` is the newest, from which the same command
    resumes, None if there is none.
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
                f"{self.step} steps are done: the policy is in {self.checkpoint}/policy, the rest in {self.output_dir}"
            )
        resumes = "starts over" if self.checkpoint is None else f"resumes from {self.checkpoint}"
        return f"{self.stopped}: stopped after step {self.step} of {self.steps}; the same command {resumes}"


class Run:
    """The policy, its generator, prompts, trackers and checkpoints; used as a context, which closes them all.

        with Run(config, score=rewards.score) as run:
            for step in run.steps():
                for group in run.rollouts(step):  # each when it is finished
                    ...
                run.finish(step, metrics, rollouts)
        return run.summary()

    `policy` is the policy on all ranks, `generator` generates with it, `data` are the Prompts. `id` names the run, and
    stays the same after a resume; `step` counts the steps done. `memory` is a dict of JSON values, saved with each
    checkpoint: the loop's own state between steps. Memory and weights may change only after all of the step's rollouts
    are generated, because a preemption before that saves them as the state after the last step, and ends the `with`
    block.
    """

    def __init__(
        self,
        config: ActorConfig,
        *,
        score: Score,
        critic: RemoteCritic | None = None,
        preemption: Preemption | None = None,
        policy: PolicyGroup | None = None,
    ) -> None:
        """Loads everything, and resumes from the newest checkpoint in output_dir if there is one.

        `score` sets `reward` or `error` of rollouts of several groups, and calls its second argument regularly while it
        waits; validation uses it. A `critic`, which must be reachable, goes back to the same step. The time limit of
        `preemption` counts from its creation. `policy` leads several ranks. Raises ConfigError and CheckpointError.
        """
        self.config = config
        self._score = score
        self._critic = critic
        self._preemption = preemption or Preemption(config.run.time_limit)
        self.policy = policy or PolicyGroup()
        self._stopped: str | None = None
        self._metrics: dict[str, float] = {}
        self._folder = Path(config.run.output_dir)
        with ExitStack() as stack:
            self._start(stack)
            self._exits = stack.pop_all()

    def _start(self, exits: ExitStack) -> None:
        exits.enter_context(_lock(self._folder))
        trackers.check_installed(self.config.run.trackers)
        checkpoints = run_checkpoints.RunCheckpoints(self._folder / CHECKPOINTS, self.config.run.keep_checkpoints)
        found = self._find_checkpoint(checkpoints)
        critic = None if self._critic is None else run_checkpoints.check_pairable(self._critic.state(), found)
        self._reference: RemoteTeacher | None = None
        if isinstance(self.config, RewardedRunConfig) and self.config.reference.url is not None:
            reference = RemoteTeacher(self.config.reference, self.config.rollouts.temperature, "reference")
            self._reference = exits.enter_context(reference)
            reference.wait_ready(self._preemption.seconds_left())
        started = time.monotonic()
        exits.callback(self._preemption.close)
        self._load(found)
        self.id, self.step = secrets.token_hex(4), 0
        self.memory: dict[str, Any] = {}
        if found is not None:
            self.id, self.step, self.memory = found.state.run_id, found.state.step, found.state.memory
            self.policy.load(found.policy)
            if self._critic is not None:
                found = run_checkpoints.load_paired_critic(self._critic, found, checkpoints)
            log.info("resuming from %s", found.folder)
        elif critic is not None and critic.step:
            log.warning("the critic is at step %d already, and continues from there", critic.step)
        if self._reference is not None:
            self._reference.check_tokenizer(self.policy.trainer.tokenizer)
            self._reference.remember_in(self.memory)
        self._generator_version = self.policy.trainer.weights_version if found is None else ""
        self._saver = run_checkpoints.CheckpointSaver(checkpoints, self._critic, found)
        self._first_step = self.step
        self._recent_s: deque[float] = deque([0.0], _NUM_RECENT)
        self._generation_s, self._loading_s = 0.0, time.monotonic() - started
        self._open_logs(exits)

    def _find_checkpoint(self, checkpoints: run_checkpoints.RunCheckpoints) -> run_checkpoints.RunCheckpoint | None:
        """Returns the checkpoint to resume from, None for a new run; raises if the settings forbid it."""
        found = checkpoints.newest_whole()
        if found is None:
            return None
        if not self.config.run.resume:
            raise ConfigError(
                f"{self._folder} has a run of {found.state.step} steps, and run.resume is false",
                "set another run.output_dir, or move that one away",
            )
        run_checkpoints.check_settings_unchanged(
            found.state, run_checkpoints.decisive_settings(self.config), found.folder
        )
        return found

    def _load(self, found: run_checkpoints.RunCheckpoint | None) -> None:
        """Loads the initial policy and the prompts; raises if they are not those of `found`."""
        config, run = self.config, self.config.run
        self.generator = self.policy.open(
            resolve_schedule(config),
            config.rollouts,
            run.seed,
            self._preemption,
            keeps_reference=isinstance(config, RewardedRunConfig) and self._reference is None,
        )
        loaded, max_new_tokens = self.policy.trainer.loaded, config.rollouts.max_new_tokens
        if loaded.max_length is not None and loaded.max_length <= max_new_tokens:
            raise ConfigError(
                f"rollouts.max_new_tokens is {max_new_tokens}, and the policy takes {loaded.max_length} tokens in all",
                "lower it, so that prompts fit",
            )
        self.data = Prompts(
            config.data,
            loaded.tokenizer,
            prompts_per_step=config.rollouts.prompts_per_step,
            max_prompt_length=None if loaded.max_length is None else loaded.max_length - max_new_tokens,
            seed=run.seed,
            output_dir=self._folder,
        )
        ending = ""
        if isinstance(config, RewardedRunConfig):
            check_sendable(self.data, *get_remote(config), max_new_tokens)
            ending = sent_ending(self.data.ending, get_remote(config)[1])
        self._decisive = run_checkpoints.decisive_settings(config) | run_checkpoints.decisive_contents(
            loaded.info, self.data.digest, ending
        )
        if found is not None:
            run_checkpoints.check_settings_unchanged(found.state, self._decisive, found.folder)

    def _open_logs(self, exits: ExitStack) -> None:
        """Writes the settings, and opens trackers and bar to continue after the last step."""
        run, settings = self.config.run, dataclasses.asdict(self.config)
        (self._folder / SETTINGS).write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        self._trackers = trackers.Trackers(self._folder, run.trackers, run.project, self.id, settings, self.step)
        exits.callback(self._trackers.close)
        for row in trackers.read_metrics(self._folder / trackers.METRICS_FILE):
            self._metrics |= {name: value for name, value in row.items() if name in METRICS and value is not None}
        self._bar = trackers.ProgressBar(self.step, run.steps, run.progress)
        exits.callback(self._bar.close)

    # --------------------------------------------------------------------------------------- what a loop calls

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the remaining steps, up to run.steps, and saves the last.

        Validates before step 1. Ends the `with` block if the run is preempted. Call `finish` for every step.
        """
        if self._critic is not None:
            self.save()  # the pair that a new run starts from
        if not self.step and self.data.validation:
            self._log(0, self._validate(0))
        while self.step < self.config.run.steps:
            self._stop_if_preempted(max(self._recent_s) + self._expected_save_s)
            self._step_started = time.monotonic()
            yield self.step + 1
        self.save()

    def rollouts(self, step: int) -> Iterator[list[Rollout]]:
        """Yields the step's responses, a group (all responses to one prompt) when it is finished; without rewards.

        A reference's server gets each group first, if there is one; `collect_reference` waits for it.

        The prompts are `data.batch(step)`. The generator has the policy's newest weights, which must not change before
        the iterator ends; meanwhile the optimiser is offloaded, if configured.
        """
        started = time.monotonic()
        for group in self._generate(self.data.batch(step), self.config.rollouts.rollouts_per_prompt, step):
            if self._reference is not None:
                self._reference.submit(group)
            yield group
            self.check_preemption()
        self._generation_s = time.monotonic() - started

    def collect_reference(self, metrics: dict[str, float]) -> None:
        """Waits for the log-probs that a reference's server gives, if there is one.

        Call it after the rewards are there: a response without these log-probs loses its reward.
        """
        if self._reference is not None:
            with timed(metrics, "seconds_reference"):
                self._reference.collect(self.check_preemption)

    def check_preemption(self) -> None:
        """Ends the `with` block if the run is preempted; the step counts as not started.

        Call it while a step waits, before it changes the weights or the memory.
        """
        self._stop_if_preempted(self._expected_save_s)

    def wait_for_critic(self, future: Future[T]) -> T:
        """Returns the critic's result, awaited while policy and critic are not in step.

        If the run is preempted, waits a little longer for it, then ends the `with` block without a save: the previous
        checkpoint is the right one to resume from.
        """
        until = math.inf

        def check() -> None:
            nonlocal until
            if (reason := self._preemption.reason(0.0)) is not None:
                until = min(until, time.monotonic() + min(self._saver.grace_s, self._preemption.seconds_left()))
            if time.monotonic() >= until:
                self._stopped = reason
                raise Preempted(is_between=False)

        return wait_for(future, check)

    def finish(self, step: int, metrics: dict[str, float], rollouts: list[Rollout]) -> None:
        """Ends a step: shows and logs its metrics, validates and saves if due.

        `metrics` are the loop's own (names of docs/metrics.md); those of rewards, lengths, failures and the step's time
        are computed here from `rollouts`, which are all of the step's, including failed ones.
        """
        run = self.config.run
        self.step = step
        seconds = time.monotonic() - self._step_started
        known = {
            **rollout_metrics(rollouts),
            **metrics,
            "epoch": self.data.epoch(step),
            "optimizer_steps": float(self.policy.trainer.step_count),
            "tokens_per_second": sum(rollout.response_length for rollout in rollouts) / seconds,
            "seconds_step": seconds,
            "seconds_generation": self._generation_s,
        }
        if self._saver.last_save_s is not None:
            known["seconds_save"] = self._saver.last_save_s
        try:
            if self.data.validation and (step % run.validate_every == 0 or step == run.steps):
                known |= self._validate(step)
        finally:  # even if the run stops during validation, because the step is done
            self._log(step, known)
            self._bar.update(known)
        self._recent_s.append(time.monotonic() - self._step_started)
        self._saver.save_if_due(run.save_every, self._snapshot(), self.wait_for_critic)

    def save(self) -> None:
        """Saves a checkpoint of the steps done, with the critic's; no-op if it is saved already.

        Raises StorageFailed; older checkpoints stay.
        """
        self._saver.save(self._snapshot(), self.wait_for_critic)

    def summary(self) -> RunSummary:
        """Returns how the run ended, or stands now."""
        status = self._preemption.exit_status() if self._stopped else 0
        newest = None if self._saver.newest is None else self._saver.newest.folder
        return RunSummary(
            self._folder, self.step, self.config.run.steps, self._stopped, dict(self._metrics), status, newest
        )

    def __enter__(self) -> Run:
        self._preemption.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        with self._exits:
            if isinstance(error, RewardsFailed) or (isinstance(error, Preempted) and error.is_between):
                self._saver.save_preempted(self._snapshot())
            if error is not None and not isinstance(error, Preempted):
                return False
            if error is None:
                self.save()
            newest, has_learnt = self._saver.newest, self.step > self._first_step
            self.step = 0 if newest is None else newest.state.step
        if self._stopped == TIME_IS_UP and not has_learnt:
            raise ConfigError(
                f"not one step fits into run.time_limit, {self.config.run.time_limit}: it ended within the first",
                "raise it, or make steps smaller; if the servers were away, start them first",
            )
        rows = trackers.read_metrics(self._folder / trackers.METRICS_FILE)
        save_curves(rows, self._folder / CURVES, f"{self._folder.name}: {self.step} steps")
        log.info("%s", self.summary())
        return True

    # --------------------------------------------------------------------------------------- within

    @property
    def _expected_save_s(self) -> float:
        """Seconds that a save may take: as long as the last one, or before the first as long as loading took."""
        return self._loading_s if self._saver.last_save_s is None else self._saver.last_save_s

    def _stop_if_preempted(self, seconds_ahead: float) -> None:
        self._stopped = self._preemption.reason(seconds_ahead)
        if self._stopped is not None:
            raise Preempted

    def _snapshot(self) -> run_checkpoints.RunSnapshot:
        metrics = {"actor_step": float(self.step)}
        metrics |= {name: self._metrics[name] for name in _KEPT_WITH_CRITIC if name in self._metrics}
        return run_checkpoints.RunSnapshot(
            run_checkpoints.RunState(self.id, self.step, self._decisive, self.memory), self.policy.save, metrics
        )

    def _generate(self, prompts: list[Prompt], num: int, step: int) -> Iterator[list[Rollout]]:
        if self._generator_version != self.policy.trainer.weights_version:
            self.generator.sync()
            self._generator_version = self.policy.trainer.weights_version
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
        started = time.monotonic()
        rollouts: list[Rollout] = []
        for group in self._generate(self.data.validation, 1, _VALIDATION):
            rollouts += group
            self.check_preemption()
        rollouts.sort(key=lambda rollout: rollout.group)
        self._score(rollouts, self.check_preemption)
        if shown := rollouts[: self.config.run.num_samples]:
            self._trackers.samples(step, shown)
        metrics = rollout_metrics(rollouts, prefix="validation_")
        return metrics | {"seconds_validation": time.monotonic() - started}

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self._trackers.log(step, metrics)
        self._metrics |= metrics


def train_on_ranks(config: Config, train: Callable[[Config, PolicyGroup | None], RunSummary]) -> int:
    """Trains, with all ranks if there are several; returns the exit status.

    Raises what `train` raises, and StartError if the ranks do not find each other. The other ranks take all settings
    but `parallel` and `policy.device` from rank 0, and exit with 0 however its run ends. If a rank is lost, all others
    end at once with EXIT_STATUS.
    """
    ranks = start(config.parallel, config.policy.device)
    if ranks.size == 1:
        return train(config, None).exit_status
    pulse = Pulse(ranks)
    pulse.start()
    try:
        if not ranks.is_leader:
            with asking(pulse.ask_to_stop, for_good=True):
                Group(PolicyWorker(ranks, pulse.tick), ranks, pulse).follow()
            return 0
        group = PolicyGroup(ranks, pulse)
        pulse.on_lost = lambda _: _log_lost_rank(group.error, config.run.output_dir)
        with group as policy:
            check_prompts(config.data)
            return train(config, policy).exit_status
    except RanksLost as e:
        sys.stdout.flush()
        sys.stderr.flush()
        # The pulse logs the loss and ends this process: Python's own exit would wait for threads that may hang in a
        # collective.
        pulse.verdict(e)
        time.sleep(_PATIENCE_S)
        os._exit(EXIT_STATUS)


def _lock(folder: Path) -> TextIO:
    """Creates the folder and takes its lock."""
    try:
        make_folder(folder)
        return locked(folder / ".lock")
    except BlockingIOError as e:
        raise ConfigError(f"another run is using {folder}", "stop it, or set another run.output_dir") from e
    except OSError as e:
        raise ConfigError(f"cannot write to {folder}: {e.strerror}", "set another run.output_dir") from e


def _log_lost_rank(error: BaseException | None, output_dir: str) -> None:
    """Logs where the run resumes, after the error that it was about to end with, which is logged nowhere else."""
    if error is not None and not isinstance(error, RanksLost):
        log.critical("the run was about to end with this error when a rank was lost:", exc_info=error)
    log.critical("the run ends here; the same command resumes from the newest checkpoint in %s", output_dir)
