"""Rollouts and servers that the tests of rewards, critic and experience share."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

import served
from guerdon.actor.rollouts import Prompt, Rollout
from guerdon.core import Message
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import CriticConfig, ModelConfig, ServerConfig, TeacherConfig


def rollout(
    prompt: list[int],
    response: list[int],
    *,
    group: int = 0,
    index: int = 0,
    reward: float | None = None,
    values: list[float] | None = None,
    logprobs: list[float] | None = None,
    is_end: bool = True,
    text: str = "",
    has_eos: bool = False,
    prompt_text: str = "",
    messages: tuple[Message, ...] | None = None,
) -> Rollout:
    """A rollout of these tokens."""
    made = Prompt(group, np.array(prompt, np.int64), prompt_text, messages)
    return Rollout(
        made,
        group,
        index,
        np.array(prompt + response, np.int64),
        is_end,
        np.array(logprobs or [-1.0] * len(response), np.float32),
        text,
        reward,
        values=None if values is None else np.array(values, np.float32),
        has_eos=has_eos,
    )


@contextmanager
def serving(
    *models: ModelConfig | TeacherConfig, critic: CriticConfig | None = None, port: int = 0, grace_s: float = 30.0
) -> Iterator[RunningServer]:
    """A server of these models on loopback."""
    config = ServerConfig(port=port, grpc_port=None, models=list(models), critic=critic)
    with served.running(config=config, grace_s=grace_s) as server:
        yield server
