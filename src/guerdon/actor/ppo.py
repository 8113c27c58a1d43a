"""PPO against a critic on a server: the loop, from top to bottom."""

from __future__ import annotations

from guerdon.actor.experience import ppo_advantages, rewarded, unpadded
from guerdon.actor.learning import measure, timed, update
from guerdon.actor.policy_group import SharedPolicy
from guerdon.actor.preemption import Stopping
from guerdon.actor.remote_critic import RemoteCritic
from guerdon.actor.rollouts import Rollout
from guerdon.actor.training_run import Run, RunSummary
from guerdon.critic_core import TrainReport
from guerdon.settings.actors import PPORunConfig, check_actor
from guerdon.training.algorithms.advantages import Moments


def train(config: PPORunConfig, shared: SharedPolicy | None = None) -> RunSummary:
    """Trains the policy, and the critic on its server; goes on from the newest pair of checkpoints.

    On rank 0 of several `shared` is the policy, and leads the others; see `launch`. Raises ConfigError,
    CheckpointError or StartError where it cannot start, RewardsFailed where too many rewards fail, and what the
    critic's server raises where it cannot train.
    """
    check_actor(config)
    stopping = Stopping(config.run.time_limit)
    algorithm, sampling = config.ppo, config.rollouts
    with RemoteCritic(config.remote_critic_rm) as critic:
        critic.wait_ready(stopping.left_s())
        with Run(config, score=critic.score, critic=critic, stopping=stopping, shared=shared) as run:
            critic.check_tokenizer(run.policy.policy.tokenizer, run.data.ending)
            critic.remember_in(run.memory)
            for step in run.steps():
                metrics: dict[str, float] = {}

                # Each group is rewarded and valued while the others are still generated.
                rollouts: list[Rollout] = []
                for group in run.rollouts(step):
                    critic.submit(group)
                    rollouts += group
                with timed(metrics, "seconds_values"):
                    critic.collect(run.heed)
                kept = rewarded(rollouts, algorithm.max_failed_fraction, step)

                experience = measure(run.policy, kept, sampling.temperature, algorithm.kl_estimator, metrics)
                advantages, returns = ppo_advantages(experience, algorithm)
                metrics["reward_penalised"] = experience.penalised(algorithm.kl_coefficient).mean().item()
                metrics["value_mean"] = Moments.of(experience.values, experience.mask).mean
                metrics["return_mean"] = Moments.of(returns, experience.mask).mean

                # The critic learns on its server while the policy learns here; the next values are those after it.
                training = critic.train(f"{run.id}-{step}", kept, unpadded(returns, kept))
                if step > algorithm.critic_warmup_steps:
                    update(run.policy, experience, advantages, algorithm, sampling, metrics)
                with timed(metrics, "seconds_critic_wait"):
                    report = run.outcome(training)
                run.finish(step, metrics | _critic_metrics(report), rollouts)
    return run.summary()


def _critic_metrics(report: TrainReport) -> dict[str, float]:
    return {
        "critic_loss": report.loss,
        "critic_explained_variance": report.explained_variance,
        "critic_clip_fraction": report.clip_fraction,
        "critic_grad_norm": report.grad_norm,
        "critic_skipped_steps": float(report.num_skipped),
        "critic_learning_rate": report.learning_rate,
    }
