"""The settings of servers and their models. A server's YAML file and its flags are made from these dataclasses."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from guerdon.critic_core import Operation
from guerdon.settings.access import AccessConfig, check_reach, check_traces_endpoint
from guerdon.settings.chat_judges import ChatJudgeConfig, take_out
from guerdon.settings.fields import Contradictions, caught, default_of, setting

_MEANING = frozenset(
    {
        "attribute_weights", "chat_template", "generation_prompt", "mean", "merge_attributes", "pooling", "reward",
        "std", "step_reduction", "step_separator", "system", "turns",
    }
)  # fmt: skip
"""Settings of a reward model that change its scores of the same samples."""

Pooling = Literal["auto", "last", "last_non_pad", "mean", "first", "first_eos"]


@dataclass
class ForwardConfig:
    """How a checkpoint is loaded and run forward."""

    revision: str | None = setting(None, "Hub revision: a branch, tag or commit.")
    base: str | None = setting(
        None, "Base model of an adapter: folder or hub id. auto: as in adapter_config.json.", auto=True
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "Dtype of the weights; the head is always float32. auto: bfloat16 on a GPU, float32 on a CPU."
    )
    dequantize: bool = setting(
        False,
        "Dequantise the weights of a quantised checkpoint at loading; they take as much memory as unquantised ones.",
    )
    device: str = setting("auto", "Device: auto, cpu, cuda, cuda:1, ...")
    max_batch_tokens: int | None = setting(
        None, "Maximum number of tokens in one forward pass, shared prefixes counted once.", auto=True, least=1
    )
    max_length: int | None = setting(
        None, "Longest accepted sequence, in tokens. auto: the model's maximum.", auto=True, least=1
    )
    require_packed: bool = setting(False, "Refuse to start if the packed forward does not match the plain one.")
    deterministic: bool = setting(False, "Compute each sequence separately: the same bits in every batch.")


@dataclass
class ParallelConfig:
    """The ranks that share one model: processes that the command starts, or torchrun."""

    tensor_parallel: int = setting(1, "Number of ranks that share each layer's weights.", least=1)
    data_parallel: int | None = setting(
        None,
        "Number of data-parallel parts, of tensor_parallel ranks each, behind one port. auto: all that torchrun "
        "started; else with fsdp all GPUs; else 1.",
        auto=True,
        least=1,
    )
    fsdp: bool = setting(
        False, "Shard trained weights, gradients and optimiser state over the data-parallel ranks (FSDP2)."
    )
    rank_timeout_s: float = setting(
        30.0, "Seconds without a heartbeat after which a rank counts as lost and all others exit.", least=2
    )
    max_restarts: int = setting(
        10, "Maximum restarts of all ranks after a lost one; torchrun has its own flag.", least=0
    )


@dataclass
class LanguageModelConfig(ForwardConfig):
    """One causal language model."""

    model: str = setting("", "Local folder or hub id of a causal language model.", flag=False)


@dataclass
class QueueConfig:
    """How many requests may wait for a model, and how many answers are computed twice."""

    max_queue_tokens: int = setting(4_000_000, "Maximum number of queued tokens; above it: status 503.", least=1)
    max_queue_sequences: int = setting(16_384, "Maximum number of queued sequences; above it: status 503.", least=1)
    recheck_share: float = setting(
        0.0, "Share of sequences that are scored again by the plain forward and compared.", least=0, most=1
    )


@dataclass
class EngineConfig(QueueConfig, ForwardConfig):
    """How rewards and values are computed from a checkpoint, and how many requests may wait for it."""

    attribute_weights: list[float] | None = setting(
        None, "Weights that combine several attributes into the reward; default: their mean."
    )
    mean: float | None = setting(
        None, "Subtracted from every reward or value. auto: taken from the checkpoint.", auto=True
    )
    std: float | None = setting(
        None,
        "Divides every reward or value, after the mean is subtracted. auto: taken from the checkpoint.",
        auto=True,
        above=0,
    )

    def contradictions(self) -> Contradictions:
        yield from _check_weights(self)


@dataclass
class LearningConfig:
    """The optimiser, its schedule, and which weights it trains."""

    learning_rate: float = setting(9e-6, "Learning rate of AdamW after the warm-up.", least=0)
    weight_decay: float = setting(0.01, "Weight decay of AdamW, also of biases and norms, as in torch.", least=0)
    betas: list[float] = setting([0.9, 0.98], "Betas of AdamW.")
    optimizer: Literal["adamw", "adamw_8bit"] = setting("adamw", "adamw_8bit keeps the optimiser state in 8 bits.")
    lr_schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant", "Schedule of the learning rate after the warm-up; linear and cosine reach 0 at total_steps."
    )
    warmup_steps: int = setting(0, "Optimiser steps in which the learning rate rises from 0.", least=0)
    total_steps: int | None = setting(None, "Optimiser steps of the whole run; required by linear and cosine.", least=1)
    gradient_clip_val: float = setting(1.0, "Maximum norm of a step's gradient. 0: no clipping.", least=0)
    lora: int | None = setting(None, "Train low-rank adapters of this rank (by peft) instead of all weights.", least=1)
    lora_alpha: float = setting(
        32.0, "Scale of the adapters: their output is multiplied by lora_alpha / lora.", least=0
    )
    lora_targets: str = setting(
        "all-linear", "Layers with adapters: all-linear, or a regular expression for whole module names."
    )
    activation_checkpointing: bool = setting(
        False, "Recompute activations in the backward pass: less memory, more time."
    )

    def contradictions(self) -> Contradictions:
        betas, schedule, warmup = self.betas, self.lr_schedule, self.warmup_steps
        if isinstance(self, ForwardConfig) and self.dtype == "float16":
            yield "dtype is float16, in which gradients underflow to 0", "use bfloat16 or float32 to train"
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            yield f"betas is {betas}", "give two numbers of at least 0 and below 1, such as 0.9,0.98"
        if schedule != "constant" and (self.total_steps is None or self.total_steps <= warmup):
            advice = f"set total_steps to the optimiser steps of the whole run, more than the warm-up's {warmup}"
            yield f"lr_schedule is {schedule}, and total_steps is {self.total_steps}", advice
        for name in ("lora_alpha", "lora_targets"):
            if self.lora is None and (value := getattr(self, name)) != getattr(LearningConfig, name):
                yield f"{name} is {value}, but lora is not set, so that all weights are trained", "give lora, the rank"


LEARNING = tuple(f.name for f in dataclasses.fields(LearningConfig) if f.name != "activation_checkpointing")
"""The settings of `LearningConfig` that decide which weights come out of training."""


@dataclass
class IsolationConfig:
    """Isolation of a user's function in child processes, and the limits of one sample."""

    switches: ClassVar[dict[str, str]] = {"isolate": "isolate_"}

    isolate: bool = setting(
        False, "Call a function in child processes with the limits below; a failure concerns its own sample alone."
    )
    isolate_python: str | None = setting(
        None, "Python of another environment, in which the function is called; also `isolate: {python: PATH}`."
    )
    children: int | None = setting(
        None,
        "Child processes of an isolated function, one sample each. auto: the cores, at most 16.",
        auto=True,
        least=1,
        most=256,
    )
    sample_deadline_s: float = setting(10.0, "Seconds for one sample.", above=0, most=86_400)
    sample_cpu_s: float | None = setting(
        None, "CPU seconds of a sample's processes together. auto: sample_deadline_s.", auto=True, above=0
    )
    sample_memory_mb: int = setting(1024, "Memory of a sample in MiB, beyond the imported function's.", least=16)
    sample_processes: int = setting(16, "Concurrent processes of a sample, its child included.", least=1)
    import_deadline_s: float = setting(60.0, "Seconds to import an isolated function.", above=0)
    pass_env: list[str] = setting([], "Environment variable for child processes, beside PATH, HOME and the like.")

    @property
    def num_children(self) -> int:
        """Returns `children`, with `auto` resolved."""
        return self.children or min(len(os.sched_getaffinity(0)), 16)

    def contradictions(self) -> Contradictions:
        if self.isolate and sys.platform != "linux":
            yield "isolate is on, which needs Linux", "leave it out, or serve it on Linux"
        for field in dataclasses.fields(IsolationConfig):
            if not self.isolate and (value := getattr(self, field.name)) != default_of(field):
                yield f"{field.name} is {value}, but isolate is off", "write `isolate: true` beside it"


