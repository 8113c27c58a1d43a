"""The settings of the actors' commands: sections of a YAML file, and flags named by their paths."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from guerdon.errors import ConfigError
from guerdon.settings.access import strip_credentials
from guerdon.settings.config import LanguageModelConfig, LearningConfig, ParallelConfig
from guerdon.settings.fields import Contradictions, Mistakes, caught, collect_mistakes, setting

KlEstimator = Literal["k1", "k2", "k3", "abs"]
KlReduction = Literal["sum", "mean"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr_grpo"]


@dataclass
class PolicyConfig(LearningConfig, LanguageModelConfig):
    """The policy: any causal language model that transformers loads."""

    learning_rate: float = setting(9e-7, "Learning rate of AdamW after the warm-up.", least=0)
    total_steps: int | None = setting(
        None, "Optimiser steps after which linear and cosine reach 0. auto: from the run's steps.", auto=True, least=1
    )
    offload_optimizer: bool = setting(False, "Move the optimiser state off the device while responses are generated.")


@dataclass
class DataConfig:
    """Where prompts come from."""

    prompts: str = setting("", "JSONL (.gz) or Parquet file, folder, or hub id of a data set; each row has one prompt.")
    split: str = setting("train", "Split of a hub data set.")
    field: str = setting("prompt", "Field with the prompt: text, or a list of chat messages.")
    template: bool = setting(False, "Apply the chat template to text prompts, as a user's message.")
    max_prompt_length: int | None = setting(
        None, "Longest prompt, in tokens. auto: the policy's maximum length minus max_new_tokens.", auto=True, least=1
    )
    long_prompts: Literal["skip", "error"] = setting("skip", "Skip and report longer prompts, or refuse to start.")
    validation: str | None = setting(
        None, "Prompts for validation, in the same forms; default: the last rows of `prompts`."
    )
    validation_split: str | None = setting(None, "Split of a hub data set for validation; default: `split`.")
    num_validation: int = setting(32, "Number of prompts to validate on. 0: no validation.", least=0)
    shuffle: bool = setting(True, "Shuffle the prompts in every epoch, by the seed.")


@dataclass
class RolloutConfig:
    """How responses are sampled."""

    prompts_per_step: int = setting(16, "Number of prompts per step.", least=1)
    rollouts_per_prompt: int = setting(4, "Number of responses per prompt.", least=1)
    max_new_tokens: int = setting(128, "Longest response, in tokens.", least=1)
    min_new_tokens: int = setting(0, "Number of tokens before which EOS is not sampled.", least=0)
    temperature: float = setting(1.0, "Sampling temperature; log-probs are computed at this temperature.", above=0)
    top_k: int = setting(0, "Sample from this many most likely tokens. 0: from all.", least=0)
    top_p: float = setting(1.0, "Sample from the most likely tokens of this total probability.", above=0, most=1)
    repetition_penalty: float = setting(1.0, "Divides the logits of tokens that already occurred.", above=0)
    stop: list[str] = setting([], "Text that ends a response, like EOS.")
    environment: str | None = setting(
        None,
        "module:function, such as a tool, called at each stop text with prompt and response; its text is appended "
        "without gradient, None ends the response.",
    )
    engine: Literal["transformers", "vllm"] = setting("transformers", "Engine that generates the responses.")
    max_batch_rollouts: int | None = setting(None, "Responses generated at once. auto: 256.", auto=True, least=1)

    def contradictions(self) -> Contradictions:
        """Finds settings by which all samples would be alike or impossible."""
        if self.top_k == 1:
            yield "top_k is 1", "all responses to a prompt would be the same: give another value"
        if self.min_new_tokens > self.max_new_tokens:
            problem = f"min_new_tokens is {self.min_new_tokens}, but max_new_tokens is {self.max_new_tokens}"
            yield problem, "lower the one or raise the other"
        if self.environment is not None and not self.stop:
            problem = f"environment is {self.environment}, but rollouts.stop has no text at which it is called"
            yield problem, "give the texts that end a call, such as </tool_call>"
        if self.environment is not None and self.engine == "vllm":
            problem = f"environment is {self.environment}, but rollouts.engine is vllm"
            yield problem, "set rollouts.engine to transformers"


@dataclass
class LossConfig:
    """The settings of the loss that all actors share."""

    kl_estimator: KlEstimator = setting("k1", "Estimator of the KL per token.")
    loss_aggregation: Aggregation = setting("token-mean", "Reduction of the tokens' losses.")
    global_batch_size: int = setting(64, "Number of responses in one optimiser step.", least=1)
    epochs: int = setting(1, "Passes over each step's responses.", least=1)
    clip_low: float = setting(0.2, "Maximum distance of a token's probability ratio below 1 in the loss.", above=0)
    clip_high: float = setting(0.2, "Maximum distance of a token's probability ratio above 1 in the loss.", above=0)
    entropy_coefficient: float = setting(0.0, "Weight of the entropy bonus.")
    importance_cap: float | None = setting(
        None,
        "Cap of the tokens' weights by the probability ratio of trainer over engine; default: only with vllm.",
        above=0,
    )
    trust_region: list[float] | None = setting(
        None,
        "Bounds of the probability ratio of policy over sampling engine, such as [0.2, 4.0], outside which tokens have "
        "no gradient; default: none.",
    )
    max_failed_fraction: float = setting(
        0.1, "Stop the run if a larger fraction of a step's responses has no reward.", least=0, most=1
    )

    def contradictions(self) -> Contradictions:
        region = self.trust_region
        if region is not None and not (len(region) == 2 and 0 <= region[0] < 1 < region[1]):
            yield f"trust_region is {region}", "give a ratio below 1 and one above it, such as [0.2, 4.0]"


@dataclass
class AlgorithmConfig(LossConfig):
    """The settings that REINFORCE and PPO share."""

    kl_coefficient: float = setting(0.01, "Beta: weight of the KL divergence from the reference.", least=0)


@dataclass
class ReinforceConfig(AlgorithmConfig):
    """The REINFORCE family."""

    advantage_estimator: Literal["none", "mean", "rloo", "grpo", "dr_grpo", "reinforce++"] = setting(
        "rloo", "How advantages are computed from rewards."
    )
    kl_placement: Literal["reward", "loss"] = setting(
        "reward", "Subtract the KL penalty from the reward, or add it to the loss."
    )
    kl_reduction: KlReduction = setting(
        "sum", "With kl_placement reward: sum or mean of the KL over a response's tokens (NeMo-Aligner: mean)."
    )
    leave_out_truncated: bool = setting(False, "Exclude truncated responses from advantages and baselines.")

    def contradictions(self) -> Contradictions:
        if self.kl_placement == "loss" and self.kl_estimator == "k1" and self.kl_coefficient > 0:
            problem = "kl_placement is loss, in which the gradient of the estimator k1 is only noise"
            yield problem, "give reinforce.kl_estimator k2 or k3, or kl_placement reward"
        if self.kl_placement == "loss" and self.kl_reduction != "sum":
            problem = f"kl_reduction is {self.kl_reduction}, but has no effect, because kl_placement is loss"
            yield problem, "leave it out: reinforce.loss_aggregation also reduces the KL of the tokens"


@dataclass
class PPOConfig(AlgorithmConfig):
    """PPO with a critic."""

    gamma: float = setting(1.0, "Discount per token.", least=0, most=1)
    lam: float = setting(0.95, "Lambda of GAE.", least=0, most=1)
    lam_alpha: float | None = setting(
        None, "Lambda of the advantages is 1 - 1 / (lam_alpha * l), at least 0, for l tokens; default: lam.", above=0
    )
    lam_critic: float | None = setting(None, "Lambda of the critic's returns; default: lam.", least=0, most=1)
    whiten_advantages: bool = setting(True, "Scale each step's advantages to mean 0 and variance 1.")
    critic_warmup_steps: int = setting(0, "Number of first steps that train only the critic.", least=0)
    critic_updates: int = setting(1, "The critic's passes over each step's responses.", least=1, most=100)

    def contradictions(self) -> Contradictions:
        if None not in (self.lam_alpha, self.lam_critic) and self.lam != PPOConfig.lam:
            problem = f"lam is {self.lam:g}, but has no effect beside ppo.lam_alpha and ppo.lam_critic"
            yield problem, "leave it out, or one of the other two"


@dataclass
class DistillConfig(LossConfig):
    """On-policy distillation."""


@dataclass
class RunConfig:
    """Length of the run, and its output."""

    steps: int = setting(100, "Number of steps.", least=1)
    seed: int = setting(0, "Seed of everything random.", least=0)
    output_dir: str = setting("out/run", "Folder for metrics, curves, samples and checkpoints.")
    save_every: int = setting(20, "Steps between checkpoints; the last step is also saved.", least=1)
    keep_checkpoints: int = setting(2, "Number of newest checkpoints to keep.", least=1)
    resume: bool = setting(True, "Resume from the newest checkpoint in output_dir.")
    time_limit: str | None = setting(
        None, 'Time from the start after which the run saves and exits: DD:HH:MM:SS, or minutes, in quotes ("210").'
    )
    validate_every: int = setting(10, "Steps between validations; also before the first step and at the end.", least=1)
    num_samples: int = setting(8, "Number of responses in a validation's table of samples.", least=0)
    trackers: list[str] = setting([], "Tracker in addition to TensorBoard: wandb or mlflow.")
    project: str = setting("guerdon", "Project name in the trackers.")
    progress: bool = setting(True, "Show a progress bar.")

    def contradictions(self) -> Contradictions:
        for tracker in self.trackers:
            if tracker not in ("wandb", "mlflow"):
                yield f"trackers has {tracker}", "known are wandb and mlflow"


@dataclass
class RewardServer:
    """A reward model's server, as in NeMo-Aligner's YAML."""

    name: str = setting("reward_model", "Name of the model on the server.")
    ip: str = setting("localhost", "Host name or address.")
    port: int = setting(5555, "HTTP port.", least=0, most=65_535)
    urls: list[str] = setting([], "http:// or grpc:// URL, in place of ip and port; several share the load.")

    @property
    def addresses(self) -> list[str]:
        """The URLs to send requests to."""
        return self.urls or [f"http://{self.ip}:{self.port}"]

    def contradictions(self) -> Contradictions:
        return _find_keys("urls", *self.urls)


@dataclass
class CriticNames:
    """The names of the critic's three models."""

    train: str = setting("critic_train", "Name of the model that trains.")
    infer: str = setting("critic_infer", "Name of the model that returns values.")
    save: str = setting("critic_save", "Name of the model that saves.")


