"""Every setting, once: a YAML file and the command line's flags are both made from these dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from guerdon.core import Operation
from guerdon.errors import ConfigError
from guerdon.settings.access import AccessConfig, check_reach, check_tls, check_traces_endpoint
from guerdon.settings.fields import Mistakes, check_bounds, convert, setting


@dataclass
class ForwardConfig:
    """How a checkpoint is loaded and its forward run."""

    revision: str | None = setting(None, "hub revision (branch, tag or commit)")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "weights' dtype; auto: bfloat16 on a GPU, float32 on a CPU. The head is always float32"
    )
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, ...")
    max_batch_tokens: int | None = setting(
        None, "tokens computed in one forward, after sharing; auto: chosen for the device", auto=True, least=1
    )
    max_length: int | None = setting(
        None, "longest accepted sequence in tokens; auto: the model's own maximum", auto=True, least=1
    )
    require_packed: bool = setting(False, "refuse to start where the packed forward does not match the plain one")
    deterministic: bool = setting(
        False, "compute each sequence by itself: its score is bitwise the same whatever shares its batch"
    )


@dataclass
class ParallelConfig:
    """How many processes, which torchrun starts, share one model; one process needs none of it."""

    tensor_parallel: int = setting(
        1, "ranks that share each layer's weights; the others of a launch are data parallel", least=1
    )
    fsdp: bool = setting(
        False, "shard what is trained, its gradients and its optimiser over the data-parallel ranks (FSDP2)"
    )
    rank_timeout_s: float = setting(
        30.0, "seconds without a sign of life after which a rank is given up, and all others end", least=2
    )


@dataclass
class LanguageModelConfig(ForwardConfig):
    """One causal language model."""

    model: str = setting("", "local folder or hub id of a causal language model")


@dataclass
class EngineConfig(ForwardConfig):
    """How a checkpoint is served, whether it scores or learns."""

    attribute_weights: list[float] | None = setting(
        None, "weights that merge several attributes into the reward; default: the plain mean"
    )
    mean: float | None = setting(None, "subtracted from every reward or value; auto: the checkpoint's own", auto=True)
    std: float | None = setting(
        None, "divides every reward or value after the mean; auto: the checkpoint's own", auto=True, above=0
    )
    max_queue_tokens: int = setting(4_000_000, "tokens that may wait; beyond it requests are refused with 503", least=1)
    max_queue_sequences: int = setting(
        16_384, "sequences that may wait; beyond it requests are refused with 503", least=1
    )
    recheck_share: float = setting(
        0.0, "share of the scored sequences that are scored again by the plain forward, and compared", least=0, most=1
    )


@dataclass
class LearningConfig:
    """The optimiser, its schedule, and what of a model it trains."""

    learning_rate: float = setting(9e-6, "of AdamW, after the warm-up", least=0)
    weight_decay: float = setting(0.01, "of AdamW, as torch's on all weights: biases and norms decay, too", least=0)
    betas: list[float] = setting([0.9, 0.98], "of AdamW")
    optimizer: Literal["adamw", "adamw_8bit"] = setting("adamw", "adamw_8bit keeps its state in 8 bits")
    lr_schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant", "of the learning rate after the warm-up; linear and cosine end at 0 after total_steps"
    )
    warmup_steps: int = setting(0, "optimiser steps in which the learning rate rises from 0", least=0)
    total_steps: int | None = setting(None, "optimiser steps of the whole run; linear and cosine need it", least=1)
    gradient_clip_val: float = setting(1.0, "largest norm of a step's gradient; 0: never clipped", least=0)
    lora: int | None = setting(None, "train low-rank adapters of this rank (by peft) in place of all weights", least=1)
    lora_alpha: float = setting(32.0, "scale of the adapters: their output is multiplied by lora_alpha / lora", least=0)
    lora_targets: str = setting(
        "all-linear", "which layers lora adapts: all-linear, or a regular expression of whole module names"
    )
    activation_checkpointing: bool = setting(
        False, "compute activations a second time in place of keeping them: less memory, more time"
    )


LEARNING = tuple(f.name for f in dataclasses.fields(LearningConfig) if f.name != "activation_checkpointing")
"""The settings of `LearningConfig` that decide which weights come out of what is learnt from."""


@dataclass
class ModelConfig(EngineConfig):
    """One served model."""

    model: str = setting("", "local folder, hub id, or module:function", flag=False)
    name: str = setting("reward_model", "name under which clients ask for it")
    merge_attributes: bool = setting(
        True, "false: `rewards` has a column for each attribute, as with NeMo-Aligner's regression models"
    )
    truncation: Literal["error", "left", "right"] = setting(
        "error", "a longer sequence is refused, or loses tokens at this side"
    )
    pooling: Literal["auto", "last", "last_non_pad", "mean", "first", "first_eos"] = setting(
        "auto", "which token's hidden state gives the reward; auto: the rule of the checkpoint's own library"
    )
    step_separator: str | None = setting(None, "text whose last token ends a step (process reward models)")
    step_reduction: Literal["min", "mean", "last", "product"] = setting(
        "min", "how step rewards make the reward of the whole sequence"
    )


@dataclass
class CriticConfig(LearningConfig, EngineConfig):
    """One trainable critic, and the reward model that may answer beside it."""

    model: str = setting("", "local folder or hub id of a reward model or a critic", flag=False)
    name: str = setting("critic", "clients ask for NAME_infer, NAME_train, NAME_save, ...")
    reward_model: str | None = setting(None, "folder or hub id of a reward model; NAME_infer then gives rewards, too")
    reward_model_memory: Literal["resident", "swap"] = setting(
        "resident", "resident: both stay on the device; swap: one at a time, the other waits in the host's memory"
    )
    reward_revision: str | None = setting(None, "hub revision of the reward model")
    reward_attribute_weights: list[float] | None = setting(
        None, "weights that merge the reward model's attributes; default: the plain mean"
    )
    reward_pooling: Literal["auto", "last", "last_non_pad", "mean", "first", "first_eos"] = setting(
        "auto", "which token's hidden state gives the reward model's rewards; auto: the rule of its own library"
    )
    reward_mean: float | None = setting(
        None, "subtracted from the reward model's rewards; auto: its checkpoint's own", auto=True
    )
    reward_std: float | None = setting(
        None, "divides the reward model's rewards after the mean; auto: its checkpoint's own", auto=True, above=0
    )
    checkpoint_dir: str | None = setting(
        None, "folder for checkpoints and the journal; without it nothing survives the server"
    )
    keep_checkpoints: int = setting(2, "newest checkpoints that are kept", least=1)
    keep_best: str | None = setting(
        None, "also keep the checkpoint that is best by this metric: explained_variance, loss, or one given to save"
    )
    keep_best_mode: Literal["auto", "max", "min"] = setting(
        "auto", "whether the best metric is the largest or the smallest; auto: the smallest loss, the largest of others"
    )
    save_every: int | None = setting(
        None, "save a checkpoint by itself after so many train requests; default: only when asked", least=1
    )
    global_batch_size: int = setting(64, "sequences of one optimiser step", least=1)
    loss_clip_val: float = setting(0.2, "how far a value may move from prev_values in the loss; 0: unbounded", least=0)

    @property
    def best_mode(self) -> Literal["max", "min"]:
        """`keep_best_mode` with `auto` decided."""
        if self.keep_best_mode != "auto":
            return self.keep_best_mode
        return "min" if self.keep_best == "loss" else "max"


@dataclass
class ComponentConfig:
    """One part of a reward that is made of several."""

    model: str = setting("", "name of a served model or function")
    weight: float = setting(1.0, "multiplies it in the sum; 0: it is only told beside the others")
    normalize: Literal["none", "given", "running"] = setting(
        "none",
        "given: less `mean`, divided by `std`; running: by the mean and the standard deviation of all its rewards that "
        "this sum has seen since the server's start",
    )
    mean: float | None = setting(None, "subtracted from every reward, where normalize is given; default: 0")
    std: float | None = setting(
        None, "divides every reward after the mean, where normalize is given; default: 1", above=0
    )
    clip: float | None = setting(None, "bounds it to -clip ... clip after normalisation, before the weight", above=0)


@dataclass
class RewardConfig:
    """A reward that is the weighted sum of several, served under a name of its own."""

    name: str = setting("reward_model", "name under which clients ask for it")
    components: list[ComponentConfig] = setting([], "what it is the sum of")
    clip: float | None = setting(None, "bounds the sum to -clip ... clip", above=0)


@dataclass
class LimitsConfig:
    """Resource limits per server."""

    max_body_mb: int = setting(256, "largest request body in MiB; a larger one is refused before it is read", least=1)
    max_request_sequences: int = setting(65_536, "sequences of one request; one of more is refused", least=1)
    max_requests: int = setting(4096, "requests in progress at once; beyond it 503", least=1)
    max_bodies_mb: int = setting(
        2048, "MiB that the bodies of the requests in progress may have together; beyond it 503", least=1
    )
    max_connections: int = setting(
        16_384,
        "open HTTP connections, shared by key; at the limit a new one evicts an idle one, or gets 503 if none is idle",
        least=1,
    )
    header_timeout_s: float = setting(
        20.0, "seconds in which a connection's first request, and the head of every request, must have come", least=0.1
    )
    read_timeout_s: float = setting(
        60.0, "seconds in which at least some more of a body, and all of a gRPC message, must have come", least=0.1
    )
    write_timeout_s: float = setting(60.0, "seconds in which a client must have read some of its answer", least=0.1)
    idle_timeout_s: float = setting(
        3600.0, "seconds that a connection may stay without a request; a trainer's outlive its other phases", least=0.1
    )
    request_timeout_s: float = setting(
        600.0,
        "longest time a request may wait when it sets no time-out itself; a critic's wait as long as it takes",
        above=0,
    )
    shutdown_timeout_s: float = setting(30.0, "seconds that accepted work has after the signal to stop", least=0)


@dataclass
class DashboardConfig:
    """The page that a server has at `/`."""

    dashboard: bool = setting(True, "serve the page at /, and keep what it shows of the last day")
    dashboard_samples: bool = setting(
        False, "keep the best and the worst samples' texts for the page; with keys only admins see them"
    )


@dataclass
class ServerConfig(LimitsConfig, AccessConfig, ParallelConfig, DashboardConfig):
    """One server: its sockets, its limits and its models."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(5555, "HTTP port (0: any free one)", least=0, most=65_535)
    grpc_port: int | None = setting(
        5557,
        "gRPC port (0: any free one); default: the HTTP port + 2; --no-grpc turns it off",
        least=0,
        most=65_535,
    )
    model_repository: str | None = setting(
        None, "folder of the checkpoints that a key of the role admin may load while the server runs"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "what is logged to stderr")
    log_format: Literal["text", "json"] = setting("text", "of the log, and of all else that the server says")
    traces: str | None = setting(
        None,
        "send traces to this collector by OTLP over HTTP, such as http://127.0.0.1:4318; default: where "
        "OTEL_EXPORTER_OTLP_ENDPOINT says, if anywhere",
    )
    models: list[ModelConfig] = setting([], "the served models", flag=False)
    rewards: list[RewardConfig] = setting([], "rewards that are sums of several of the models'", flag=False)
    critic: CriticConfig | None = setting(None, "the trainable critic", flag=False)


