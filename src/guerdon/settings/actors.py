"""Every setting of `guerdon reinforce` and `guerdon ppo`, once: sections of a YAML file, and flags by their paths."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from guerdon.errors import ConfigError
from guerdon.settings.access import without_key
from guerdon.settings.config import LanguageModelConfig, LearningConfig, ParallelConfig, check
from guerdon.settings.fields import section, setting

KlEstimator = Literal["k1", "k2", "k3", "abs"]
KlReduction = Literal["sum", "mean"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr_grpo"]


@dataclass
class PolicyConfig(LearningConfig, LanguageModelConfig):
    """The policy: any causal language model that transformers loads."""

    learning_rate: float = setting(9e-7, "of AdamW, after the warm-up", least=0)
    total_steps: int | None = setting(
        None, "optimiser steps of the whole run, at whose end linear and cosine reach 0; auto: those of the run",
        auto=True, least=1,
    )  # fmt: skip
    offload_optimizer: bool = setting(False, "move the optimiser's state off the device while responses are generated")


@dataclass
class DataConfig:
    """Where prompts come from."""

    prompts: str = setting("", "JSONL (.gz) or Parquet file, folder or hub id of a data set; a row is one prompt")
    split: str = setting("train", "split of a hub data set")
    field: str = setting("prompt", "field of a row that holds the prompt: text, or a list of chat messages")
    template: bool = setting(False, "put a prompt that is text through the chat template, as a user's message")
    max_prompt_length: int | None = setting(
        None, "longest prompt in tokens; auto: what the policy leaves beside max_new_tokens", auto=True, least=1
    )
    long_prompts: Literal["skip", "error"] = setting(
        "skip", "a longer prompt is left out and reported at the start, or the run does not start; none is ever cut"
    )
    validation: str | None = setting(None, "the same for prompts to validate on; default: the last rows of prompts")
    validation_split: str | None = setting(None, "split of a hub data set of these; default: that of prompts")
    num_validation: int = setting(32, "prompts that are validated on; 0: none", least=0)
    shuffle: bool = setting(True, "another order in every epoch, by the seed")


@dataclass
class RolloutConfig:
    """How responses are sampled."""

    prompts_per_step: int = setting(16, "prompts of one step", least=1)
    rollouts_per_prompt: int = setting(4, "responses to each of them", least=1)
    max_new_tokens: int = setting(128, "longest response in tokens", least=1)
    min_new_tokens: int = setting(0, "no EOS before so many tokens", least=0)
    temperature: float = setting(1.0, "of sampling; log-probs are those at this temperature", above=0)
    top_k: int = setting(0, "sample from the so many most likely tokens; 0: all", least=0)
    top_p: float = setting(1.0, "sample from the most likely tokens of this total probability", above=0, most=1)
    repetition_penalty: float = setting(1.0, "divides the logits of tokens that were there already", above=0)
    stop: list[str] = setting([], "texts that end a response, beside EOS")
    engine: Literal["transformers", "vllm"] = setting("transformers", "what generates")
    max_batch_rollouts: int | None = setting(
        None, "responses generated at once, all in memory; auto: 256", auto=True, least=1
    )


@dataclass
class AlgorithmConfig:
    """What REINFORCE and PPO share of the loss."""

    kl_coefficient: float = setting(0.01, "beta: what the KL to the reference costs", least=0)
    kl_estimator: KlEstimator = setting("k1", "estimate of a token's KL")
    loss_aggregation: Aggregation = setting("token-mean", "how the tokens' losses become one number")
    global_batch_size: int = setting(64, "responses of one optimiser step", least=1)
    epochs: int = setting(1, "passes over each step's responses", least=1)
    clip_low: float = setting(0.2, "how far a token's probability ratio may fall below 1 in the loss", above=0)
    clip_high: float = setting(0.2, "how far it may rise above 1", above=0)
    entropy_coefficient: float = setting(0.0, "weight of the entropy bonus")
    importance_cap: float | None = setting(
        None,
        "weigh tokens for the difference between engine and trainer, at most by this; default: only with vllm",
        above=0,
    )
    max_failed_fraction: float = setting(
        0.1, "the run stops where a larger part of a step's responses got no reward", least=0, most=1
    )


@dataclass
class ReinforceConfig(AlgorithmConfig):
    """The REINFORCE family."""

    advantage_estimator: Literal["none", "mean", "rloo", "grpo", "dr_grpo", "reinforce++"] = setting(
        "rloo", "how rewards become advantages"
    )
    kl_placement: Literal["reward", "loss"] = setting("reward", "where the KL's cost is taken off")
    kl_reduction: KlReduction = setting(
        "sum", "with kl_placement reward, a response's KL is the sum or the mean over its tokens; mean: NeMo-Aligner's"
    )
    leave_out_truncated: bool = setting(False, "responses cut at max_new_tokens have no advantage and no baseline")


@dataclass
class PPOConfig(AlgorithmConfig):
    """PPO against a critic."""

    gamma: float = setting(1.0, "discount of a token", least=0, most=1)
    lam: float = setting(0.95, "lambda of GAE", least=0, most=1)
    whiten_advantages: bool = setting(True, "shift and scale each step's advantages to mean 0 and variance 1")
    critic_warmup_steps: int = setting(0, "first steps that train the critic alone", least=0)


@dataclass
class RunConfig:
    """How long it runs, and what it leaves."""

    steps: int = setting(100, "steps of the run; each generates, is rewarded, and learns", least=1)
    seed: int = setting(0, "of everything that is drawn", least=0)
    output_dir: str = setting("out/run", "folder for metrics, curves, samples and checkpoints")
    save_every: int = setting(20, "steps between checkpoints; there is one at the end, too", least=1)
    keep_checkpoints: int = setting(2, "newest checkpoints that are kept", least=1)
    resume: bool = setting(True, "go on from the newest checkpoint in output_dir")
    time_limit: str | None = setting(
        None,
        'DD:HH:MM:SS or minutes, in quotes ("210"); before it is over, from the start on, the run saves and leaves',
    )
    validate_every: int = setting(
        10, "steps between validations; there is one before the first step and at the end", least=1
    )
    num_samples: int = setting(8, "responses in the table of a validation", least=0)
    trackers: list[str] = setting([], "beside TensorBoard: wandb, mlflow")
    project: str = setting("guerdon", "its name there")
    progress: bool = setting(True, "show a progress bar")


@dataclass
class RewardModelServer:
    """A reward model's server, as NeMo-Aligner's YAML has it."""

    name: str = setting("reward_model", "the model's name there")
    ip: str = setting("localhost", "host name or address")
    port: int = setting(5555, "its HTTP port", least=0, most=65_535)
    urls: list[str] = setting([], "in place of ip and port: http:// or grpc:// addresses that share the load")

    @property
    def addresses(self) -> list[str]:
        """The URLs to send requests to."""
        return self.urls or [f"http://{self.ip}:{self.port}"]


@dataclass
class CriticNames:
    """The names of the critic's three models."""

    train: str = setting("critic_train", "that trains")
    infer: str = setting("critic_infer", "that values")
    save: str = setting("critic_save", "that saves")