@dataclass
class CriticServer:
    """A critic's server, as in NeMo-Aligner's YAML."""

    name: CriticNames = setting(CriticNames, "The critic's models.")
    ip: str = setting("localhost", "Host name or address.")
    port: int = setting(5556, "HTTP port.", least=0, most=65_535)
    url: str | None = setting(None, "http:// or grpc:// URL, in place of ip and port.")

    @property
    def address(self) -> str:
        """The URL to send requests to."""
        return self.url or f"http://{self.ip}:{self.port}"

    def contradictions(self) -> Contradictions:
        return _find_keys("url", self.url)


@dataclass
class RemoteRewardConfig:
    """The server of the reward model."""

    reward_model: RewardServer = setting(RewardServer, "The server.")
    pad_to_length: int | None = setting(
        None, "Pad requests to this length, for servers that batch only equal shapes; unnecessary for guerdon.", least=1
    )
    send: Literal["tokens", "text", "messages"] = setting(
        "tokens", "Form of the samples; token ids are refused if the tokenizers differ."
    )
    suffix: str = setting(
        "", "With send: text, appended to responses that ended with EOS, in place of the chat template's ending."
    )
    timeout_s: float = setting(3600.0, "Timeout of a request with all retries, in seconds.", above=0)

    def contradictions(self) -> Contradictions:
        if self.send != "tokens" and self.pad_to_length is not None:
            problem = f"pad_to_length is {self.pad_to_length}, but send is {self.send}"
            yield problem, "only tokens are padded: leave one of the two out"
        if self.send != "text" and self.suffix:
            problem = f"suffix is {self.suffix!r}, but send is {self.send}"
            yield problem, "leave it out, or send text: tokens include EOS, and the chat template ends messages"