def check(settings: Any, where: str = "") -> None:
    """Raises ConfigError for every setting of the dataclass that is out of its bounds or contradicts another.

    `where` is the path of the section that the settings are, with the point behind it.
    """
    mistakes = Mistakes()
    _note_mistakes(settings, where, mistakes)
    mistakes.raise_all()


def _note_mistakes(settings: Any, where: str, mistakes: Mistakes) -> None:
    hints, num_own = typing.get_type_hints(type(settings)), 0
    for item in dataclasses.fields(settings):
        value, path = getattr(settings, item.name), where + item.name
        parts = [(f"{path}[{i}]", part) for i, part in enumerate(value)] if isinstance(value, list) else [(path, value)]
        for within, part in parts:
            if dataclasses.is_dataclass(part):
                _note_mistakes(part, f"{within}.", mistakes)
        num_before = len(mistakes)
        with mistakes.noted():
            if typing.get_origin(hints[item.name]) is Literal:
                convert(hints[item.name], value, path)
            check_bounds(value, item.metadata, path)
        num_own += len(mistakes) - num_before
    if num_own:  # what contradicts them may follow from them
        return
    checks: list[Callable[[], None]] = []
    if isinstance(settings, LearningConfig):
        checks.append(lambda: _check_learning(settings, where))
    if isinstance(settings, CriticConfig):
        checks.append(lambda: _check_critic(settings, where))
    if isinstance(settings, ServerConfig):
        checks += [lambda: check_reach(settings, settings.host), lambda: check_tls(settings)]
        checks.append(lambda: _check_rest(settings))
        for i, reward in enumerate(settings.rewards):
            checks.append(functools.partial(_check_reward, reward, f"rewards[{i}]", settings.models))
    for contradiction in checks:
        with mistakes.noted():
            contradiction()