@dataclass
class TokenRewardConfig:
    """A reward that is read from a language model's logits, as some reward models' cards do."""

    ids: list[int] = setting([], "Token ids whose logits are read.")
    tokens: list[str] = setting([], "The same as texts, each of which is one token.")
    form: Literal["logit", "difference", "probability"] = setting(
        "logit", "The first token's logit; that minus the second's; or the first token's probability."
    )
    among: Literal["given", "all"] = setting("given", "The tokens that share a probability of 1.")

    def contradictions(self) -> Contradictions:
        given = self.ids or self.tokens
        shares = self.form == "probability" and self.among == "given"
        wanted = 2 if shares or self.form == "difference" else 1
        if self.ids and self.tokens:
            yield "ids and tokens are both given", "leave out one of the two"
        elif len(given) < wanted or (len(given) > wanted and not shares) or len({*given}) < len(given):
            problem = f"{'ids' if self.ids else 'tokens'} is {given}, and form is {self.form}"
            yield problem, f"name {wanted}{' or more' if shares else ''} by `ids: [0]` or by `tokens: ['Yes', 'No']`"
        if self.among == "all" and self.form != "probability":
            yield f"among is all, and form is {self.form}", "leave it out, or write `form: probability`"


@dataclass
class TurnConfig:
    """A message that follows every conversation."""

    role: str = setting("user", "Its role.")
    content: str = setting("", "Its text; {reference} is the sample's label.")


