"""What every rank of an actor does when rank 0 says so: its part of generating, of measuring and of learning.

A command is data alone, and has been checked; every rank does all of it, or says what befell it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from guerdon.actor.generation import Generation, TransformersGenerator
from guerdon.actor.rollouts import Prompt, Rollout
from guerdon.core import Command
from guerdon.distributed.ranks import Ranks
from guerdon.distributed.shards import shards
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.settings.actors import PolicyConfig, RolloutConfig
from guerdon.training.optimiser import check_layout, moment_bytes
from guerdon.training.policy_trainer import Logprobs, Loss, PolicyTrainer

STEPS = 32
"""Tokens of each row in a round of generating. In between rank 0 gets what is finished, and may leave."""


@dataclass(frozen=True, slots=True)
class Open:
    """Load the policy, its reference and its optimiser."""

    policy: PolicyConfig
    rollouts: RolloutConfig
    seed: int


@dataclass(frozen=True, slots=True)
class Generate:
    """Begin to generate, and do the first round of it; the arguments are those of `Generator.generate`."""

    prompts: list[Prompt]
    num: int
    config: RolloutConfig
    seed: tuple[int, ...]
    greedy: bool


@dataclass(frozen=True, slots=True)
class GoOn:
    """Do the next round. Any other command in its place gives up what is left."""


@dataclass(frozen=True, slots=True)
class Round:
    """The groups that were finished in a round, and whether any is left."""

    groups: list[list[Rollout]]
    is_left: bool


@dataclass(frozen=True, slots=True, eq=False)
class Measure:
    """Tell the log-probs of the rows' responses, the policy's or its reference's."""

    rows: list[np.ndarray]
    prompt_lengths: np.ndarray
    temperature: float
    with_entropies: bool = False
    of_reference: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Make one optimiser step on the rows of one global batch; the loss must be data, as PolicyLoss is."""

    rows: list[np.ndarray]
    prompt_lengths: np.ndarray
    loss: Loss
    temperature: float
    with_entropies: bool


@dataclass(frozen=True, slots=True)
class Save:
    """Write the policy into this folder, which all ranks see."""

    folder: Path


@dataclass(frozen=True, slots=True)
class Load:
    """Become the policy that was written into this folder."""

    folder: Path


@dataclass(frozen=True, slots=True)
class MoveOptimizer:
    """Move the optimiser's state to the device, or off it."""

    is_on_device: bool


Order: TypeAlias = Open | Generate | GoOn | Measure | Step | Save | Load | MoveOptimizer | Command


class PolicyWorker:
    """Holds this rank's part of the policy, and executes one command at a time.

    `trainer` is there from `Open` on. What is measured is told on rank 0 alone, for its `merge`.
    """

    def __init__(self, ranks: Ranks, tick: Callable[..., None]) -> None:
        """`tick` is called while the model computes."""
        self.trainer: PolicyTrainer
        self._ranks, self._tick = ranks, tick
        self._is_ticking = False
        self._generator: TransformersGenerator
        self._generation: Generation | None = None
        self._whole = ExitStack()
        self._measured: Logprobs | None = None

    def execute(self, command: Order) -> Any:
        """Does this rank's part; of Generate and GoOn a Round, of Step a StepReport, the same on every rank."""
        if isinstance(command, GoOn):
            return self._round()
        self._give_up()
        match command:
            case Open():
                self._open(command)
            case Generate():
                self._begin(command)
                return self._round()
            case Measure():
                self._measured = self._measure(command)
            case Step(rows, lengths, loss, temperature, with_entropies):
                return self.trainer.step(rows, lengths, loss, temperature=temperature, with_entropies=with_entropies)
            case Save(folder):
                self.trainer.save(folder)
            case Load(folder):
                self.trainer.load(folder)
            case MoveOptimizer(is_on_device):
                self.trainer.onload_optimizer() if is_on_device else self.trainer.offload_optimizer()
        return None

    def merge(self, command: Order, parts: list[Any]) -> Any:
        """On rank 0: all groups of a round, or what was measured; of all else every rank has the same."""
        if isinstance(command, Generate | GoOn):
            groups = [group for part in parts[:: self._ranks.tensor_size] for group in part.groups]
            return Round(groups, any(part.is_left for part in parts))
        if isinstance(command, Measure):
            measured, self._measured = self._measured, None
            return measured
        return parts[0]

    def is_watched(self, command: Order) -> bool:
        """Whether it runs through the policy's layers, which tick."""
        return self._is_ticking and isinstance(command, Generate | GoOn | Measure | Step)

    # --------------------------------------------------------------------------------------- within

    def _open(self, command: Open) -> None:
        config, ranks = command.policy, self._ranks
        # All of it, for the others talk to each other throughout, and would wait for one that failed.
        with ranks.alike():
            check_layout(config, ranks)
            loaded = load_policy(config, moment_bytes=moment_bytes(config), ranks=ranks)
            self.trainer = PolicyTrainer(loaded, config, seed=command.seed, ranks=ranks)
            engine = self.trainer.engine
            with engine.gathered():
                self._generator = TransformersGenerator(loaded, engine, command.rollouts.max_batch_rollouts, ranks)
            self._is_ticking = self.trainer.watch(self._tick)

    def _begin(self, command: Generate) -> None:
        """Takes this rank's part of the groups, whole ones; all ranks of a tensor-parallel part take the same."""
        # What a response will cost nobody knows; it is at most this.
        costs = [command.num * (len(prompt.tokens) + command.config.max_new_tokens) for prompt in command.prompts]
        parts = shards([prompt.tokens for prompt in command.prompts], self._ranks.data_size, costs)
        own = [(group, command.prompts[group]) for group in parts[self._ranks.data_rank]]
        self._whole.enter_context(self.trainer.engine.gathered())
        self._generation = self._generator.begin(
            own, num=command.num, config=command.config, seed=command.seed, greedy=command.greedy
        )

    def _round(self) -> Round:
        assert self._generation is not None
        groups = self._generation.run(STEPS)
        return Round(groups if self._ranks.tensor_rank == 0 else [], self._generation.is_left)

    def _give_up(self) -> None:
        self._generation = None
        self._whole.close()

    def _measure(self, command: Measure) -> Logprobs | None:
        rows, lengths, temperature = command.rows, command.prompt_lengths, command.temperature
        if command.of_reference:
            made = Logprobs(self.trainer.reference_logprobs(rows, lengths, temperature))
        else:
            made = self.trainer.logprobs(rows, lengths, temperature, with_entropies=command.with_entropies)
        return made if self._ranks.is_leader else None
