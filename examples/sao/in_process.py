"""The run of run.py with its critic and its rewards in the policy's process, to compare with."""

from itertools import chain

import torch
from calculator import reward
from models import make
from plain_critic import PlainCritic
from run import HERE, LEARNING_RATE, arguments, conclude

from guerdon.actor.experience import measure
from guerdon.actor.ppo import ppo_advantages
from guerdon.actor.rollouts import Rollout
from guerdon.actor.training_run import Run
from guerdon.actor.update import update
from guerdon.settings.actors import PPORunConfig
from guerdon.settings.fields import from_mapping
from guerdon.settings.yaml_files import read_yaml


def score(rollouts: list[Rollout], _check: object = None) -> None:
    """Sets the rollouts' rewards."""
    for rollout in rollouts:
        (rollout.reward,) = reward([rollout.prompt.text + rollout.text])


def main() -> None:
    args = arguments(__doc__, out="out/sao_in_process")
    make(args.out, args.seed)
    config = from_mapping(PPORunConfig, read_yaml(HERE / "sao.yaml"))
    config.policy.model, config.run.output_dir = str(args.out / "policy"), str(args.out / "ppo")
    config.data.prompts, config.data.validation = str(args.out / "prompts.jsonl"), str(args.out / "held_out.jsonl")
    config.run.steps, config.run.seed, ppo = args.steps, args.seed, config.ppo
    critic = PlainCritic(args.out / "critic", LEARNING_RATE)

    with Run(config, score=score) as run:
        for step in run.steps():
            metrics: dict[str, float] = {}
            rollouts = sorted(chain(*run.rollouts(step)), key=lambda rollout: rollout.group)
            score(rollouts)
            with torch.no_grad():
                for rollout, values in zip(rollouts, critic.values(rollouts), strict=True):
                    rollout.values = values.numpy()
            experience = measure(run.policy, rollouts, 1.0, ppo.kl_estimator, metrics)
            advantages, returns = ppo_advantages(experience, ppo)
            critic.train(experience, returns, ppo.critic_updates)
            if step > ppo.critic_warmup_steps:
                update(run.policy, experience, advantages, ppo, config.rollouts, metrics)
            run.finish(step, metrics, rollouts)
    conclude(args)


if __name__ == "__main__":
    main()