@dataclass
class RenderingConfig:
    """How conversations are rendered, where that is not as the checkpoint says."""

    chat_template: str | None = setting(None, "Jinja file of a chat template, in place of the checkpoint's own.")
    system: str | None = setting(None, "System message of conversations that have none; it may be empty.")
    generation_prompt: bool = setting(False, "End conversations with the template's prompt for an answer.")
    turns: list[TurnConfig] = setting([], "Messages that follow every conversation.", flag=False)

    def contradictions(self) -> Contradictions:
        if self.chat_template == "":
            yield "chat_template is empty", "name a file with a Jinja template, or leave it out"
        if not all(turn.content for turn in self.turns):
            yield "turns has a message without content", "write its text as `content`"
        if getattr(self, "truncation", "") == "right" and (self.turns or self.generation_prompt):
            problem = "truncation is right, which cuts off what turns and generation_prompt add"
            yield problem, "write `truncation: left`, or `error`"


@dataclass
class AdapterConfig:
    """An adapter of a model that several share, served under a name of its own."""

    name: str = setting("", "Name that clients ask for.")
    model: str = setting("", "Local folder or hub id of a LoRA adapter.")
    revision: str | None = setting(None, "Hub revision of the adapter.")
    attribute_weights: list[float] | None = setting(None, "As the model's, for this adapter.")
    mean: float | None = setting(None, "As the model's, for this adapter.", auto=True)
    std: float | None = setting(None, "As the model's, for this adapter.", auto=True, above=0)

    def contradictions(self) -> Contradictions:
        if not self.model:
            yield "model is not given", "name the folder or hub id of an adapter"
        yield from _check_weights(self)