@dataclass
class RemoteCriticConfig(RemoteRewardConfig):
    """The servers of the critic and of the reward model."""

    critic: CriticServer = setting(CriticServer, "The critic's server.")
    combine_rm_and_critic_server: bool = setting(True, "The critic's server also serves the reward model.")


@dataclass
class TeacherServer:
    """A teacher's server, which gives the log-probs of responses."""

    url: str | None = setting(None, "http:// or grpc:// URL of a server of guerdon serve-teacher.")
    name: str = setting("teacher", "Name of the model on the server.")
    timeout_s: float = setting(3600.0, "Timeout of a request with all retries, in seconds.", above=0)

    def contradictions(self) -> Contradictions:
        return _find_keys("url", self.url)


@dataclass
class ActorConfig:
    """The sections that all actors have."""

    ALGORITHM: ClassVar[str]
    """The name of the algorithm's section, which is also the command's."""

    policy: PolicyConfig = setting(PolicyConfig, PolicyConfig.__doc__ or "")
    data: DataConfig = setting(DataConfig, "Where prompts come from.")
    rollouts: RolloutConfig = setting(RolloutConfig, "How responses are sampled.")
    run: RunConfig = setting(RunConfig, "Length of the run, and its output.")
    parallel: ParallelConfig = setting(ParallelConfig, "The ranks that share the policy.")

    def contradictions(self) -> Contradictions:
        """Finds contradictions between sections, and files that are missing."""
        yield from caught(parse_time_limit, self.run.time_limit)
        algorithm = get_algorithm(self)[1]
        estimator = algorithm.advantage_estimator if isinstance(algorithm, ReinforceConfig) else "none"
        if estimator in ("rloo", "grpo", "dr_grpo") and self.rollouts.rollouts_per_prompt < 2:
            problem = f"rollouts.rollouts_per_prompt is 1, but {estimator} compares responses to the same prompt"
            yield problem, "give at least 2, or another reinforce.advantage_estimator"
        sources = {
            "policy.model": self.policy.model, "data.prompts": self.data.prompts,
            "data.validation": self.data.validation,
        }  # fmt: skip
        for path, source in sources.items():
            if source is not None and is_path(source) and not Path(source).expanduser().exists():
                yield f"there is no {source}", f"correct {path}; it may also be an id of the hub"


