"""Runs of an actor under torchrun, several in one launch, and what each rank says of them; the same in one process.

    torchrun ... -m actor.rank_runs JOBS FOLDER

JOBS is a pickled list of Job; rank r writes a pickled list of Done, one a job, to FOLDER/r.
"""

import os
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from actor.runs import loop_of, without_curves
from guerdon.actor import policy_group
from guerdon.actor.rollouts import Rollout
from guerdon.actor.training_run import Run, train_on_ranks
from guerdon.errors import GuerdonError
from guerdon.settings.actors import ActorConfig
from launched import forked


@dataclass(frozen=True)
class Job:
    """A run, and the name in `policy_group` that fails on rank 1 alone."""

    config: ActorConfig
    broken: str = ""


@dataclass
class Done:
    """What a rank exits with, or what it raises; on rank 0 the rollouts of every step."""

    status: int | None = None
    error: GuerdonError | None = None
    steps: dict[int, list[Rollout]] = field(default_factory=dict)

    def tokens(self) -> dict[tuple[int, int, int], list[int]]:
        """Each rollout's, by step, group and index."""
        return {(step, r.group, r.index): r.tokens.tolist() for step, made in self.steps.items() for r in made}

    def rewards(self) -> dict[tuple[int, int, int], float | None]:
        """The same of the rewards."""
        return {(step, r.group, r.index): r.reward for step, made in self.steps.items() for r in made}


def alone(config: ActorConfig) -> Done:
    """The run in this process."""
    done = Done()
    original = Run.finish

    def finish(run: Run, step: int, metrics: dict[str, float], rollouts: list[Rollout]) -> None:
        done.steps[step] = rollouts
        original(run, step, metrics, rollouts)

    Run.finish = finish  # type: ignore[method-assign]
    try:
        done.status = train_on_ranks(config, loop_of(config))
    except GuerdonError as e:
        done.error = e
    finally:
        Run.finish = original  # type: ignore[method-assign]
    return done


def together(nproc: int, jobs: list[Job], folder: Path, timeout_s: float = 280.0) -> list[list[Done]]:
    """The runs in so many processes of one launch: of each job what every rank says."""
    folder.mkdir()
    (folder / "jobs").write_bytes(pickle.dumps(jobs))
    ended = forked("actor.rank_runs", nproc, folder / "jobs", folder, timeout_s=timeout_s)
    assert ended.code == 0, ended.output
    by_rank = [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(nproc)]  # noqa: S301 - of our own
    return [list(of_job) for of_job in zip(*by_rank, strict=True)]


def run(jobs: Path, folder: Path) -> None:
    """The runs, in each process of a launch."""
    torch.set_num_threads(1)
    policy_group.TOKENS_PER_ROUND = 3  # so that short responses take several rounds, too
    done = []
    for job in pickle.loads(jobs.read_bytes()):  # noqa: S301 - of the test's own
        with pytest.MonkeyPatch.context() as patch:
            without_curves(patch)
            if job.broken and os.environ["RANK"] == "1":
                patch.setattr(policy_group, job.broken, _no_room)
            done.append(alone(job.config))
    (folder / str(distributed.get_rank())).write_bytes(pickle.dumps(done))


def _no_room(*_: Any, **__: Any) -> None:
    raise RuntimeError("no room for it")


if __name__ == "__main__":
    from actor import rank_runs  # by its own name, which what it pickles has

    rank_runs.run(*map(Path, sys.argv[1:]))
