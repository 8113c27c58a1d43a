"""Starts an actor: in one process, or on all ranks that torchrun has started.

```
rank 0                                                       every other rank
guerdon reinforce -> launch.run                              launch.run
reinforce.train       the loop, as in one process            launch._follow
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

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from guerdon.actor.policy_group import PolicyGroup, PolicyWorker
from guerdon.actor.prompt_sources import check_prompts
from guerdon.actor.training_run import RunSummary
from guerdon.distributed.group import Group
from guerdon.distributed.pulse import EXIT_STATUS, Pulse
from guerdon.distributed.ranks import Ranks, start
from guerdon.distributed.stopping import asking
from guerdon.errors import RanksLost
from guerdon.settings.actors import ActorConfig

Config = TypeVar("Config", bound=ActorConfig)

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""Seconds for the pulse to log a loss and end the process."""


def run(config: Config, train: Callable[[Config, PolicyGroup | None], RunSummary]) -> int:
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
            return _follow(ranks, pulse)
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


def _log_lost_rank(error: BaseException | None, output_dir: str) -> None:
    """Logs where the run resumes, after the error that it was about to end with, which is logged nowhere else."""
    if error is not None and not isinstance(error, RanksLost):
        log.critical("the run was about to end with this error when a rank was lost:", exc_info=error)
    log.critical("the run ends here; the same command resumes from the newest checkpoint in %s", output_dir)


def _follow(ranks: Ranks, pulse: Pulse) -> int:
    with asking(pulse.ask_to_stop, for_good=True):
        Group(PolicyWorker(ranks, pulse.tick), ranks, pulse).follow()
    return 0
