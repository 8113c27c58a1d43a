"""An actor's start and end: in one process, or on all that torchrun has started.

```
rank 0                                                   every other rank
cli.run_reinforce -> launch.run                          launch.run
reinforce.train      the loop, as with one process       launch._follow
run.Run              prompts, rewards, checkpoints
learning.update
shared.SharedPolicy.step
Group.lead           -- Step, the rows and the loss -->  Group.follow
PolicyWorker.execute                                     PolicyWorker.execute
PolicyTrainer.step   its shard of the rows               PolicyTrainer.step
Group.lead           <-- outcome -----------------------  Group.follow
```
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from guerdon.actor.policy_group import SharedPolicy
from guerdon.actor.training_run import RunSummary
from guerdon.actor.worker import PolicyWorker
from guerdon.distributed.group import Group
from guerdon.distributed.pulse import EXIT_STATUS, Pulse
from guerdon.distributed.ranks import Ranks, start
from guerdon.distributed.stopping import asking
from guerdon.errors import RanksLost
from guerdon.settings.actors import PPORunConfig, ReinforceRunConfig

Config = TypeVar("Config", ReinforceRunConfig, PPORunConfig)

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""For the pulse to tell of a loss, and to end the process."""


def run(config: Config, train: Callable[[Config, SharedPolicy | None], RunSummary]) -> int:
    """Trains, where this is rank 0 of several with the others' help; what this process is to exit with.

    Raises what `train` does, and StartError where the ranks do not find each other. The other ranks take all settings
    but `parallel` and `policy.device` from rank 0, and exit with 0 however its run ends. Where a rank is lost, all
    others end at once, with EXIT_STATUS.
    """
    ranks = start(config.parallel, config.policy.device)
    if ranks.size == 1:
        return train(config, None).exit_status
    pulse = Pulse(ranks)
    pulse.start()
    try:
        if not ranks.is_leader:
            return _follow(ranks, pulse)
        shared = SharedPolicy(ranks, pulse)
        pulse.on_lost = lambda _: _tell(shared.error, config.run.output_dir)
        with shared as policy:
            return train(config, policy).exit_status
    except RanksLost as e:
        sys.stdout.flush()
        sys.stderr.flush()
        # The pulse tells the log of it, and ends this process; Python's own end would wait for threads that may be
        # inside a collective.
        pulse.verdict(e)
        time.sleep(_PATIENCE_S)
        os._exit(EXIT_STATUS)


def _tell(error: BaseException | None, output_dir: str) -> None:
    """Says where the run goes on, after what it was about to end with: that is told nowhere else."""
    if error is not None and not isinstance(error, RanksLost):
        log.critical("the run was about to end with this, and without the rank that is lost:", exc_info=error)
    log.critical("the run ends here; the same command goes on from the newest checkpoint in %s", output_dir)


def _follow(ranks: Ranks, pulse: Pulse) -> int:
    with asking(pulse.ask_to_stop, for_good=True):
        Group(PolicyWorker(ranks, pulse.tick), ranks, pulse).follow()
    return 0
