"""NeMo-RL's environment of a served reward model.

In the script that starts the run, before the data are set up:

    from guerdon.adapters import nemo_rl
    nemo_rl.register()

and in its YAML:

    env: {guerdon: {url: "http://10.0.0.1:5555"}}
    data: {default: {env_name: guerdon}}
"""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from guerdon.adapters.judge import TIMEOUT_S, judge, make_samples, refuse_unknown
from guerdon.client.reward_client import ScoreArgs
from guerdon.errors import ConfigError
from guerdon.messages import plain

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EnvironmentReturn", "RewardEnvironment", "register"]

log = logging.getLogger(__name__)

MessageLog = list[dict[str, Any]]
"""A conversation as NeMo-RL has it: its messages also have token ids and more."""

_MAX_STEPS = 128
"""Concurrent calls of `step`: asynchronous rollouts make one for each sample; the client's default `max_in_flight`."""
_TEMPLATE_START = re.compile(r"\s*(<s>|<bos>|<\|\w+\|>|<\w+_of_\w+>|\[INST\])")
"""Matches a text that a chat template has made."""


def register(name: str = "guerdon") -> None:
    """Registers the environment with NeMo-RL under `name`; raises ValueError if NeMo-RL has another of that name."""
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
    from nemo_rl.environments.utils import register_env

    actor = f"{__name__}.RewardEnvironmentActor"
    register_env(name, actor)
    ACTOR_ENVIRONMENT_REGISTRY[actor] = PY_EXECUTABLES.SYSTEM


def __getattr__(name: str) -> Any:
    """Returns `RewardEnvironmentActor`, the environment as a Ray actor; NeMo-RL looks for it by this name."""
    if name != "RewardEnvironmentActor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import ray  # installed with NeMo-RL

    # The actor holds only connections: if its process is lost, another one can repeat the call.
    actor = ray.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=_MAX_STEPS)
    return actor(RewardEnvironment)


class EnvironmentReturn(NamedTuple):
    """The fields of NeMo-RL's own, in its order."""

    observations: list[dict[str, str]]
    metadata: list[Any]
    next_stop_strings: list[None]
    rewards: Tensor
    terminateds: Tensor
    answers: list[str]


@dataclasses.dataclass(frozen=True)
class EnvironmentSettings:
    """The environment's settings in NeMo-RL's YAML, with their defaults."""

    url: str | Sequence[str]
    model: str = "reward_model"
    send: str = "messages"
    ending: str | None = None
    labels: str | None = None
    timeout_s: float = TIMEOUT_S

    @classmethod
    def parse(cls, cfg: Mapping[str, Any]) -> EnvironmentSettings:
        """Raises ConfigError without a URL, for an unknown setting and for an invalid value."""
        known = [field.name for field in dataclasses.fields(cls)]
        refuse_unknown(cfg.keys() - known, "of the environment: ", ", ".join(known))
        if "url" not in cfg:
            raise ConfigError("the environment has no url", "give env.NAME.url, such as http://10.0.0.1:5555")
        settings = cls(**cfg)
        if settings.send not in ("messages", "texts"):
            raise ConfigError(f"the environment's send is {settings.send!r}", "choose messages or texts")
        return settings

    def make_samples(self, logs: Sequence[MessageLog], metadata: Sequence[Any]) -> ScoreArgs:
        """Returns the client's arguments that score each log's last message after those before it."""
        talks = [[{key: m[key] for key in ("role", "content", "tool_calls") if key in m} for m in log] for log in logs]
        prompts: list[Any] = [talk[:-1] for talk in talks]
        completions: list[Any] = [talk[-1:] for talk in talks]
        if self.send == "texts":
            texts = [[message["content"] for message in plain(talk)] for talk in talks]
            prompts, completions = ["".join(text[:-1]) for text in texts], [text[-1] for text in texts]
        samples = make_samples(prompts, completions, self.ending)
        return samples if self.labels is None else {**samples, "labels": [entry[self.labels] for entry in metadata]}

    def warn_of_templates(self, talk: MessageLog) -> None:
        """Logs a warning if the server would apply a chat template to a text that has one already."""
        if self.send == "messages" and _TEMPLATE_START.match(str(talk[0].get("content"))):
            log.warning(
                "the prompts already have a chat template, and the server applies another one: set send: texts for "
                "processors that apply one, as NeMo-RL's own do"
            )


class RewardEnvironment:
    """Ends every episode after one turn, with the reward of the whole conversation; may be called from any thread."""

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        """`cfg` is its part of the YAML's `env`: `url` (or several), `model`, `timeout_s`, `send`, `ending`, `labels`.

        `send: messages`, the default, has the server apply the reward model's chat template. `send: texts` scores the
        concatenated contents, for prompts that already have a template, as from NeMo-RL's own processors. Those that
        the served model's template has made end as it ends an answer; `ending` replaces that.
        `labels` is the key of each sample's metadata to send to models that take labels. Raises ConfigError for
        invalid settings.
        """
        self._settings = EnvironmentSettings.parse(cfg)
        self._judge = judge(self._settings.url, self._settings.model, self._settings.timeout_s)
        self._first_step = threading.Lock()  # acquired once and never released

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Any], return_extracted_answer: bool = False
    ) -> EnvironmentReturn:
        """Returns rewards float32 `[B]`; raises SampleFailed if a sample got none, and what the server raised."""
        import torch  # installed with NeMo-RL

        if self._first_step.acquire(blocking=False):
            self._settings.warn_of_templates(message_log_batch[0])
        samples = self._settings.make_samples(message_log_batch, metadata)
        completes = self._settings.ending is None
        rewards = self._judge.score(completes=completes, **samples).raise_for_failed().rewards
        nothing = [None] * len(rewards)
        return EnvironmentReturn(
            [{"role": "environment", "content": f"Environment: {reward}"} for reward in rewards],
            nothing,
            nothing,
            torch.from_numpy(rewards),
            torch.ones(len(rewards), dtype=torch.bool),
            [log[-1]["content"] for log in message_log_batch],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """Returns the batch unchanged, and the mean, deviation and bounds of its rewards."""
        rewards = np.asarray(batch["rewards"], np.float64)
        names = ("mean", "std", "min", "max")
        return batch, {f"guerdon/{name}_reward": float(getattr(rewards, name)()) for name in names}

    def shutdown(self) -> None:
        """Does nothing; NeMo-RL calls it at the end of a run."""
