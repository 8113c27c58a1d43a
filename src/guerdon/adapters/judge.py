"""Shared by the adapters of reward functions: the served model, and trainers' samples as a client's arguments."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from guerdon import errors
from guerdon.client import AsyncRewardClient, Credentials, RetryPolicy, RewardClient, Scores
from guerdon.client.calls import Texts
from guerdon.client.reward_client import ScoreArgs
from guerdon.core import Message
from guerdon.endings import Ending, ended
from guerdon.vocabulary import difference, identity, reported
from guerdon.wire.score_tensors import prompt_groups

log = logging.getLogger(__name__)

TIMEOUT_S = 600.0
"""The default time limit of a call with all its tries."""

_FAIL_FAST_S = 1.0
"""Calls queued behind one that found no server fail as well, for this long."""

Prompt = str | Sequence[Message]
"""A text, or the messages of a conversation."""


class JudgeClient:
    """A served reward model, for calls from any thread, process or event loop; made by `judge`."""

    def __init__(self, url: str | tuple[str, ...], model: str, timeout_s: float, credentials: Credentials) -> None:
        self._arguments = (url, model, timeout_s)
        self._credentials = credentials
        self._policy = RetryPolicy.patient(timeout_s, wait_for_start=True)
        self._client = RewardClient(url, model, policy=self._policy, credentials=credentials)
        self._by_loop: dict[asyncio.AbstractEventLoop, AsyncRewardClient] = {}
        self._lost_at, self._lost_why = -_FAIL_FAST_S, ""
        self._ending: Ending | None = None
        self._has_learned = self._has_warned = False
        self._version = ""

    def __reduce__(self) -> Any:
        # Some trainers pickle their function at every call: it finds its connections, and the key, where it arrives.
        return judge, self._arguments

    def config(self) -> dict[str, Any]:
        """Returns the model's configuration, in Triton's terms; blocks."""
        return self._client.config()

    def score(self, *, completes: bool = False, **samples: Unpack[ScoreArgs]) -> Scores:
        """Returns the samples' scores; blocks. Raises the server's error, or the connection's.

        If it `completes`, texts that the model's chat template has made end as it ends an answer, and so do token ids
        whose `prompts` it has made. Logs a warning if they do not, or if texts lack the template.
        """
        started = time.monotonic()
        is_second = False  # no third: replicas may have different versions for longer
        while True:
            if self._must_learn(samples):
                try:
                    self._learn(self._client.config())
                except errors.GuerdonError as e:
                    self._learn_nothing(e)
                samples["timeout_s"] = self._time_left(started)
            scores = self._client.score(**self._completed(samples, completes))
            if not self._has_changed(scores) or is_second:
                return scores
            is_second = True

    def score_in_queue(self, *, completes: bool = False, **samples: Unpack[ScoreArgs]) -> Scores:
        """Scores as `score` does, but fails at once if the call just before found no server in time."""
        if time.monotonic() - self._lost_at < _FAIL_FAST_S:
            raise errors.Unavailable(f"not sent, because the call before it failed: {self._lost_why}")
        try:
            return self.score(completes=completes, **samples)
        except (errors.Unavailable, errors.DeadlineExceeded) as e:
            self._lost_at, self._lost_why = time.monotonic(), str(e)
            raise

    async def score_async(self, *, completes: bool = False, **samples: Unpack[ScoreArgs]) -> Scores:
        """Scores as `score` does, in the running event loop, which has its own connections."""
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            for other in list(self._by_loop):
                if other.is_closed():  # else its client would keep its sockets for ever
                    self._by_loop.pop(other, None)  # another thread may have removed it
            url, model, _ = self._arguments
            self._by_loop[loop] = AsyncRewardClient(url, model, policy=self._policy, credentials=self._credentials)
        client = self._by_loop[loop]
        started = time.monotonic()
        is_second = False  # no third: replicas may have different versions for longer
        while True:
            if self._must_learn(samples):
                try:
                    self._learn(await client.config())
                except errors.GuerdonError as e:
                    self._learn_nothing(e)
                samples["timeout_s"] = self._time_left(started)
            scores = await client.score(**self._completed(samples, completes))
            if not self._has_changed(scores) or is_second:
                return scores
            is_second = True

    def _must_learn(self, samples: ScoreArgs) -> bool:
        return not self._has_learned and ("texts" in samples or "tokens" in samples)

    def _learn(self, config: dict[str, Any]) -> None:
        self._ending, self._has_learned = Ending.reported(config), True

    def _learn_nothing(self, error: errors.GuerdonError) -> None:
        """Goes on without an ending, because not every server has configurations; raises what would fail again."""
        if isinstance(error, errors.Unavailable | errors.DeadlineExceeded | errors.Unauthenticated | errors.Forbidden):
            raise error
        self._has_learned = True

    def _has_changed(self, scores: Scores) -> bool:
        """Whether the weights have changed since the ending was learned: the template may have changed, too."""
        has_changed = self._has_learned and self._version not in ("", scores.weights_version)
        self._version, self._has_learned = scores.weights_version, self._has_learned and not has_changed
        return has_changed

    def _time_left(self, started: float) -> float:
        return max(0.001, self._arguments[2] - (time.monotonic() - started))

    def _completed(self, samples: ScoreArgs, completes: bool) -> ScoreArgs:
        ending, texts, tokens = self._ending, samples.get("texts"), samples.get("tokens")
        if ending is None:
            return samples
        if texts is not None:
            prompts = samples.get("prompts") or [""] * len(texts)
            made = [ending.complete(text, prompt) for text, prompt in zip(texts, prompts, strict=True)]
            self._warn(ending, texts, made, completes)
            ended = [text if whole is None else whole for text, whole in zip(texts, made, strict=True)]
            return {**samples, "texts": ended} if completes else samples
        if tokens is not None and completes:
            pairs = zip(tokens, samples.get("prompts") or (), strict=True)
            rows = [ending.complete_ids(row) if ending.has_made(prompt) else [*row] for row, prompt in pairs]
            return {**samples, "tokens": rows}
        return samples

    def _warn(self, ending: Ending, texts: Texts, made: Sequence[str | None], completes: bool) -> None:
        """Logs a fault of the texts' template or ending once."""
        model = self._arguments[1]
        if self._has_warned:
            return
        if completes and None in made:
            self._has_warned = True
            log.warning(
                "%s has a chat template, but this text was not made by it and is scored unchanged: %r; send "
                "conversations or templated texts; if the model was trained on texts without the template, set "
                "`ending` to the text that followed them, or to an empty string",
                model,
                texts[made.index(None)][:80],
            )
        elif not completes and any(whole not in (text, None) for text, whole in zip(texts, made, strict=True)):
            self._has_warned = True
            log.warning(
                "texts that have the chat template of %s do not end with %r as it ends an answer: their scores differ "
                "from those of the same conversations; ending=None ends them so",
                model,
                ending.text,
            )