@dataclass
class ModelConfig(IsolationConfig, RenderingConfig, EngineConfig):
    """One served reward model or scoring function."""

    kind: Literal["reward_model"] = setting("reward_model", "Kind of model.", flag=False)
    model: str = setting("", "Local folder, hub id, or module:function.", flag=False)
    name: str = setting("reward_model", "Name that clients ask for.")
    merge_attributes: bool = setting(
        True, "If false, `rewards` has one column per attribute, as in NeMo-Aligner's regression models."
    )
    truncation: Literal["error", "left", "right"] = setting(
        "error", "Refuse sequences that are too long, or drop tokens at this side."
    )
    pooling: Pooling = setting(
        "auto", "Token whose hidden state gives the reward. auto: as in the checkpoint's library."
    )
    step_separator: str | None = setting(None, "Text that ends a step (process reward models).")
    step_reduction: Literal["min", "mean", "last", "product"] = setting(
        "min", "Reduction of step rewards to the sequence's reward."
    )
    reward: TokenRewardConfig | None = setting(
        None, "Read rewards from a language model's logits, at `pooling`, or at each `step_separator`.", flag=False
    )
    adapters: list[AdapterConfig] = setting(
        [], "LoRA adapters over this model, served in its place; they share its memory and batches.", flag=False
    )

    def meaning(self) -> dict[str, Any]:
        """Returns the settings that change what a score means and are not the defaults, a template by its text."""
        fields = (field for field in dataclasses.fields(self) if field.name in _MEANING)
        found = {f.name: value for f in fields if (value := getattr(self, f.name)) != default_of(f)}
        if (path := found.get("chat_template")) is not None:
            found["chat_template"] = Path(path).read_text(encoding="utf-8")
        return {name: vars(x) if dataclasses.is_dataclass(x) else x for name, x in found.items()}

    def adapted(self) -> list[ModelConfig]:
        """Returns the settings of each adapter as those of a model."""
        own = [{k: v for k, v in vars(adapter).items() if v is not None} for adapter in self.adapters]
        return [dataclasses.replace(self, **{"base": self.model, "revision": None, "adapters": []} | x) for x in own]


@dataclass
class TeacherConfig(QueueConfig, LanguageModelConfig):
    """One served teacher or reference: a frozen causal language model that gives log-probs."""

    truncation: ClassVar[Literal["error"]] = "error"  # a cut sequence would shift the positions that clients count

    kind: Literal["teacher"] = setting("teacher", "Kind of model.", flag=False)
    name: str = setting("teacher", "Name that clients ask for.")
    max_top_k: int = setting(128, "Largest top_k, and most given ids per position.", least=1, most=65_536)
    student_tokenizer: str = setting("", "Folder of the students' tokenizer, if it is another: token ids are its.")


@dataclass
class JudgeConfig(QueueConfig, LanguageModelConfig):
    """One served judge: a frozen language model that answers each criterion of a rubric by one token."""

    truncation: ClassVar[Literal["error"]] = "error"  # the rubric's own words are not to be cut off

    kind: Literal["judge"] = setting("judge", "Kind of model.", flag=False)
    name: str = setting("judge", "Name that clients ask for.")
    rubric: str = setting("", "YAML file with the template, the labels and the criteria.")
    verdict: Literal["expected", "likeliest"] = setting(
        "expected",
        "Value of a criterion: the mean of the labels' values by their probabilities, or the likeliest value.",
    )
    max_other_mass: float = setting(
        0.5, "Largest probability mass outside the labels; above it, the sample fails.", least=0, most=1
    )

    def contradictions(self) -> Contradictions:
        if not self.rubric:
            yield "rubric is not given", "name the YAML file with the template, labels and criteria"


LoadedModelConfig = ModelConfig | TeacherConfig | JudgeConfig
"""The settings of a model that the server itself computes."""

ServedModelConfig = LoadedModelConfig | ChatJudgeConfig
"""The settings of one model of a server, distinguished by `kind`."""


