"""The policy on many ranks, as rank 0 has it: with the methods of one in this process, each leading all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from torch import Tensor

from guerdon.actor.generation import Generator, make_generator
from guerdon.actor.policy import Policy
from guerdon.actor.preemption import Stopping
from guerdon.actor.rollouts import Prompt, Rollout
from guerdon.actor.worker import Generate, GoOn, Load, Measure, MoveOptimizer, Open, Order, PolicyWorker, Save, Step
from guerdon.distributed.group import Group
from guerdon.distributed.pulse import Pulse
from guerdon.distributed.ranks import Ranks
from guerdon.engine.checkpoint.language_models import LoadedPolicy, load_policy
from guerdon.errors import ConfigError
from guerdon.settings.actors import PolicyConfig, RolloutConfig
from guerdon.training.optimiser import moment_bytes
from guerdon.training.policy_trainer import Logprobs, Loss, PolicyTrainer, StepReport


class SharedPolicy:
    """A policy on all `ranks`; used as a context, at whose end the others leave, too.

    What fails on any rank is raised here. Each method returns when every rank is done with it, so that rank 0 may leave
    between any two. Where a rank is lost, they raise RanksLost, until the pulse ends this process. `error` is what the
    context ends with.
    """

    error: BaseException | None = None

    def __init__(self, ranks: Ranks, pulse: Pulse) -> None:
        self._worker = PolicyWorker(ranks, pulse.tick)
        self._group = Group(self._worker, ranks, pulse)
        self._ranks, self._pulse = ranks, pulse

    def open(self, config: PolicyConfig, rollouts: RolloutConfig, seed: int, stopping: Stopping) -> None:
        """Loads the policy on every rank; from now on a rank that is asked to stop has `stopping` stop them all.

        Raises ConfigError and CheckpointError.
        """
        if rollouts.engine == "vllm":
            raise ConfigError(
                f"rollouts.engine is vllm, and the policy is on {self._ranks.size} ranks",
                "set rollouts.engine to transformers, or start one process",
            )
        self._pulse.on_stop = stopping.ask
        self.lead(Open(config, rollouts, seed))

    def lead(self, command: Order) -> Any:
        """What all ranks make of a command."""
        return self._group.lead(command)

    # --------------------------------------------------------------------------------------- as PolicyTrainer

    @property
    def policy(self) -> LoadedPolicy:
        """This rank's part of it."""
        return self._worker.trainer.policy

    @property
    def step_count(self) -> int:
        return self._worker.trainer.step_count

    @property
    def weights_version(self) -> str:
        return self._worker.trainer.weights_version

    def logprobs(
        self,
        rows: list[np.ndarray],
        prompt_lengths: np.ndarray,
        temperature: float = 1.0,
        with_entropies: bool = False,
    ) -> Logprobs:
        made: Logprobs = self.lead(Measure(rows, prompt_lengths, temperature, with_entropies))
        return made

    def reference_logprobs(
        self, rows: list[np.ndarray], prompt_lengths: np.ndarray, temperature: float = 1.0
    ) -> Tensor:
        made: Logprobs = self.lead(Measure(rows, prompt_lengths, temperature, of_reference=True))
        return made.logprobs

    def step(
        self,
        rows: list[np.ndarray],
        prompt_lengths: np.ndarray,
        loss: Loss,
        *,
        temperature: float = 1.0,
        with_entropies: bool = False,
    ) -> StepReport:
        """As PolicyTrainer's; the loss is sent to the other ranks, so that it must be data, as PolicyLoss is."""
        report: StepReport = self.lead(Step(rows, prompt_lengths, loss, temperature, with_entropies))
        return report

    def offload_optimizer(self) -> None:
        self.lead(MoveOptimizer(is_on_device=False))

    def onload_optimizer(self) -> None:
        self.lead(MoveOptimizer(is_on_device=True))

    def save(self, folder: Path) -> None:
        """As PolicyTrainer's; every rank writes its part into the folder, which all of them must see."""
        self.lead(Save(folder.absolute()))

    def load(self, folder: Path) -> None:
        self.lead(Load(folder.absolute()))

    # --------------------------------------------------------------------------------------- its end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.error = error
        if self._pulse.lost is None:
            self._group.end()


class SharedGenerator:
    """Generates on all ranks: each data-parallel part takes whole groups, in rounds of so many tokens.

    After every round the groups that were finished in it, wherever, are yielded; a caller may leave there.
    """

    def __init__(self, policy: SharedPolicy) -> None:
        self._policy = policy

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num: int,
        config: RolloutConfig,
        seed: tuple[int, ...],
        greedy: bool = False,
    ) -> Iterator[list[Rollout]]:
        """As `Generator`; raises as TransformersGenerator's."""
        # Only rank 0 has to know what the prompts say.
        sent = [dataclasses.replace(prompt, text="", messages=None, ending=None) for prompt in prompts]
        made = self._policy.lead(Generate(sent, num, config, seed, greedy))
        while True:
            for group in made.groups:
                for rollout in group:
                    rollout.prompt = prompts[rollout.group]
                yield group
            if not made.is_left:
                return
            made = self._policy.lead(GoOn())

    def sync(self) -> None:
        """Nothing: the weights are in place."""


def opened(
    config: PolicyConfig, rollouts: RolloutConfig, seed: int, shared: SharedPolicy | None, stopping: Stopping
) -> tuple[Policy, Generator]:
    """The policy and what generates with it: in this process, or where it is `shared` on all ranks.

    Raises ConfigError and CheckpointError.
    """
    if shared is None:
        trainer = PolicyTrainer(load_policy(config, moment_bytes=moment_bytes(config)), config, seed=seed)
        return trainer, make_generator(trainer, rollouts)
    # From here on an interrupt amid a command would leave the other ranks in the middle of it.
    stopping.listen()
    shared.open(config, rollouts, seed, stopping)
    return shared, SharedGenerator(shared)