@dataclass
class RewardedRunConfig(ActorConfig):
    """The sections that the actors have which learn from rewards, with a KL penalty."""

    REMOTE: ClassVar[str]
    """The name of the section of the reward model's server."""

    reference: TeacherServer = setting(
        TeacherServer, "The server of the reference; without its url the reference is loaded beside the policy."
    )


@dataclass
class ReinforceRunConfig(RewardedRunConfig):
    """The settings of `guerdon reinforce`."""

    ALGORITHM = "reinforce"
    REMOTE = "remote_rm"
    reinforce: ReinforceConfig = setting(ReinforceConfig, "The algorithm.")
    remote_rm: RemoteRewardConfig = setting(RemoteRewardConfig, "The server of the reward model.")


@dataclass
class PPORunConfig(RewardedRunConfig):
    """The settings of `guerdon ppo`."""

    ALGORITHM = "ppo"
    REMOTE = "remote_critic_rm"
    ppo: PPOConfig = setting(PPOConfig, "The algorithm.")
    remote_critic_rm: RemoteCriticConfig = setting(
        RemoteCriticConfig, "The servers of the critic and of the reward model."
    )


@dataclass
class DistillRunConfig(ActorConfig):
    """The settings of `guerdon distill`."""

    ALGORITHM = "distill"
    distill: DistillConfig = setting(DistillConfig, "The algorithm.")
    teacher: TeacherServer = setting(TeacherServer, "The server of the teacher.")


