"""REINFORCE and its family (RLOO, GRPO, Dr.GRPO, REINFORCE++): the loop, from top to bottom."""

from __future__ import annotations

from torch import Tensor

from guerdon.actor.experience import Experience, measure, with_rewards
from guerdon.actor.policy_group import PolicyGroup
from guerdon.actor.preemption import Preemption
from guerdon.actor.remote_rewards import RemoteRewards
from guerdon.actor.rollouts import Rollout
from guerdon.actor.run_metrics import timed
from guerdon.actor.training_run import Run, RunSummary
from guerdon.actor.update import update
from guerdon.settings.actors import ReinforceConfig, ReinforceRunConfig, check_actor
from guerdon.training.algorithms.advantages import RunningMean, estimate_advantages


def train(config: ReinforceRunConfig, policy: PolicyGroup | None = None) -> RunSummary:
    """Trains the policy against the reward model's server; resumes from the newest checkpoint in the output folder.

    With several ranks it runs on rank 0, and `policy` leads the others; see `launch`. Raises ConfigError,
    CheckpointError or StartError if it cannot start, RewardsFailed if too many rewards fail.
    """
    check_actor(config)
    preemption = Preemption(config.run.time_limit)
    algorithm, sampling = config.reinforce, config.rollouts
    with RemoteRewards(config.remote_rm) as rewards:
        rewards.wait_ready(preemption.seconds_left())
        with Run(config, score=rewards.score, preemption=preemption, policy=policy) as run:
            rewards.check_tokenizer(run.policy.trainer.tokenizer, run.data.ending)
            rewards.remember_in(run.memory)
            for step in run.steps():
                metrics: dict[str, float] = {}

                # Each group is scored while the others are still generated.
                rollouts: list[Rollout] = []
                for group in run.rollouts(step):
                    rewards.submit(group)
                    rollouts += group
                with timed(metrics, "seconds_reward_wait"):
                    rewards.collect(run.check_preemption)
                run.collect_reference(metrics)
                kept = with_rewards(rollouts, algorithm.max_failed_fraction, step)

                experience = measure(run.policy, kept, sampling.temperature, algorithm.kl_estimator, metrics)
                in_reward = algorithm.kl_placement == "reward"
                if in_reward:
                    penalised = experience.penalised(algorithm.kl_coefficient, algorithm.kl_reduction)
                    metrics["reward_penalised"] = penalised.mean().item()
                running = RunningMean(*run.memory.get("running_mean", ()))
                advantages, running = reinforce_advantages(experience, algorithm, running)
                run.memory["running_mean"] = [running.sum_rewards, running.num_rewards]

                beta = 0.0 if in_reward else algorithm.kl_coefficient
                update(run.policy, experience, advantages, algorithm, sampling, metrics, kl_coefficient=beta)
                run.finish(step, metrics, rollouts)
    return run.summary()


def reinforce_advantages(
    experience: Experience, config: ReinforceConfig, running: RunningMean
) -> tuple[Tensor, RunningMean]:
    """Returns the advantage of every token by the configured estimator, and the next running mean."""
    beta = config.kl_coefficient if config.kl_placement == "reward" else 0.0
    return estimate_advantages(
        config.advantage_estimator,
        experience.penalised(beta, config.kl_reduction),
        experience.groups,
        experience.mask,
        is_end=experience.is_end if config.leave_out_truncated else None,
        running=running,
    )
