"""PPO against a critic on a server: the loop, from top to bottom."""

from __future__ import annotations

import logging

from torch import Tensor

from guerdon.actor.experience import Experience, measure, untable, with_rewards
from guerdon.actor.policy_group import PolicyGroup
from guerdon.actor.preemption import Preemption
from guerdon.actor.remote_critic import RemoteCritic
from guerdon.actor.rollouts import Rollout
from guerdon.actor.run_metrics import timed
from guerdon.actor.training_run import Run, RunSummary
from guerdon.actor.update import update
from guerdon.settings.actors import PPOConfig, PPORunConfig, check_actor
from guerdon.training.algorithms.advantages import adaptive_lams, gae, whiten
from guerdon.training.algorithms.kl import token_rewards
from guerdon.training.algorithms.masking import MaskedMoments

log = logging.getLogger(__name__)

_CRITIC_METRICS = {
    "critic_loss": "loss", "critic_explained_variance": "explained_variance", "critic_clip_fraction": "clip_fraction",
    "critic_grad_norm": "grad_norm", "critic_skipped_steps": "num_skipped", "critic_learning_rate": "learning_rate",
}  # fmt: skip
"""The reports' fields, by the metrics' names."""


def train(config: PPORunConfig, policy: PolicyGroup | None = None) -> RunSummary:
    """Trains the policy, and the critic on its server; resumes from the newest pair of checkpoints.

    With several ranks it runs on rank 0, and `policy` leads the others; see `launch`. Raises ConfigError,
    CheckpointError or StartError if it cannot start, RewardsFailed if too many rewards fail, and the errors of the
    critic's server.
    """
    check_actor(config)
    preemption = Preemption(config.run.time_limit)
    algorithm, sampling = config.ppo, config.rollouts
    with RemoteCritic(config.remote_critic_rm) as critic:
        critic.wait_ready(preemption.seconds_left())
        with Run(config, score=critic.score, critic=critic, preemption=preemption, policy=policy) as run:
            critic.check_tokenizer(run.policy.trainer.tokenizer, run.data.ending)
            critic.remember_in(run.memory)
            if algorithm.critic_warmup_steps:
                level = logging.INFO if config.run.steps > algorithm.critic_warmup_steps else logging.WARNING
                log.log(level, "steps 1 to %d train only the critic", algorithm.critic_warmup_steps)
            for step in run.steps():
                metrics: dict[str, float] = {}

                # Each group is rewarded and valued while the others are still generated.
                rollouts: list[Rollout] = []
                for group in run.rollouts(step):
                    critic.submit(group)
                    rollouts += group
                with timed(metrics, "seconds_values"):
                    critic.collect(run.check_preemption)
                run.collect_reference(metrics)
                kept = with_rewards(rollouts, algorithm.max_failed_fraction, step)

                experience = measure(run.policy, kept, sampling.temperature, algorithm.kl_estimator, metrics)
                advantages, returns = ppo_advantages(experience, algorithm)
                metrics["reward_penalised"] = experience.penalised(algorithm.kl_coefficient).mean().item()
                metrics["value_mean"] = MaskedMoments.of(experience.values, experience.mask).mean
                metrics["return_mean"] = MaskedMoments.of(returns, experience.mask).mean

                # The critic learns on its server while the policy learns here; the next values come after it.
                training = critic.train(
                    f"{run.id}-{step}", kept, untable(returns, kept), updates=algorithm.critic_updates
                )
                if step > algorithm.critic_warmup_steps:
                    update(run.policy, experience, advantages, algorithm, sampling, metrics)
                with timed(metrics, "seconds_critic_wait"):
                    report = run.wait_for_critic(training)
                metrics |= {name: float(getattr(report, of_report)) for name, of_report in _CRITIC_METRICS.items()}
                run.finish(step, metrics, rollouts)
    return run.summary()


def ppo_advantages(experience: Experience, config: PPOConfig) -> tuple[Tensor, Tensor]:
    """Returns the advantage of every token by GAE, whitened if configured, and the critic's target returns.

    Returns have a separate lambda if `lam_alpha` or `lam_critic` is set.
    """
    mask = experience.mask
    rewards = token_rewards(experience.rewards, experience.kl, mask, config.kl_coefficient)
    lam = config.lam if config.lam_alpha is None else adaptive_lams(mask, config.lam_alpha)
    advantages, returns = gae(rewards, experience.values, mask, config.gamma, lam)
    if not (config.lam_alpha is None and config.lam_critic is None):
        lam_critic = config.lam if config.lam_critic is None else config.lam_critic
        _, returns = gae(rewards, experience.values, mask, config.gamma, lam_critic)
    if config.whiten_advantages:
        advantages = whiten(advantages, mask, MaskedMoments.of(advantages, mask))
    return advantages, returns