@dataclass
class CriticConfig(LearningConfig, EngineConfig):
    """One critic that trains, and the reward model that may answer beside it."""

    model: str = setting("", "Local folder or hub id of a reward model or a critic.", flag=False)
    name: str = setting("critic", "Clients ask for NAME_infer, NAME_train, NAME_save, ...")
    reward_model: str | None = setting(
        None, "Folder or hub id of a reward model; with it, NAME_infer also returns rewards."
    )
    reward_model_memory: Literal["resident", "swap"] = setting(
        "resident", "resident: both models on the device. swap: one on the device, the other in host memory."
    )
    reward_revision: str | None = setting(None, "Hub revision of the reward model.")
    reward_attribute_weights: list[float] | None = setting(
        None, "Weights that combine the reward model's attributes; default: their mean."
    )
    reward_pooling: Pooling = setting("auto", "As `pooling`, for the reward model.")
    reward_mean: float | None = setting(
        None, "Subtracted from the reward model's rewards. auto: taken from its checkpoint.", auto=True
    )
    reward_std: float | None = setting(
        None,
        "Divides the reward model's rewards, after the mean is subtracted. auto: taken from its checkpoint.",
        auto=True,
        above=0,
    )
    checkpoint_dir: str | None = setting(
        None, "Folder for checkpoints and the journal; without it, training is lost at exit."
    )
    keep_checkpoints: int = setting(2, "Number of newest checkpoints to keep.", least=1)
    keep_best: str | None = setting(
        None, "Also keep the best checkpoint by this metric: explained_variance, loss, or a metric of a client's save."
    )
    keep_best_mode: Literal["auto", "max", "min"] = setting(
        "auto", "Best is the largest or smallest. auto: min for loss, max for others."
    )
    save_every: int | None = setting(None, "Train requests between checkpoints; default: only on request.", least=1)
    global_batch_size: int = setting(64, "Number of sequences in one optimiser step.", least=1)
    trainable: str | None = setting(
        None, "Train only weights whose whole names match this regular expression, such as `.*\\.mlp\\..*|score.*`."
    )
    frozen: str | None = setting(
        None, "Never train weights whose whole names match this regular expression, such as `.*\\.self_attn\\..*`."
    )
    loss_clip_val: float = setting(
        0.2, "Maximum distance of a value from prev_values in the loss. 0: no clipping.", least=0
    )

    @property
    def trains_all(self) -> bool:
        """Whether all weights are trained, and none is frozen."""
        return self.lora is None and self.trainable is None and self.frozen is None

    @property
    def best_mode(self) -> Literal["max", "min"]:
        """Returns `keep_best_mode`, with `auto` resolved."""
        if self.keep_best_mode != "auto":
            return self.keep_best_mode
        return "min" if self.keep_best == "loss" else "max"

    def contradictions(self) -> Contradictions:
        for name in FREEZING:
            if (pattern := getattr(self, name)) is None:
                continue
            try:
                re.compile(pattern)
            except re.error as e:
                problem = f"{name} is {pattern!r}, which is no regular expression: {e}"
                yield problem, r"give one that matches whole names of weights, such as '.*\.self_attn\..*'"
            if self.lora is not None:
                problem = f"{name} is {pattern!r}, but lora is set, which trains adapters and the head alone"
                yield problem, "choose the adapted layers by lora_targets, or remove lora"
        for name in ("save_every", "keep_best"):
            if self.checkpoint_dir is None and (value := getattr(self, name)) is not None:
                yield f"{name} is {value}, but there is no folder for checkpoints", "give checkpoint_dir"
        for field in dataclasses.fields(self):
            needs_model = field.name.startswith("reward_") and self.reward_model is None
            if needs_model and (value := getattr(self, field.name)) != field.default:
                yield f"{field.name} is {value}, but there is no reward model", "give reward_model"


FREEZING = ("trainable", "frozen")
"""The settings of `CriticConfig` that choose which weights learn."""