@dataclass
class CriticServer:
    """A critic's server, as NeMo-Aligner's YAML has it."""

    name: CriticNames = section(CriticNames, "its models")
    ip: str = setting("localhost", "host name or address")
    port: int = setting(5556, "its HTTP port", least=0, most=65_535)
    url: str | None = setting(None, "in place of ip and port: an http:// or grpc:// address")

    @property
    def address(self) -> str:
        """The URL to send requests to."""
        return self.url or f"http://{self.ip}:{self.port}"


@dataclass
class RemoteRewardConfig:
    """The reward model that REINFORCE asks."""

    reward_model: RewardModelServer = section(RewardModelServer, "its server")
    pad_to_length: int | None = setting(
        None, "pad what is sent to this length, for servers that join only equal shapes; guerdon's needs none", least=1
    )
    send: Literal["tokens", "text", "messages"] = setting(
        "tokens",
        "what the reward model gets: the policy's token ids, refused if they mean other tokens to it, or text, or "
        "messages",
    )
    suffix: str = setting(
        "",
        "with send: text, what stands behind a response that an EOS ended, such as that EOS, which no text has; takes "
        "the place of the chat template's ending",
    )
    timeout_s: float = setting(3600.0, "seconds that a request may take with all its tries", above=0)


@dataclass
class RemoteCriticConfig(RemoteRewardConfig):
    """The critic that PPO trains, and the reward model."""

    critic: CriticServer = section(CriticServer, "its server")
    combine_rm_and_critic_server: bool = setting(True, "the critic's server has the reward model, too")


