"""An actor's policy on all ranks: rank 0 leads, and every rank executes one command at a time.

A single process is a group of one rank. Commands are plain data, and are checked before they are sent. Every rank
executes its part completely or reports its error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeAlias, TypeVar, Unpack

from guerdon.actor.generation import Generation, Generator, TransformersGenerator, check_environment, make_generator
from guerdon.actor.preemption import Preemption
from guerdon.actor.rollouts import Draw, Prompt, Rollout
from guerdon.core import Command
from guerdon.distributed.group import Group
from guerdon.distributed.pulse import Pulse
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.distributed.shards import shards
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.errors import ConfigError
from guerdon.settings.actors import PolicyConfig, RolloutConfig
from guerdon.training.optimiser import check_layout, moment_bytes
from guerdon.training.policy_trainer import PolicyTrainer

P = ParamSpec("P")
T = TypeVar("T")

TOKENS_PER_ROUND = 32
"""Tokens of each row in one round of generation; after each round rank 0 gets finished groups, and may stop."""


# ------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Open:
    """Load the policy, its reference unless a server has that, and its optimiser."""

    policy: PolicyConfig
    rollouts: RolloutConfig
    seed: int
    keeps_reference: bool


@dataclass(frozen=True, slots=True)
class Generate:
    """Begin to generate, and run the first round; the arguments are those of `Generator.generate`."""

    prompts: list[Prompt]
    num: int
    config: RolloutConfig
    seed: tuple[int, ...]
    greedy: bool = False


@dataclass(frozen=True, slots=True)
class GenerateMore:
    """Run the next round. Any other command in its place abandons the generation."""


@dataclass(frozen=True, slots=True)
class GenerationRound:
    """The groups finished in a round, and whether any are unfinished."""

    groups: list[list[Rollout]]
    is_left: bool


@dataclass(frozen=True, slots=True, eq=False)
class OnTrainer:
    """Call this method of every rank's PolicyTrainer; the arguments must be data, as PolicyLoss is."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


PolicyCommand: TypeAlias = Open | Generate | GenerateMore | OnTrainer | Command


# ------------------------------------------------------------------------------------------- on every rank


class PolicyWorker:
    """Holds this rank's part of the policy, and executes one command at a time; `trainer` exists after `Open`."""

    def __init__(self, ranks: Ranks = ALONE, tick: Callable[..., None] | None = None) -> None:
        """Calls `tick` after every layer of the model."""
        self.trainer: PolicyTrainer
        self._ranks, self._tick = ranks, tick
        self._is_ticking = False
        self._generator: TransformersGenerator
        self._generation: Generation | None = None
        self._gathered_weights = ExitStack()

    def execute(self, command: PolicyCommand) -> Any:
        """Executes this rank's part; returns a GenerationRound, or on rank 0 what the called method returned."""
        if isinstance(command, GenerateMore):
            return self._run_round()
        self._generation = None
        self._gathered_weights.close()
        match command:
            case Open():
                self._open(command)
            case Generate():
                self._begin(command)
                return self._run_round()
            case OnTrainer(method, args, kwargs):
                result = getattr(self.trainer, method)(*args, **kwargs)
                return result if self._ranks.is_leader else None
        return None

    def merge(self, command: PolicyCommand, parts: list[Any]) -> Any:
        """Returns the groups of all ranks, or rank 0's own result."""
        if not isinstance(command, Generate | GenerateMore):
            return parts[0]
        groups = [group for part in parts[:: self._ranks.tensor_size] for group in part.groups]
        return GenerationRound(groups, any(part.is_left for part in parts))

    def is_watched(self, command: PolicyCommand) -> bool:
        """Whether the command runs the policy's layers, which tick."""
        runs_layers = isinstance(command, Generate | GenerateMore) or (
            isinstance(command, OnTrainer) and command.method in ("logprobs", "reference_logprobs", "step")
        )
        return self._is_ticking and runs_layers

    def _open(self, command: Open) -> None:
        config, ranks = command.policy, self._ranks
        # As a whole, because loading is full of collectives: the other ranks would wait for one that failed.
        with ranks.raise_on_all_ranks():
            check_layout(config, ranks)
            loaded = load_policy(config, moment_bytes=moment_bytes(config), ranks=ranks)
            self.trainer = PolicyTrainer(
                loaded, config, keeps_reference=command.keeps_reference, seed=command.seed, ranks=ranks
            )
            if ranks.size > 1:
                engine, max_batch_rollouts = self.trainer.engine, command.rollouts.max_batch_rollouts
                with engine.gathered():
                    self._generator = TransformersGenerator(loaded, engine, max_batch_rollouts, ranks)
            self._is_ticking = self._tick is not None and self.trainer.watch(self._tick)

    def _begin(self, command: Generate) -> None:
        """Takes this data-parallel rank's groups; all of its tensor-parallel ranks take the same."""
        # Upper bounds: a response's length is unknown beforehand.
        costs = [command.num * (len(prompt.tokens) + command.config.max_new_tokens) for prompt in command.prompts]
        parts = shards([prompt.tokens for prompt in command.prompts], self._ranks.data_size, costs)
        own = [(group, command.prompts[group]) for group in parts[self._ranks.data_rank]]
        self._gathered_weights.enter_context(self.trainer.engine.gathered())
        self._generation = self._generator.begin(
            own, num=command.num, config=command.config, seed=command.seed, greedy=command.greedy
        )

    def _run_round(self) -> GenerationRound:
        assert self._generation is not None
        groups = self._generation.run(TOKENS_PER_ROUND)
        return GenerationRound(groups if self._ranks.tensor_rank == 0 else [], self._generation.is_left)


