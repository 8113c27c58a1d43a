"""REINFORCE and its family (RLOO, GRPO, Dr.GRPO, REINFORCE++): the loop, from top to bottom."""

from __future__ import annotations

from guerdon.actor.experience import reinforce_advantages, rewarded
from guerdon.actor.learning import measure, timed, update
from guerdon.actor.policy_group import SharedPolicy
from guerdon.actor.preemption import Stopping
from guerdon.actor.remote_rewards import RemoteRewards
from guerdon.actor.rollouts import Rollout
from guerdon.actor.training_run import Run, RunSummary
from guerdon.settings.actors import ReinforceRunConfig, check_actor
from guerdon.training.algorithms.advantages import RunningMean


def train(config: ReinforceRunConfig, shared: SharedPolicy | None = None) -> RunSummary:
    """Trains the policy against the reward model's server; goes on from the newest checkpoint in the output folder.

    On rank 0 of several `shared` is the policy, and leads the others; see `launch`. Raises ConfigError,
    CheckpointError or StartError where it cannot start, RewardsFailed where too many rewards fail.
    """
    check_actor(config)
    stopping = Stopping(config.run.time_limit)
    algorithm, sampling = config.reinforce, config.rollouts
    with RemoteRewards(config.remote_rm) as rewards:
        rewards.wait_ready(stopping.left_s())
        with Run(config, score=rewards.score, stopping=stopping, shared=shared) as run:
            rewards.check_tokenizer(run.policy.policy.tokenizer, run.data.ending)
            rewards.remember_in(run.memory)
            for step in run.steps():
                metrics: dict[str, float] = {}

                # Each group is scored while the others are still generated.
                rollouts: list[Rollout] = []
                for group in run.rollouts(step):
                    rewards.submit(group)
                    rollouts += group
                with timed(metrics, "seconds_reward_wait"):
                    rewards.collect(run.heed)
                kept = rewarded(rollouts, algorithm.max_failed_fraction, step)

                experience = measure(run.policy, kept, sampling.temperature, algorithm.kl_estimator, metrics)
                in_reward = algorithm.kl_placement == "reward"
                if in_reward:
                    penalised = experience.penalised(algorithm.kl_coefficient, algorithm.kl_reduction)
                    metrics["reward_penalised"] = penalised.mean().item()
                running = RunningMean(*run.memory.get("running_mean", ()))
                advantages, running = reinforce_advantages(experience, algorithm, running)
                run.memory["running_mean"] = [running.sum_rewards, running.num_rewards]

                update(run.policy, experience, advantages, algorithm, sampling, metrics, kl_in_loss=not in_reward)
                run.finish(step, metrics, rollouts)
    return run.summary()