@dataclass
class ComponentConfig:
    """One component of a sum of rewards."""

    model: str = setting("", "Name of a served model or function.")
    weight: float = setting(1.0, "Weight in the sum. 0: only reported beside the sum.")
    normalize: Literal["none", "given", "running"] = setting(
        "none", "given: subtract `mean` and divide by `std`. running: by its rewards in this sum since the start."
    )
    mean: float | None = setting(None, "Subtracted from every reward if normalize is given; default: 0.")
    std: float | None = setting(
        None, "Divides every reward, after the mean is subtracted, if normalize is given; default: 1.", above=0
    )
    clip: float | None = setting(None, "Clip to -clip ... clip, after normalisation and before the weight.", above=0)
    judge: ChatJudgeConfig | None = setting(None, "Settings of a judge in words, in place of a name.")

    def contradictions(self) -> Contradictions:
        if self.model == "score":
            yield "model is score", "rename it: trainers use that name for the sum's reward"
        given = {name: value for name in ("mean", "std") if (value := getattr(self, name)) is not None}
        if self.normalize == "given" and not given:
            yield "normalize is given, but there is neither mean nor std", "give one or both"
        for name, value in given.items():
            if self.normalize != "given":
                problem = f"{name} is {value:g}, but normalize is {self.normalize}"
                yield problem, "write `normalize: given`, or leave it out"


@dataclass
class RewardConfig:
    """A weighted sum of rewards, served under its own name."""

    name: str = setting("reward_model", "Name that clients ask for.")
    components: list[ComponentConfig] = setting([], "The components of the sum.")
    clip: float | None = setting(None, "Clip the sum to -clip ... clip.", above=0)


@dataclass
class LimitsConfig:
    """Resource limits per server."""

    max_body_mb: int = setting(256, "Maximum size of a request body, in MiB.", least=1)
    max_request_sequences: int = setting(65_536, "Maximum number of sequences in a request.", least=1)
    max_requests: int = setting(4096, "Maximum number of requests in progress; above it: status 503.", least=1)
    max_bodies_mb: int = setting(
        2048, "Maximum total size of bodies in progress, in MiB; above it: status 503.",
        least=1,
    )  # fmt: skip
    max_connections: int = setting(
        16_384,
        "Maximum number of open HTTP connections, shared fairly between keys. Above it, a new one evicts an idle one, "
        "or gets status 503.",
        least=1,
    )
    header_timeout_s: float = setting(
        20.0, "Timeout of a connection's first request and of each request's head, in seconds.", least=0.1
    )
    read_timeout_s: float = setting(
        60.0, "Timeout between two parts of a body, and of a whole gRPC message, in seconds.", least=0.1
    )
    write_timeout_s: float = setting(60.0, "Timeout of reading the next part of a response, in seconds.", least=0.1)
    idle_timeout_s: float = setting(3600.0, "Timeout of an idle connection, in seconds.", least=0.1)
    request_timeout_s: float = setting(
        600.0, "Default timeout of a request, in seconds; none for a critic's requests.", above=0
    )
    group_size: int = setting(
        0, "Responses that /verify waits for, if the judge compares them and the call has no group_size; 0: none.",
        least=0,
    )  # fmt: skip
    group_wait_s: float = setting(300.0, "Longest wait for the rest of a group, in seconds.", above=0)
    group_incomplete: Literal["fail", "judge"] = setting("fail", "What happens to a group that stays incomplete.")
    shutdown_timeout_s: float = setting(30.0, "Grace period for accepted requests after SIGTERM, in seconds.", least=0)


@dataclass
class DashboardConfig:
    """The page that a server shows at `/`."""

    dashboard: bool = setting(True, "Serve the page at / and the API's at /docs, and keep a day of data.")
    dashboard_samples: bool = setting(
        False, "Show the texts of the best and worst samples on the page; with keys only to admins."
    )

    def contradictions(self) -> Contradictions:
        if self.dashboard_samples and not self.dashboard:
            yield "dashboard_samples is on, but dashboard is off", "leave out one of the two"


