"""Shared by the adapters of reward functions: the served model, and trainers' samples as a client's arguments."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from guerdon.client import AsyncRewardClient, Credentials, RetryPolicy, RewardClient, Scores
from guerdon.client.reward_client import ScoreArgs
from guerdon.core import Message
from guerdon.errors import ConfigError, DeadlineExceeded, InvalidRequest, Unavailable
from guerdon.wire.score_tensors import prompt_groups

TIMEOUT_S = 600.0
"""The default time limit of a call with all its tries."""

_FAIL_FAST_S = 1.0
"""For so long after a call found no server, those that waited behind it fail as well."""

Prompt = str | Sequence[Message]
"""A text, or the messages of a conversation."""


class Judge:
    """A served reward model, for calls from any thread, process or event loop; made by `judge`."""

    def __init__(self, url: str | tuple[str, ...], model: str, timeout_s: float, credentials: Credentials) -> None:
        self._arguments = (url, model, timeout_s)
        self._credentials = credentials
        self._policy = RetryPolicy.patient(timeout_s, wait_for_start=True)
        self._client = RewardClient(url, model, policy=self._policy, credentials=credentials)
        self._by_loop: dict[asyncio.AbstractEventLoop, AsyncRewardClient] = {}
        self._lost_at, self._lost_why = -_FAIL_FAST_S, ""

    def __reduce__(self) -> Any:
        # Some trainers pickle their function at every call: it finds its connections, and the key, where it arrives.
        return judge, self._arguments

    def score(self, **samples: Unpack[ScoreArgs]) -> Scores:
        """Returns the samples' scores; blocks. Raises the server's error, or the connection's."""
        return self._client.score(**samples)

    def score_in_queue(self, **samples: Unpack[ScoreArgs]) -> Scores:
        """Scores as `score` does, but fails at once if the call just before found no server in time."""
        if time.monotonic() - self._lost_at < _FAIL_FAST_S:
            raise Unavailable(f"not asked, because the call before failed: {self._lost_why}")
        try:
            return self.score(**samples)
        except (Unavailable, DeadlineExceeded) as e:
            self._lost_at, self._lost_why = time.monotonic(), str(e)
            raise

    async def score_async(self, **samples: Unpack[ScoreArgs]) -> Scores:
        """Scores as `score` does, in the running event loop, which has its own connections."""
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            for other in list(self._by_loop):
                if other.is_closed():  # else its client would keep its sockets for ever
                    self._by_loop.pop(other, None)  # another thread may have removed it
            url, model, _ = self._arguments
            self._by_loop[loop] = AsyncRewardClient(url, model, policy=self._policy, credentials=self._credentials)
        return await self._by_loop[loop].score(**samples)


def judge(url: str | Sequence[str], model: str, timeout_s: float) -> Judge:
    """Returns this process' Judge of these arguments and the environment's credentials; it can be pickled.

    It connects at the first call. Servers that are down or have not started are retried until `timeout_s` after the
    call. Raises InvalidRequest for a malformed URL, ConfigError for invalid credentials.
    """
    key = (url if isinstance(url, str) else tuple(url), model, timeout_s, Credentials.from_environment())
    return _judges.get(key) or _judges.setdefault(key, Judge(*key))  # atomic: two threads get the same one


_judges: dict[tuple[str | tuple[str, ...], str, float, Credentials], Judge] = {}


def make_samples(prompts: Sequence[Prompt], completions: Sequence[Prompt], suffix: str = "") -> ScoreArgs:
    """Returns the client's arguments for prompts with completions, either all texts or all lists of messages.

    Appends `suffix` to each text. Equal prompts form one group, also across calls and processes. Raises InvalidRequest
    for a sample that is neither, or of another kind than the first one.
    """
    pairs = list(zip(prompts, completions, strict=True))
    is_text = not pairs or isinstance(pairs[0][0], str)
    for i, pair in enumerate(pairs):
        for name, part in zip(("prompt", "completion"), pair, strict=True):
            if isinstance(part, str) != is_text or not (is_text or _is_conversation(part)):
                found = "an empty list" if isinstance(part, list) and not part else f"a {type(part).__name__}"
                wanted = "a text" if is_text else "a list of messages"
                raise InvalidRequest(
                    f"sample {i}: the {name} is {found}, and must be {wanted} as those before it: give either texts or "
                    "lists of messages, for prompts and completions alike"
                )
    groups = prompt_groups([repr(prompt) for prompt in prompts])
    if is_text:
        texts = [f"{prompt}{completion}{suffix}" for prompt, completion in pairs]
        return {"texts": texts, "prompts": [str(prompt) for prompt in prompts], "groups": groups}
    return {"messages": [[*prompt, *completion] for prompt, completion in pairs], "groups": groups}


def named_components(scores: Scores) -> dict[str, np.ndarray]:
    """Returns each attribute, or component of a sum, by its name: float32 `[B]`, NaN if the sample failed.

    Leaves out attributes that the server does not name.
    """
    if scores.attributes is None or not scores.attribute_names:
        return {}
    return dict(zip(scores.attribute_names, scores.attributes.T, strict=True))


def none_for_nan(values: np.ndarray) -> list[float | None]:
    """Returns float32 `[B]` as a list of numbers, with None for NaN."""
    return [None if np.isnan(value) else value for value in values.tolist()]


def finite_mean(values: np.ndarray) -> float:
    """Returns the mean of the finite values; NaN without any."""
    numbers = values[np.isfinite(values)]
    return float(numbers.mean()) if len(numbers) else math.nan


def refuse_unknown(names: Iterable[str], where: str, known: str) -> None:
    """Raises ConfigError for the first of these unknown settings."""
    for name in sorted(names):
        raise ConfigError(f"unknown setting {where}{name}; known here: {known}", "correct its name, or leave it out")


def _is_conversation(part: Any) -> bool:
    """Returns whether it is a list of messages; Parquet gives arrays of them."""
    is_list = isinstance(part, list | tuple | np.ndarray)
    return is_list and len(part) > 0 and all(isinstance(message, Mapping) for message in part)