def check_actor(config: ActorConfig) -> None:
    """Raises ConfigError for all settings that are missing or out of their bounds, and for all contradictions."""
    mistakes = Mistakes()
    if not config.policy.model:
        mistakes.add("policy.model is not given", "name a causal language model: a folder or a hub id")
    if not config.data.prompts:
        mistakes.add("data.prompts is not given", "name a JSONL or Parquet file of prompts, or a data set")
    if isinstance(config, DistillRunConfig) and not config.teacher.url:
        mistakes.add("teacher.url is not given", "give the URL of a server of guerdon serve-teacher")
    others = [(name, settings) for name, settings in vars(config).items() if name != "policy"]
    are_within = [collect_mistakes(settings, f"{name}.", mistakes) for name, settings in others]
    if all(are_within):
        collect_mistakes(resolve_schedule(config), "policy.", mistakes)
        for problem, advice in config.contradictions():
            mistakes.add(problem, advice)
    mistakes.raise_all()


def is_path(source: str) -> bool:
    """Returns whether a name can only be that of a local file or folder, not an id of the hub."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or source.endswith(_ENDINGS)


_ENDINGS = (".json", ".jsonl", ".gz", ".zst", ".parquet", ".arrow", ".csv", ".tsv", ".txt")


def _find_keys(name: str, *urls: str | None) -> Contradictions:
    """Yields the URLs with credentials: a run saves its settings and sends them to trackers."""
    for url in urls:
        if url is not None and (shown := strip_credentials(url)) != url:
            problem = f"{name} has a key in {shown}, but a run saves and shows its settings"
            yield problem, "leave it out, and set GUERDON_API_KEY in the environment"


def get_algorithm(config: ActorConfig) -> tuple[str, LossConfig]:
    """Returns the name of the algorithm's section, which is also the command's, and the section."""
    return config.ALGORITHM, getattr(config, config.ALGORITHM)


def get_remote(config: RewardedRunConfig) -> tuple[str, RemoteRewardConfig]:
    """Returns the name of the section of the reward model's server, and the section."""
    return config.REMOTE, getattr(config, config.REMOTE)


def describe_run(config: ActorConfig) -> str:
    """Returns a run's model, its source of learning and its output folder, in one line."""
    if isinstance(config, DistillRunConfig):
        origin = f"the teacher's log-probs come from {config.teacher.url}"
    else:
        assert isinstance(config, RewardedRunConfig)
        remote = get_remote(config)[1]
        origin = f"rewards come from {', '.join(remote.reward_model.addresses)}"
        if isinstance(remote, RemoteCriticConfig) and remote.combine_rm_and_critic_server:
            origin = f"values and rewards come from {remote.critic.address}"
        elif isinstance(remote, RemoteCriticConfig):
            origin = f"values come from {remote.critic.address}, {origin}"
        if config.reference.url is not None:
            origin += f", the reference's log-probs from {config.reference.url}"
    about = f"policy {config.policy.model}, prompts {config.data.prompts}"
    return f"{about}; {origin}; results go to {config.run.output_dir}"


def resolve_schedule(config: ActorConfig) -> PolicyConfig:
    """Returns the policy's settings with `total_steps`, computed from the run if it is not given."""
    algorithm, rollouts = get_algorithm(config)[1], config.rollouts
    warmup = algorithm.critic_warmup_steps if isinstance(algorithm, PPOConfig) else 0
    batches = -(-rollouts.prompts_per_step * rollouts.rollouts_per_prompt // algorithm.global_batch_size)
    computed = max(1, config.run.steps - warmup) * algorithm.epochs * batches
    return replace(config.policy, total_steps=config.policy.total_steps or computed)


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