def _check_rest(settings: ServerConfig) -> None:
    if settings.traces is not None:
        check_traces_endpoint(settings.traces)
    _check_names(settings)
    if settings.dashboard_samples and not settings.dashboard:
        raise ConfigError("dashboard_samples is on, and there is no page", "leave out one of the two")
    if settings.fsdp and settings.critic is None:
        raise ConfigError(
            "fsdp is on, and there is no critic: it shards what is trained",
            "leave it out; a model too large for one device is split by tensor_parallel",
        )


def _check_learning(settings: Any, where: str) -> None:
    if settings.dtype == "float16":
        raise ConfigError(
            f"{where}dtype is float16, in which gradients vanish to 0", "use bfloat16 or float32 to train"
        )
    betas, schedule = settings.betas, settings.lr_schedule
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"{where}betas is {betas}", "give two numbers of at least 0 and below 1, such as 0.9,0.98")
    if schedule != "constant" and (settings.total_steps is None or settings.total_steps <= settings.warmup_steps):
        raise ConfigError(
            f"{where}lr_schedule is {schedule}, and total_steps is {settings.total_steps}",
            f"give the optimiser steps of the whole run as total_steps, more than the {settings.warmup_steps} of the "
            "warm-up",
        )


_OF_REWARD_MODEL = (
    "reward_model_memory",
    "reward_revision",
    "reward_pooling",
    "reward_attribute_weights",
    "reward_mean",
    "reward_std",
)