@dataclass
class ServerConfig(LimitsConfig, AccessConfig, ParallelConfig, DashboardConfig):
    """One server: its addresses, its limits and its models."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(5555, "HTTP port. 0: any free port.", least=0, most=65_535)
    grpc_port: int | None = setting(
        5557, "gRPC port. 0: any free port; default: the HTTP port + 2; --no-grpc turns gRPC off.", least=0, most=65_535
    )
    model_repository: str | None = setting(None, "Folder of checkpoints that admins may load while the server runs.")
    weight_transfer: str | None = setting(
        None, "Take live weights from trainers; files of safetensors that they name lie in this folder."
    )
    while_asleep: Literal["refuse", "wait"] = setting(
        "refuse", "What requests to a sleeping model do: get status 503 with Retry-After, or wait until it wakes up."
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Lowest level that is logged to stderr.")
    log_format: Literal["text", "json"] = setting("text", "Format of the logs and of console output.")
    traces: str | None = setting(
        None,
        "OTLP collector for traces over HTTP, such as http://127.0.0.1:4318; default: OTEL_EXPORTER_OTLP_ENDPOINT.",
    )
    models: list[ServedModelConfig] = setting([], "The served models.", flag=False)
    rewards: list[RewardConfig] = setting([], "Sums of the models' rewards.", flag=False)
    critic: CriticConfig | None = setting(None, "The critic.", flag=False)

    def __post_init__(self) -> None:
        """Makes models of the judges that stand in sums."""
        parts = [part for reward in self.rewards if reward is not None for part in reward.components]
        self.models = [*self.models, *take_out(parts)]

    def contradictions(self) -> Contradictions:
        yield from caught(check_reach, self, self.host)
        if self.traces is not None:
            yield from caught(check_traces_endpoint, self.traces)
        names = [name for model in self.models for name in _names(model)] + [reward.name for reward in self.rewards]
        if self.critic is not None:
            names += [f"{self.critic.name}_{suffix}" for suffix in ("infer", *Operation)]
        for name, count in Counter(names).items():
            if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
                yield f"{name!r} cannot be a model's name", "use ASCII letters, digits, underscores, points and hyphens"
            if count > 1:
                yield f"two models are named {name}", "give each a different `name:`, also those of `rewards:`"
        if self.fsdp and self.critic is None:
            advice = "leave it out; to split a model that is too large for one device, use tensor_parallel"
            yield "fsdp is on, but there is no critic to train", advice
        for i, reward in enumerate(self.rewards):
            yield from _check_sum(reward, f"rewards[{i}]", self.models)


def _names(model: ServedModelConfig) -> list[str]:
    """Returns the names under which a model is served."""
    return [x.name for x in getattr(model, "adapters", ())] or [model.name]


def _check_weights(settings: Any) -> Contradictions:
    for name in ("attribute_weights", "reward_attribute_weights"):
        if (weights := getattr(settings, name, None)) is not None and not any(weights):
            yield f"{name} is {weights}, by which every reward is 0", "give one attribute another weight"


def _check_sum(settings: RewardConfig, where: str, models: list[ServedModelConfig]) -> Contradictions:
    if not settings.components:
        yield f"{where} has no components", "add `components:` with `- model:` lines"
    rewarding = [name for model in models if not isinstance(model, TeacherConfig) for name in _names(model)]
    names = [component.model for component in settings.components]
    for i, component in enumerate(settings.components):
        if component.judge is not None:
            problem = f"{where}.components[{i}] has a model and a judge"
            yield problem, "leave out one, or list the judge under `models:`"
        elif names[i] not in rewarding:
            is_teacher = any(model.name == names[i] for model in models)
            why = "gives no reward" if is_teacher else "is not in `models:`"
            advice = f"use one of their names: {', '.join(rewarding)}" if rewarding else "list it under `models:` first"
            yield f"{where}.components[{i}].model is {names[i]!r}, which {why}", advice
        elif names[i] in names[:i]:
            yield f"{where} has {names[i]} twice", "leave one out, and add their weights"
    if settings.components and all(component.weight == 0 for component in settings.components):
        yield f"{where}: all weights are 0", "give one component another `weight:`"