# ------------------------------------------------------------------------------------------- on rank 0


def _on_every_rank(method: Callable[Concatenate[PolicyTrainer, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Makes the method of `PolicyGroup` that calls this one of every rank's PolicyTrainer."""

    def call(group: PolicyGroup, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = group._group.execute(OnTrainer(method.__name__, args, kwargs))
        return result

    return call


class PolicyGroup:
    """The policy as the loop on rank 0 calls it; used as a context, which ends the other ranks, too.

    Its methods are those of PolicyTrainer, executed on every rank. An error on any rank is raised here. A method
    returns when every rank is done, so that rank 0 may leave between any two. If a rank is lost, they raise RanksLost
    until the pulse ends this process. `error` is the one that ended the context.
    """

    error: BaseException | None = None

    def __init__(self, ranks: Ranks = ALONE, pulse: Pulse | None = None) -> None:
        self._worker = PolicyWorker(ranks, None if pulse is None else pulse.tick)
        self._group = Group(self._worker, ranks, pulse)
        self._ranks, self._pulse = ranks, pulse

    def open(
        self,
        config: PolicyConfig,
        rollouts: RolloutConfig,
        seed: int,
        preemption: Preemption,
        *,
        keeps_reference: bool = True,
    ) -> Generator:
        """Loads the policy on every rank, and returns its generator; a signal to any rank requests `preemption`.

        Raises ConfigError and CheckpointError.
        """
        check_environment(rollouts, self._ranks)
        command = Open(config, rollouts, seed, keeps_reference)
        if self._pulse is None:
            self._group.execute(command)
            return make_generator(self.trainer, rollouts)
        # From now on: an interrupt within a command would leave the other ranks in the middle of it.
        preemption.listen()
        if rollouts.engine == "vllm":
            raise ConfigError(
                f"rollouts.engine is vllm, and the policy is on {self._ranks.size} ranks",
                "set rollouts.engine to transformers, or start one process",
            )
        self._pulse.on_stop = preemption.request
        self._group.execute(command)
        return GroupGenerator(self._group)

    @property
    def trainer(self) -> PolicyTrainer:
        """This rank's PolicyTrainer, to read from."""
        return self._worker.trainer

    logprobs = _on_every_rank(PolicyTrainer.logprobs)
    reference_logprobs = _on_every_rank(PolicyTrainer.reference_logprobs)
    step = _on_every_rank(PolicyTrainer.step)
    offload_optimizer = _on_every_rank(PolicyTrainer.offload_optimizer)
    onload_optimizer = _on_every_rank(PolicyTrainer.onload_optimizer)

    def save(self, folder: Path) -> None:
        """Saves into a folder that all ranks see."""
        self._group.execute(OnTrainer("save", (folder.absolute(),)))

    def load(self, folder: Path) -> None:
        """Loads from a folder that all ranks see."""
        self._group.execute(OnTrainer("load", (folder.absolute(),)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.error = error
        if self._pulse is not None and self._pulse.lost is None:
            self._group.end()


class GroupGenerator:
    """Generates on all ranks, in rounds: each data-parallel rank takes whole groups.

    After every round it yields the groups that any rank has finished; a caller may stop there.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def generate(self, prompts: Sequence[Prompt], **draw: Unpack[Draw]) -> Iterator[list[Rollout]]:
        """As `Generator`; raises as TransformersGenerator's."""
        # Only rank 0 needs the prompts' texts.
        sent = [dataclasses.replace(prompt, text="", messages=None, ending=None) for prompt in prompts]
        made = self._group.execute(Generate(sent, **draw))
        while True:
            for group in made.groups:
                for rollout in group:
                    rollout.prompt = prompts[rollout.group]
                yield group
            if not made.is_left:
                return
            made = self._group.execute(GenerateMore())

    def sync(self) -> None:
        """Does nothing: the weights are shared."""