@dataclass
class ActorConfig:
    """What both actors have."""

    policy: PolicyConfig = section(PolicyConfig, "the policy")
    data: DataConfig = section(DataConfig, "prompts")
    rollouts: RolloutConfig = section(RolloutConfig, "sampling")
    run: RunConfig = section(RunConfig, "the run")
    parallel: ParallelConfig = section(ParallelConfig, "the ranks that torchrun starts")


@dataclass
class ReinforceRunConfig(ActorConfig):
    """`guerdon reinforce`."""

    reinforce: ReinforceConfig = section(ReinforceConfig, "the algorithm")
    remote_rm: RemoteRewardConfig = section(RemoteRewardConfig, "the reward model's server")


@dataclass
class PPORunConfig(ActorConfig):
    """`guerdon ppo`."""

    ppo: PPOConfig = section(PPOConfig, "the algorithm")
    remote_critic_rm: RemoteCriticConfig = section(RemoteCriticConfig, "the critic's server, and the reward model's")


def check_actor(config: ReinforceRunConfig | PPORunConfig) -> None:
    """Raises ConfigError for the first setting that is missing, out of its bounds, or contradicts another."""
    if not config.policy.model:
        raise ConfigError("policy.model is not given", "name a causal language model: a folder or a hub id")
    if not config.data.prompts:
        raise ConfigError("data.prompts is not given", "name a JSONL or Parquet file of prompts, or a data set")
    _, algorithm = algorithm_of(config)
    for section_name in vars(config):
        if section_name != "policy":
            check(getattr(config, section_name), f"{section_name}.")
    _check_addresses(config)
    check(scheduled(config), "policy.")
    check_sampling(config.rollouts)
    parse_time_limit(config.run.time_limit)
    estimator = algorithm.advantage_estimator if isinstance(algorithm, ReinforceConfig) else None
    if estimator in ("rloo", "grpo", "dr_grpo") and config.rollouts.rollouts_per_prompt < 2:
        raise ConfigError(
            f"rollouts.rollouts_per_prompt is 1, and {estimator} compares responses to one prompt",
            "give at least 2, or another reinforce.advantage_estimator",
        )
    in_loss = isinstance(algorithm, ReinforceConfig) and algorithm.kl_placement == "loss"
    if in_loss and algorithm.kl_estimator == "k1" and algorithm.kl_coefficient > 0:
        raise ConfigError(
            "reinforce.kl_placement is loss, where the estimator k1 has no gradient but noise",
            "give reinforce.kl_estimator k2 or k3, or kl_placement reward",
        )
    if isinstance(algorithm, ReinforceConfig) and in_loss and algorithm.kl_reduction != "sum":
        raise ConfigError(
            f"reinforce.kl_reduction is {algorithm.kl_reduction}, and kl_placement is loss, where it does nothing",
            "leave it out: reinforce.loss_aggregation says what becomes of the tokens' KL there",
        )
    for tracker in config.run.trackers:
        if tracker not in ("wandb", "mlflow"):
            raise ConfigError(f"run.trackers has {tracker}", "known are wandb and mlflow")
    where, remote = remote_of(config)
    if remote.send != "tokens" and remote.pad_to_length is not None:
        raise ConfigError(
            f"{where}.pad_to_length is {remote.pad_to_length}, and {where}.send is {remote.send}",
            "only tokens are padded: leave one of the two out",
        )
    if remote.send != "text" and remote.suffix:
        raise ConfigError(
            f"{where}.suffix is {remote.suffix!r}, and {where}.send is {remote.send}",
            "tokens have their EOS, and the chat template writes that of messages: leave it out, or send text",
        )
    _check_files(config)


def _check_files(config: ReinforceRunConfig | PPORunConfig) -> None:
    """Raises ConfigError where something on this machine is named that is not there."""
    for path, source in (
        ("policy.model", config.policy.model),
        ("data.prompts", config.data.prompts),
        ("data.validation", config.data.validation),
    ):
        if source is not None and is_local(source) and not Path(source).expanduser().exists():
            raise ConfigError(f"there is no {source}", f"correct {path}, which may also be an id of the hub")