def _check_critic(settings: CriticConfig, where: str) -> None:
    if settings.checkpoint_dir is None:
        for name in ("save_every", "keep_best"):
            if (value := getattr(settings, name)) is not None:
                raise ConfigError(
                    f"{where}{name} is {value}, and there is no folder for checkpoints", "give checkpoint_dir"
                )
    if settings.reward_model is None:
        defaults = {field.name: field.default for field in dataclasses.fields(settings)}
        for name in _OF_REWARD_MODEL:
            if (value := getattr(settings, name)) != defaults[name]:
                raise ConfigError(f"{where}{name} is {value}, and there is no reward model", "give reward_model")


def _check_names(settings: ServerConfig) -> None:
    """Raises ConfigError where two things would be asked for by one name."""
    names = [model.name for model in settings.models] + [reward.name for reward in settings.rewards]
    if settings.critic is not None:
        names += [f"{settings.critic.name}_{what}" for what in ("infer", *Operation)]
    for name in names:
        if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
            raise ConfigError(
                f"{name!r} cannot be a model's name", "take letters of ASCII, digits, underscores, points and hyphens"
            )
        if names.count(name) > 1:
            raise ConfigError(f"two models are named {name}", "give each its own `name:`, and each of `rewards:`, too")


def _check_reward(settings: RewardConfig, where: str, models: list[ModelConfig]) -> None:
    if not settings.components:
        raise ConfigError(f"{where} has no components", "add `components:` with `- model:` lines")
    seen: set[str] = set()
    for i, component in enumerate(settings.components):
        _check_component(component, f"{where}.components[{i}]", [model.name for model in models])
        if component.model in seen:
            raise ConfigError(f"{where} has {component.model} twice", "leave one out, and add their weights")
        seen.add(component.model)
    if all(component.weight == 0 for component in settings.components):
        raise ConfigError(f"{where}: all weights are 0", "give one component another `weight:`")


def _check_component(settings: ComponentConfig, where: str, models: list[str]) -> None:
    if settings.model not in models:
        raise ConfigError(
            f"{where}.model is {settings.model!r}, which is none of `models:`",
            f"name one of them by its `name:`: {', '.join(models)}" if models else "list it under `models:` first",
        )
    if settings.model == "score":
        raise ConfigError(f"{where}.model is score", "name it otherwise: trainers call the whole sum's reward so")
    given = [name for name in ("mean", "std") if getattr(settings, name) is not None]
    if settings.normalize == "given" and not given:
        raise ConfigError(f"{where}.normalize is given, and there is neither mean nor std", "give them, or one of them")
    if settings.normalize != "given" and given:
        raise ConfigError(
            f"{where}.{given[0]} is {getattr(settings, given[0]):g}, and normalize is {settings.normalize}",
            "write `normalize: given`, or leave it out",
        )
