"""On-policy distillation: the policy learns from a served teacher's log-probs of its own responses.

The loop, from top to bottom. At each token of a response the advantage is how much likelier the teacher finds it than
the policy does, so that the expected gradient is that of the reverse KL at that token (Lu et al., "On-Policy
Distillation", 2025).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from guerdon.actor.experience import Experience, measure, with_rewards
from guerdon.actor.policy_group import PolicyGroup
from guerdon.actor.preemption import Preemption
from guerdon.actor.remote_teacher import RemoteTeacher
from guerdon.actor.rollouts import Rollout
from guerdon.actor.run_metrics import timed
from guerdon.actor.training_run import Run, RunSummary
from guerdon.actor.update import update
from guerdon.settings.actors import DistillRunConfig, check_actor
from guerdon.training.algorithms.kl import LOG_RATIO_CLAMP, kl_per_token


def train(config: DistillRunConfig, policy: PolicyGroup | None = None) -> RunSummary:
    """Trains the policy towards the teacher on its server; resumes from the newest checkpoint in the output folder.

    With several ranks it runs on rank 0, and `policy` leads the others; see `launch`. Raises ConfigError,
    CheckpointError or StartError if it cannot start, RewardsFailed if the teacher fails on too many responses.
    """
    check_actor(config)
    preemption = Preemption(config.run.time_limit)
    algorithm, sampling = config.distill, config.rollouts
    with RemoteTeacher(config.teacher, sampling.temperature, "teacher") as teacher:
        teacher.wait_ready(preemption.seconds_left())

        def score(rollouts: list[Rollout], check: Callable[[], None]) -> None:
            teacher.score(rollouts, check)
            set_rewards(rollouts)

        with Run(config, score=score, preemption=preemption, policy=policy) as run:
            teacher.check_tokenizer(run.policy.trainer.tokenizer)
            teacher.remember_in(run.memory)
            for step in run.steps():
                metrics: dict[str, float] = {}

                # The teacher reads each group while the others are still generated.
                rollouts: list[Rollout] = []
                for group in run.rollouts(step):
                    teacher.submit(group)
                    rollouts += group
                with timed(metrics, "seconds_reference"):
                    teacher.collect(run.check_preemption)
                set_rewards(rollouts)
                kept = with_rewards(rollouts, algorithm.max_failed_fraction, step, "teacher")

                experience = measure(run.policy, kept, sampling.temperature, algorithm.kl_estimator, metrics)
                update(run.policy, experience, distill_advantages(experience), algorithm, sampling, metrics)
                run.finish(step, metrics, rollouts)
    return run.summary()


def set_rewards(rollouts: list[Rollout]) -> None:
    """Sets each response's reward: minus its reverse KL to the teacher, by the log-probs at which it was sampled."""
    for rollout in rollouts:
        if rollout.error is None:
            assert rollout.ref_logprobs is not None
            log_ratios = np.clip(rollout.logprobs - rollout.ref_logprobs, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
            rollout.reward = -float((log_ratios * rollout.mask).sum())


def distill_advantages(experience: Experience) -> Tensor:
    """Returns the advantage of every token: minus its own reverse KL, without that of later tokens."""
    return -kl_per_token(experience.logprobs, experience.ref_logprobs, experience.mask, "k1")