def judge(url: str | Sequence[str], model: str, timeout_s: float) -> JudgeClient:
    """Returns this process' JudgeClient of these arguments and the environment's credentials; it can be pickled.

    It connects at the first call. Servers that are down or have not started are retried until `timeout_s` after the
    call. Raises InvalidRequest for a malformed URL, ConfigError for invalid credentials.
    """
    key = (url if isinstance(url, str) else tuple(url), model, timeout_s, Credentials.from_environment())
    return _judges.get(key) or _judges.setdefault(key, JudgeClient(*key))  # atomic: two threads get the same one


_judges: dict[tuple[str | tuple[str, ...], str, float, Credentials], JudgeClient] = {}


def read_config(client: Any) -> dict[str, Any]:
    """Returns a client's model's configuration, {} if its server has none; raises the error of a server that is away.

    Any other fault fails the calls as well.
    """
    try:
        found: dict[str, Any] = client.config()
    except (errors.Unavailable, errors.DeadlineExceeded):
        raise
    except errors.GuerdonError:
        return {}
    return found


def refuse_other_tokenizer(tokenizer: Any, config: dict[str, Any], where: str, remedy: str) -> None:
    """Raises ConfigError if ids of the tokenizer, or processor, mean other tokens to the model of that configuration.

    Does nothing if that reports no tokenizer, or a tokenizer of one's own has no vocabulary to compare.
    """
    own = getattr(tokenizer, "tokenizer", tokenizer)
    theirs = reported(config) if hasattr(own, "get_added_vocab") else ""
    if theirs and (why := difference(identity(own), theirs)) is not None:
        raise errors.ConfigError(f"the tokenizer is not that of {where}: {why}", remedy)


def make_samples(prompts: Sequence[Prompt], completions: Sequence[Prompt], ending: str | None = None) -> ScoreArgs:
    """Returns the client's arguments for prompts with completions, either all texts or all lists of messages.

    Completes each text with `ending`, without doubling a part that it already has. Equal prompts form one group, also
    across calls and processes. Raises InvalidRequest for a sample that is neither, or of another kind than the first
    one.
    """
    pairs = list(zip(prompts, completions, strict=True))
    is_text = not pairs or isinstance(pairs[0][0], str)
    for i, pair in enumerate(pairs):
        for name, part in zip(("prompt", "completion"), pair, strict=True):
            if isinstance(part, str) != is_text or not (is_text or _is_conversation(part)):
                found = "an empty list" if isinstance(part, list) and not part else f"a {type(part).__name__}"
                wanted = "a text" if is_text else "a list of messages"
                raise errors.InvalidRequest(
                    f"sample {i}: the {name} is {found}, and must be {wanted} as those before it: give either texts or "
                    "lists of messages, for prompts and completions alike"
                )
    groups = prompt_groups([repr(prompt) for prompt in prompts])
    if is_text:
        texts = [f"{prompt}{ended(str(completion), ending or '')}" for prompt, completion in pairs]
        return {"texts": texts, "prompts": [str(prompt) for prompt in prompts], "groups": groups}
    return {"messages": [[*prompt, *completion] for prompt, completion in pairs], "groups": groups}


def named_components(scores: Scores) -> dict[str, np.ndarray]:
    """Returns each attribute, or component of a sum, by its name: float32 `[B]`, NaN if the sample failed.

    Leaves out attributes that the server does not name.
    """
    if scores.attributes is None or not scores.attribute_names:
        return {}
    return dict(zip(scores.attribute_names, scores.attributes.T, strict=True))


def only_reward(scores: Scores) -> tuple[float, dict[str, float]]:
    """Returns the reward of the only sample, and its components by name; raises SampleFailed if it failed."""
    reward = float(scores.raise_for_failed().rewards[0])
    return reward, {name: float(values[0]) for name, values in named_components(scores).items()}


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
        raise errors.ConfigError(
            f"unknown setting {where}{name}; known here: {known}", "correct its name, or leave it out"
        )


def _is_conversation(part: Any) -> bool:
    """Returns whether it is a list (from Parquet: an array) of messages."""
    is_list = isinstance(part, list | tuple | np.ndarray)
    return is_list and len(part) > 0 and all(isinstance(message, Mapping) for message in part)