def is_local(source: str) -> bool:
    """Whether a name can only be that of a file or a folder here, and none of the hub."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or source.endswith((".jsonl", ".gz", ".parquet"))


def check_sampling(rollouts: RolloutConfig) -> None:
    """Raises ConfigError where a setting is out of its bounds, or nothing would be sampled."""
    check(rollouts, "rollouts.")
    if rollouts.top_k == 1:
        raise ConfigError("rollouts.top_k is 1", "all responses to a prompt would be the same: give another value")
    if rollouts.min_new_tokens > rollouts.max_new_tokens:
        raise ConfigError(
            f"rollouts.min_new_tokens is {rollouts.min_new_tokens}, and max_new_tokens is {rollouts.max_new_tokens}",
            "give less of the one, or more of the other",
        )


def _check_addresses(config: ReinforceRunConfig | PPORunConfig) -> None:
    """Raises ConfigError for an address with a key: a run's settings are kept in its folder, and told to trackers."""
    section_name, remote = remote_of(config)
    found = {f"{section_name}.reward_model.urls": remote.reward_model.urls}
    if isinstance(remote, RemoteCriticConfig) and remote.critic.url is not None:
        found[f"{section_name}.critic.url"] = [remote.critic.url]
    for name, urls in found.items():
        for url in urls:
            if without_key(url) != url:
                raise ConfigError(
                    f"{name} has a key in {without_key(url)}, and a run keeps and shows its settings",
                    "leave it out there, and set GUERDON_API_KEY in the environment",
                )


def algorithm_of(config: ReinforceRunConfig | PPORunConfig) -> tuple[str, ReinforceConfig | PPOConfig]:
    """The section of the algorithm, and its name, which the command has, too."""
    return ("reinforce", config.reinforce) if isinstance(config, ReinforceRunConfig) else ("ppo", config.ppo)


def remote_of(config: ReinforceRunConfig | PPORunConfig) -> tuple[str, RemoteRewardConfig]:
    """The section of the servers, and its name."""
    if isinstance(config, ReinforceRunConfig):
        return "remote_rm", config.remote_rm
    return "remote_critic_rm", config.remote_critic_rm


def described(config: ReinforceRunConfig | PPORunConfig) -> str:
    """Returns in one line what a run loads and whom it asks."""
    remote = remote_of(config)[1]
    asked = f"rewards come from {', '.join(remote.reward_model.addresses)}"
    if isinstance(remote, RemoteCriticConfig) and remote.combine_rm_and_critic_server:
        asked = f"values and rewards come from {remote.critic.address}"
    elif isinstance(remote, RemoteCriticConfig):
        asked = f"values come from {remote.critic.address}, {asked}"
    return (
        f"policy {config.policy.model}, prompts {config.data.prompts}; {asked}; results go to {config.run.output_dir}"
    )


def scheduled(config: ReinforceRunConfig | PPORunConfig) -> PolicyConfig:
    """The policy's settings with the length of the schedule, which where it is not given is that of the run."""
    steps = config.policy.total_steps or optimiser_steps(config.run, config.rollouts, algorithm_of(config)[1])
    return replace(config.policy, total_steps=steps)


def optimiser_steps(run: RunConfig, rollouts: RolloutConfig, algorithm: AlgorithmConfig) -> int:
    """Optimiser steps of a whole run: a step's responses make so many global batches, an epoch over; at least 1."""
    responses = rollouts.prompts_per_step * rollouts.rollouts_per_prompt
    warmup = algorithm.critic_warmup_steps if isinstance(algorithm, PPOConfig) else 0
    return max(1, run.steps - warmup) * algorithm.epochs * -(-responses // algorithm.global_batch_size)


def parse_time_limit(limit: str | None) -> float | None:
    """Returns the seconds of a time limit given as DD:HH:MM:SS or in minutes, None for None; raises ConfigError."""
    if limit is None:
        return None
    if match := re.fullmatch(r"(\d+):(\d+):(\d+):(\d+)", limit):
        days, hours, minutes, rest = map(int, match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    if re.fullmatch(r"\d+(\.\d*)?", limit):
        return float(limit) * 60
    raise ConfigError(
        f"run.time_limit is {limit!r}", 'give days, hours, minutes and seconds as "00:03:30:00", or minutes as "210"'
    )
